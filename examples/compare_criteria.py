"""Every criterion on one model: how far a pruned model's predictions are from the dense model's.

The distance is the mean Kullback-Leibler divergence per token, on tokens that took no part in
pruning. (On random weights it says nothing about which criterion is best for a trained model: use
`symprune sweep` for that.)
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import tiny_model, tiny_tokens
from torch import Tensor

from symprune import Recipe, prune
from symprune.criteria import available


@torch.no_grad()
def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens).logits.log_softmax(-1).flatten(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare pruning criteria.")
    parser.add_argument("--methods", nargs="*", default=list(available()))
    parser.add_argument("--sparsity", type=float, default=0.5)
    given = parser.parse_args()

    test = tiny_tokens(seed=1)
    dense = log_probabilities(tiny_model(), test)
    print(f"{'method':18} divergence from the dense model at {given.sparsity:.0%}")
    for method in given.methods:
        model = tiny_model()
        prune(model, tiny_tokens(), Recipe(method, sparsity=given.sparsity))
        pruned = log_probabilities(model, test)
        distance = torch.nn.functional.kl_div(pruned, dense, reduction="batchmean", log_target=True)
        print(f"{method:18} {distance.item():.5f}")


if __name__ == "__main__":
    main()
