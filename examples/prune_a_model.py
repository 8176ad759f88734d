"""Prune a model from Python: half of its weights go, and the result is a plain checkpoint.

    python examples/prune_a_model.py                                  # a tiny random model
    python examples/prune_a_model.py --model HuggingFaceTB/SmolLM2-135M --output pruned

With `--model`, any causal language model that transformers loads is calibrated on the text that
comes with Python, so no data set is downloaded.
"""

from __future__ import annotations

import argparse

from tiny import tiny_model, tiny_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from symprune import Recipe, prune


def main() -> None:
    parser = argparse.ArgumentParser(description="Prune a language model.")
    parser.add_argument("--model", help="a hub id or a folder; left out, a tiny random model")
    parser.add_argument("--method", default="ria", help="see `symprune methods`")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--seqlen", type=int, default=512, help="tokens per calibration sample")
    parser.add_argument("--output", help="the folder to save the pruned model in")
    given = parser.parse_args()

    settings = {"calibration": "builtin", "nsamples": 16, "seqlen": given.seqlen}
    recipe = Recipe(given.method, sparsity=given.sparsity, **settings)
    if given.model:
        model = AutoModelForCausalLM.from_pretrained(given.model)
        report = prune(model, AutoTokenizer.from_pretrained(given.model), recipe)
    else:
        model = tiny_model()
        report = prune(model, tiny_tokens(), recipe)  # tokens may be given instead of a tokenizer

    for kind, (removed, size) in report.by_kind().items():
        print(f"{kind:20} {removed:>12,} of {size:>12,} weights removed")
    print(f"In total {report.sparsity:.1%} of the decoder blocks' weights are zero.")
    if given.output:
        model.save_pretrained(given.output)
        report.masks.save(given.output)
        print(f"The model and its masks are in {given.output}.")


if __name__ == "__main__":
    main()
