"""Prune a language model, then fine-tune it with partners whose text stays with them, zeros kept.

Three owners with different text train the kept weights by FedAvg, with floats and with int8 values
in their messages, and LoRA adapters on the frozen base. (The model and its text are random here;
`scripts/fed/language_model.py` has SmolLM2 and real text.)
"""

from __future__ import annotations

import argparse
from typing import Any

from tiny import tiny_model, tiny_tokens

from symprune import MaskSet, Recipe, prune
from symprune.fed import Problem, add_lora, build, merge_lora, simulate

FROZEN = ("*embed*", "*norm*", "lm_head*")


def partners(model: Any, **options: Any) -> Problem:
    texts = [tiny_tokens(samples=6, seed=owner) for owner in range(3)]
    tests = [tiny_tokens(samples=2, seed=owner + 10) for owner in range(3)]
    return Problem.causal_lm(model, texts, length=32, client_tests=tests, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a pruned model with partners.")
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds

    model = tiny_model()
    masks = prune(model, tiny_tokens(), Recipe("wanda", sparsity=0.5)).masks
    for compressor in ("identity", "int8"):
        problem = partners(model, exempt=FROZEN)
        fedavg = build("fedavg", gamma=0.3, p=0.5, batch=2, compressor=compressor)
        result = simulate(fedavg, problem, rounds, masks=masks, evaluate_every=rounds)
        show(f"FedAvg, {compressor}", problem, result)
        zeros = sum(int((result.parameters[name] == 0).sum()) for name in masks)
        print(
            f"{zeros / sum(mask.numel() for mask in masks.values()):.1%} of its weights are zero."
        )

    adapted = add_lora(model, masks, rank=4, targets=("q_proj", "down_proj"))
    problem = partners(adapted)
    result = simulate(build("fedavg", gamma=0.3, p=0.5, batch=2), problem, rounds)
    show("LoRA", problem, result)
    merged = merge_lora(adapted, result.parameters)
    print(f"Merged, {MaskSet.of(merged).sparsity():.1%} of its weights are zero.")


def show(name: str, problem: Problem, result: Any) -> None:
    perplexity = "  ".join(f"{s['perplexity']:6.1f}" for s in problem.evaluate_each(result.model))
    sent = result.history[-1]["bytes_up"] / 1000
    print(f"{name:18} perplexity {perplexity}, {sent:,.0f} kB sent up")


if __name__ == "__main__":
    main()
