"""Train a sparse classifier across ten clients that each have two of the ten digits.

Sparse-ProxSkip finds a model of which nine weights in ten are zero; FedAvg with hard thresholding
(fedht) is the baseline. Every message is counted by the byte.
"""

from __future__ import annotations

import argparse

from symprune.fed import build, make_problem, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description="Federated training of a sparse model.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sparsity", type=float, default=0.9)
    given = parser.parse_args()

    problem = make_problem("digits", split="class:2", clients=10, l2=1e-3)
    for name in ("sparse-proxskip", "fedht"):
        algorithm = build(name, sparsity=given.sparsity, p=0.2, gamma=0.45)
        result = simulate(algorithm, problem, rounds=given.rounds, evaluate_every=given.rounds)
        last, zeros = result.history[-1], (result.model == 0).float().mean().item()
        print(
            f"{name:16} accuracy {last['accuracy']:.1%} with {zeros:.0%} zeros, "
            f"{last['bytes_up'] / 1e6:.2f} MB sent to the server"
        )


if __name__ == "__main__":
    main()
