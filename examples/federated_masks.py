"""Prune a network, then train it on across ten clients with its zeros kept.

The masks keep the largest weights of every matrix. FedAvg and EF21 train what is kept, with floats,
int8 and int4 values in their messages; every message is counted by the byte.
"""

from __future__ import annotations

import argparse

from symprune import MaskSet
from symprune.fed import build, make_problem, simulate

RUNS = {
    "fedavg": ("identity", "int8", "int4"),
    "ef21": ("top-k:0.1", "top-k:0.1+int8", "top-k:0.1+int4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Federated training of a pruned network.")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--sparsity", type=float, default=0.5)
    given = parser.parse_args()

    problem = make_problem("digits", "mlp:64", split="class:2", clients=10)
    masks = MaskSet()
    for name, weight in problem.layout.split(problem.initial()).items():
        if weight.dim() == 2:
            masks[name] = weight.abs() >= weight.abs().quantile(given.sparsity)
    weights = sum(mask.numel() for mask in masks.values())
    print(f"{'':22}accuracy  zeros  kB per client and round, up and down")
    for name, compressors in RUNS.items():
        for compressor in compressors:
            algorithm = build(name, gamma=0.2, compressor=compressor)
            result = simulate(
                algorithm, problem, given.rounds, masks=masks, evaluate_every=given.rounds
            )
            accuracy, bill = result.history[-1]["accuracy"], result.ledger.bill(given.rounds)
            up, down = (bill[way]["per client and round"] / 1000 for way in ("up", "down"))
            zeros = sum(int((result.parameters[matrix] == 0).sum()) for matrix in masks) / weights
            label = f"{name}, {compressor}"
            print(f"{label:22}{accuracy:8.1%}  {zeros:5.1%}  {up:6.2f}  {down:6.2f}")


if __name__ == "__main__":
    main()
