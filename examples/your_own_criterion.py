"""A criterion of your own: a function from a weight and its statistics to a score.

Positional arguments after the weight name the statistics it needs (`input_norm`, `output_norm`,
`generator`); keyword-only arguments are its parameters. The lowest scores are pruned. On the
command line the same function is `--method your_own_criterion:cubic --set power=2`.
"""

from __future__ import annotations

from tiny import tiny_model, tiny_tokens
from torch import Tensor

from symprune import Recipe, criterion, prune


@criterion
def cubic(weight: Tensor, input_norm: Tensor, *, power: float = 3.0) -> Tensor:
    """|W|^power x"""
    return weight.abs() ** power * input_norm


def main() -> None:
    wanda = prune(tiny_model(), tiny_tokens(), Recipe("wanda")).masks
    for power in (1.0, 2.0, 3.0):
        masks = prune(tiny_model(), tiny_tokens(), Recipe("cubic", {"power": power})).masks
        shared = masks.overlap(wanda).values()
        print(f"power {power:g}: the masks overlap with Wanda's by {sum(shared) / len(shared):.1%}")


if __name__ == "__main__":
    main()
