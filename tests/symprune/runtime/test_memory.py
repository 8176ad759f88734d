"""How much memory a packed model takes, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import packed_models
import torch
import transformers as hf

from symprune.runtime.pack_model import pack_model
from symprune.runtime.packable import packable

MEGABYTE = 2**20
# What is taken while a matrix is checked or expanded in parts; it does not grow with the model.
SLACK = 48 * MEGABYTE

PROGRAM = """
import json, sys
import psutil, torch
import symprune
from transformers import AutoModelForCausalLM

def resident():
    return psutil.Process().memory_info().rss

tokens = torch.arange(1, 9)[None]
with torch.no_grad():
    AutoModelForCausalLM.from_pretrained(sys.argv[1])(tokens)
    before = resident()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
    loaded = resident()
    model(tokens)
    print(json.dumps([loaded - before, resident() - before, model.get_memory_footprint()]))
"""


def save_packed(folder: Path, width: int) -> tuple[int, int]:
    """A packed model; its bytes dense and packed."""
    config = hf.LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    dense = model.get_memory_footprint()
    codes = {}
    for name in packable(model):
        weight = model.get_parameter(name).data
        weight[torch.rand(weight.shape) < 0.5] = 0
        codes[name] = packed_models.rounded(weight, "int4")
    pack_model(model, codes)
    model.save_pretrained(folder)
    return dense, model.get_memory_footprint()


def test_a_packed_model_takes_the_memory_of_its_packed_weights(tmp_path: Path) -> None:
    save_packed(tmp_path / "small", 64)
    dense, packed = save_packed(tmp_path / "large", 1536)
    given = [str(tmp_path / "small"), str(tmp_path / "large")]
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given], capture_output=True, text=True, check=True
    )
    loaded, running, footprint = json.loads(told.stdout)
    assert footprint == packed < 0.12 * dense
    assert loaded < 1.1 * packed + SLACK < 0.4 * dense
    assert running < 1.1 * packed + 2 * SLACK < 0.6 * dense
