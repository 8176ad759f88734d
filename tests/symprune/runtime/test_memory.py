"""How much memory a packed model takes, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import packed_models
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from symprune.runtime.pack_model import pack_model
from symprune.runtime.packable import packable

LAYERS = (3, 11)
# Beside the weights a process takes more once, not the more the larger a model is.
ONCE = 24 * 2**20

PROGRAM = """
import json, sys
import psutil, torch
import symprune
from transformers import AutoModelForCausalLM

def resident():
    return psutil.Process().memory_info().rss

tokens, found, models = torch.arange(1, 9)[None], [], []
with torch.no_grad():
    AutoModelForCausalLM.from_pretrained(sys.argv[1])(tokens)
    for folder in sys.argv[2:]:
        before = resident()
        models.append(AutoModelForCausalLM.from_pretrained(folder))
        loaded = resident()
        models[-1](tokens)
        found.append([loaded - before, resident() - before, models[-1].get_memory_footprint()])
print(json.dumps(found))
"""


def save_packed(folder: Path, width: int) -> hf.LlamaConfig:
    """A packed model of one layer, half of whose weights are left."""
    config = hf.LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    codes = {}
    for name in packable(model):
        weight = model.get_parameter(name).data
        weight[torch.rand(weight.shape) < 0.5] = 0
        codes[name] = packed_models.rounded(weight, "int4")
    pack_model(model, codes)
    model.save_pretrained(folder)
    return config


def save_deeper(folder: Path, one: Path, layers: int) -> None:
    """The same with its layer many times over."""
    config = json.loads((one / "config.json").read_text())
    stored, first = load_file(one / "model.safetensors"), "model.layers.0."
    for name in [name for name in stored if name.startswith(first)]:
        for layer in range(1, layers):
            again = name.replace(first, f"model.layers.{layer}.", 1)
            stored[again] = stored[name].clone()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def test_memory_grows_by_what_a_packed_model_is_larger(tmp_path: Path) -> None:
    """Within a tenth, loaded and after it has run; so nothing is there twice, or dense."""
    save_packed(tmp_path / "tiny", 64)
    config = save_packed(tmp_path / "one", 1024)
    given = [str(tmp_path / "tiny")]
    for layers in LAYERS:
        save_deeper(tmp_path / str(layers), tmp_path / "one", layers)
        given.append(str(tmp_path / str(layers)))
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given], capture_output=True, text=True, check=True
    )
    small, large = json.loads(told.stdout)
    packed = large[2] - small[2]
    width = config.hidden_size
    dense = 4 * (LAYERS[1] - LAYERS[0]) * (4 + 3 * 3) * width**2
    assert 0.1 * dense < packed < 0.11 * dense
    for which in range(2):
        assert 0.9 * packed < large[which] - small[which] < 1.1 * packed
        assert small[which] < 1.1 * small[2] + ONCE
