"""The federated papers' comparisons, small but real: tuned steps, several seeds, table and plot.

    python scripts/fed/reproduce.py EXPERIMENT [--output out/fed] [--seeds 3]

Experiments that need data take it from the folder of SYMPRUNE_ASSETS. Every method of a comparison
is tuned on the same grid by its training loss, with a seed that is not reported.
`docs/federated.md` reads the results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import experiments_cohort
import experiments_ef_bv
import experiments_fedp3
import experiments_fedspa
import experiments_fedsparse
import experiments_images
import experiments_scafflix
import experiments_similarity
import experiments_sparse
from experiment_tables import Experiment
from history_report import Report

from symprune.cli import console

EXPERIMENTS: dict[str, Callable[[Report], None]] = {
    **experiments_ef_bv.EXPERIMENTS,
    **experiments_sparse.EXPERIMENTS,
    **experiments_scafflix.EXPERIMENTS,
}

FAMILIES: dict[str, Experiment] = {
    **experiments_cohort.EXPERIMENTS,
    **experiments_fedsparse.EXPERIMENTS,
    **experiments_fedspa.EXPERIMENTS,
    **experiments_fedp3.EXPERIMENTS,
    **experiments_scafflix.NETWORKS,
    **experiments_images.EXPERIMENTS,
    **experiments_similarity.EXPERIMENTS,
}
"""Experiments that print their tables and choose their own seeds."""


def _first_line(work: Callable[..., Any]) -> str:
    return (work.__doc__ or "").strip().partition("\n")[0]


def main() -> None:
    everything = {**EXPERIMENTS, **FAMILIES}
    listing = "\n".join(f"  {name:24}{_first_line(w)}" for name, w in everything.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=listing, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=[*everything, "all"], metavar="EXPERIMENT")
    parser.add_argument("--output", type=Path, default=Path("out/fed"))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    for name in everything if arguments.experiment == "all" else [arguments.experiment]:
        if name in FAMILIES:
            FAMILIES[name]()
            continue
        report = Report(name, arguments.output, arguments.seeds)
        EXPERIMENTS[name](report)
        report.save()


if __name__ == "__main__":
    console.run(main)
