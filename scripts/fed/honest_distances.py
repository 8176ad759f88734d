"""How far honest clients' replies are from the others', in the units of `--robust norm:K`.

The largest distance of a reply over whole runs on splits that no two clients have alike: a K above
it leaves no honest client out. With --liar one client of seven lies as far out as K allows, in one
direction in every round: what a K is worth.

    python scripts/fed/honest_distances.py fedavg proxskip scaffold ef21
    python scripts/fed/honest_distances.py --liar 10 20 100 1000
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from symprune.fed import robust
from symprune.fed.algorithms import ALGORITHMS, build
from symprune.fed.problems.make import make_problem
from symprune.fed.protocol import Turn
from symprune.fed.robust import Usual, field_distances
from symprune.fed.simulate import simulate
from symprune.fed.wire.parcel import Received

SPLITS = (
    *(("digits", split, 10) for split in ("iid", "class:2", "dirichlet:0.1", "quantity:0.3")),
    *(("digits", "class:2", 3), ("digits", "dirichlet:0.3", 30)),
    ("breast-cancer", "dirichlet:0.1", 10),
)
LOOSE = 1e100
LIAR = 2


def farthest(name: str, rounds: int) -> Iterator[tuple[str, float]]:
    """Of every split the largest distance of a reply in a run."""
    for data, split, clients in SPLITS:
        found = 0.0

        def watch(view: Tensor, size: float) -> Tensor:
            nonlocal found
            away = field_distances(view, size)
            found = max(found, float(away.max()))
            return away

        problem = make_problem(data, split=split, clients=clients, l2=0.1)
        before, robust.field_distances = robust.field_distances, watch
        try:
            simulate(build(name), problem, rounds, robust=f"norm:{LOOSE}", evaluate_every=0)
        finally:
            robust.field_distances = before
        yield f"{data} {split}, {clients} clients", found


def lied_to(bound: float, rounds: int = 10) -> tuple[float, float]:
    """Loss and accuracy of FedAvg where one of seven lies at nine tenths of the bound."""
    problem = make_problem("digits", split="dirichlet:1", clients=7, l2=0.1)
    algorithm, usual = ALGORITHMS["fedavg"], Usual()
    honest = algorithm.reply

    def lie(self: object, w: Tensor, x: Tensor, turn: Turn) -> Received:
        rows = honest(self, w, x, turn)["w"]
        centre = rows.median(0).values
        usual["w"] = max(usual.get("w", 0.0), float((rows - centre).norm(dim=1).median()))
        away = (x[0] - centre) / (x[0] - centre).norm()
        false = centre + 0.9 * bound * usual["w"] * away
        return {"w": torch.where((turn.clients == LIAR).unsqueeze(1), false, rows)}

    algorithm.reply = lie
    try:
        run = simulate(build("fedavg"), problem, rounds, robust=f"norm:{bound}",
                       evaluate_every=rounds)  # fmt: skip
    finally:
        algorithm.reply = honest
    return run.history[-1]["loss"], run.history[-1]["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("algorithms", nargs="*")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--liar", type=float, nargs="+", default=[])
    asked = parser.parse_args()
    for name in asked.algorithms:
        for split, far in farthest(name, asked.rounds):
            print(f"{name}, {split}: {far:.1f}", flush=True)
    for bound in asked.liar:
        loss, accuracy = lied_to(bound)
        print(f"norm:{bound:g}, a liar: loss {loss:.4g}, accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
