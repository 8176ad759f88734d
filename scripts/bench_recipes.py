"""What the recipes that ship cost, and where their time goes, beside what they keep.

    python scripts/bench_recipes.py --model M [--recipes fast,balanced,best] [--amounts 50,2:4]
                                    [--changes sequential,targets-mixed] [--seeds 1,2]

Processor time of a whole run, in seconds and in times of the first recipe's at the same amount and
seed; shares of its stages, `rest` being text the model writes, and reading; perplexity on the test
text and, for choices, on another. `--changes` measures every recipe with one thing changed as well.
Runs resume: finished cells are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from frontier import amount_of, pick
from rich.table import Table
from trials import Trials

from symprune import Recipe
from symprune.cli import console
from symprune.cli import options as o
from symprune.jobs.sweep import append_result, read_results

RESULT = {"key": str, "test": float, "valid": float, "seconds": float, "shares": dict}
CHANGES: dict[str, dict[str, Any]] = {
    "inputs-dense": {"inputs": "dense"},
    "sequential": {"sequential": True},
    "targets-mixed": {"targets": "mixed"},
    "targets-dense": {"targets": "dense"},
    "no-allocation": {"allocate": None},
    "part": {"reconstruct": {"name": "part", "epochs": 1}},
}


def main(
    model: o.Model,
    valid_data: Annotated[str, typer.Option(help="Text that choices may be made on.")],
    recipes: Annotated[str, typer.Option()] = "fast,balanced,mask-only,best",
    amounts: Annotated[str, typer.Option(help="Percentages and patterns.")] = "50",
    changes: Annotated[str, typer.Option(help=", ".join(CHANGES))] = "",
    seeds: Annotated[str, typer.Option()] = "0",
    calibration: Annotated[str, typer.Option()] = "c4",
    nsamples: Annotated[int, typer.Option()] = 128,
    seqlen: Annotated[int, typer.Option()] = 2048,
    eval_data: Annotated[str, typer.Option()] = "wikitext2",
    eval_windows: o.EvalWindows = None,
    output: Annotated[Path, typer.Option(help="Finished cells.")] = Path("out/recipes.jsonl"),
) -> None:
    """Measure time and perplexity of recipes."""
    text = {"calibration": calibration, "nsamples": nsamples, "seqlen": seqlen}
    ways = {"": {}} | {name: CHANGES[name] for name in pick("change", changes, CHANGES)}
    cells: dict[str, Recipe] = {}
    for amount in amounts.split(","):
        for seed in map(int, seeds.split(",")):
            for name in recipes.split(","):
                made = Recipe.named(name).with_changes(**amount_of(amount), **text, seed=seed)
                for way, change in ways.items():
                    key = f"{amount} seed {seed} {name} {way}".strip()
                    cells[key] = made.with_changes(**change)
    console.prepare_libraries()
    texts, trials = {"test": eval_data, "valid": valid_data}, None
    for key, recipe in cells.items():
        if key in read_results(output, RESULT):
            continue
        console.out.print(key)
        trials = trials or Trials(model, texts, seqlen, eval_windows)
        with trials.pruned(recipe) as trial:
            found = {"seconds": trial.seconds, "shares": trial.shares}
            append_result(output, {"key": key, **found, **trial.perplexities})
    show(read_results(output, RESULT), list(cells))


def show(results: dict[str, dict[str, Any]], keys: list[str]) -> None:
    table = Table("", "seconds", "times the first", "stages", "test", "validation")
    first: dict[str, float] = {}
    for key in keys:
        found = results[key]
        cell = key[: key.index(" seed ") + len(" seed 0")]
        times = found["seconds"] / first.setdefault(cell, found["seconds"])
        shares = {**found["shares"], "rest": 1 - sum(found["shares"].values())}
        stages = ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items())
        table.add_row(
            key, f"{found['seconds']:.0f}", f"{times:.1f}", stages,
            f"{found['test']:.1f}", f"{found['valid']:.1f}",
        )  # fmt: skip
    console.out.print(table)


if __name__ == "__main__":
    console.run(lambda: typer.run(main))
