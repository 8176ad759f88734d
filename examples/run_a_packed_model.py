"""Prune a model to 4-bit values, pack it, and let it write from the packed weights.

`import symprune` is all that transformers needs to load what was saved; a folder that
`symprune prune --values int4` or `symprune pack` wrote is loaded in the same way.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from tiny import tiny_model, tiny_tokens
from transformers import AutoModelForCausalLM

import symprune


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a model from packed weights.")
    parser.add_argument("--values", default="int4", help="int8, int4, int3 or int2")
    values = parser.parse_args().values

    model, tokens = tiny_model(), tiny_tokens()
    dense = model.get_memory_footprint()
    report = symprune.prune(model, tokens, symprune.Recipe("wanda", values=values))
    symprune.pack_model(model, report.values)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        packed = AutoModelForCausalLM.from_pretrained(folder)
    print(packed.model.layers[0].mlp)
    print(f"{dense:,} bytes dense, {packed.get_memory_footprint():,} packed")
    with torch.no_grad():
        apart = (packed(tokens).logits - packed.dequantize()(tokens).logits).abs().max()
    print(f"The logits differ from the dequantised model's by {apart:.0e} at most.")


if __name__ == "__main__":
    main()
