"""What each step brings: criteria alone, refined, updated, both, against peers and the recipes.

    python scripts/frontier.py --model M [--amounts 50,2:4] [--methods wanda,ria] [--steps swap,lsq]
                               [--peers sparsegpt,admm,best] [--allocations owl] [--seeds 3]
                               [--valid-data TEXT]

One table of perplexities per amount; with a text for validation, behind a slash, those on it. The
peers are methods of others as this tool computes them, on the same calibration text, SparseGPT also
with every allocation. A seed draws other calibration text (and, for stochRIA, other samples). Runs
resume: finished cells are kept.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import typer
from rich.table import Table

from symprune.allocate import ALLOCATIONS
from symprune.checkpoint.load import load_with_tokenizer
from symprune.cli import console
from symprune.cli import options as o
from symprune.errors import SympruneError
from symprune.jobs.sweep import Grid, Sweep
from symprune.recipe import Recipe

METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {},
    "wanda": {},
    "ria": {"alpha": 1},
    "symwanda": {"balance": 0.1},
    "stochria": {"alpha": 1},
}
STEPS: dict[str, dict[str, Any]] = {
    "alone": {},
    "r2-dsnot": {"refine": "r2-dsnot"},
    "swap": {"refine": "swap"},
    "lsq": {"update": "lsq"},
    "swap+lsq": {"refine": "swap", "update": "lsq"},
}
SPARSEGPT = Recipe(method="magnitude", update="sparsegpt")
PEERS: dict[str, Recipe] = {
    "wanda++": Recipe(method="wanda-plus-plus"),
    "sparsegpt": SPARSEGPT,
    "admm": Recipe(method="wanda", update="admm"),
    "alps": Recipe(method="wanda", update="alps"),
    **{name: Recipe.named(name) for name in ("mask-only", "balanced", "best")},
}


def pick(what: str, text: str, known: dict[str, Any]) -> list[str]:
    """The names in a list with commas; all of them for `all`, none for an empty text."""
    names = list(known) if text == "all" else [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise SympruneError(f"There is no {what} {name!r}; choose {', '.join(known)}.")
    return names


def amount_of(text: str) -> dict[str, Any]:
    """`50` is a sparsity in percent, `2:4` a pattern."""
    if ":" in text:
        return {"pattern": text}
    if not text.isdecimal():
        raise SympruneError(f"An amount is a percentage or a pattern, not {text!r}.")
    return {"sparsity": int(text) / 100}


def show(values: list[float]) -> str:
    """Their mean and, of several, how far they are from it."""
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}"


def main(
    model: o.Model,
    amounts: Annotated[str, typer.Option(help="Percentages and patterns.")] = "50,60,70,2:4,4:8",
    methods: Annotated[str, typer.Option(help=", ".join(METHODS))] = "all",
    steps: Annotated[str, typer.Option(help=", ".join(STEPS))] = "all",
    peers: Annotated[str, typer.Option(help=", ".join(PEERS))] = "all",
    allocations: Annotated[str, typer.Option(help=", ".join(ALLOCATIONS))] = "all",
    seeds: Annotated[int, typer.Option()] = 1,
    calibration: Annotated[str, typer.Option()] = "c4",
    nsamples: Annotated[int, typer.Option()] = 128,
    seqlen: Annotated[int, typer.Option()] = 2048,
    eval_data: Annotated[str, typer.Option()] = "wikitext2",
    valid_data: Annotated[
        str | None, typer.Option(help="Text that choices may be made on, measured as well.")
    ] = None,
    eval_windows: o.EvalWindows = None,
    output: Annotated[Path, typer.Option(help="Finished cells.")] = Path("out/frontier.jsonl"),
) -> None:
    """Measure what refinement and update bring, per amount."""
    rows, columns = pick("method", methods, METHODS), pick("step", steps, STEPS)
    chosen = {name: PEERS[name] for name in pick("peer", peers, PEERS)}
    if "sparsegpt" in chosen:
        divided = pick("allocation", allocations, ALLOCATIONS)
        chosen |= {f"sparsegpt {way}": SPARSEGPT.with_changes(allocate=way) for way in divided}
    text = {"calibration": calibration, "nsamples": nsamples, "seqlen": seqlen}
    cells: dict[tuple[str, str, str], list[Recipe]] = {}
    for amount in amounts.split(","):
        for row in rows:
            for column in columns:
                recipe = Recipe(method=row, params=METHODS[row], **STEPS[column])
                cells[amount, row, column] = [recipe]
        cells |= {
            (amount, name, ""): [recipe]
            for name, recipe in chosen.items()
            if name in PEERS or ":" not in amount  # a pattern takes the same from every layer
        }
    for (amount, *_), recipes in cells.items():
        changed = recipes[0].with_changes(**amount_of(amount), **text)
        recipes[:] = [changed.with_changes(seed=seed) for seed in range(seeds)]
    console.prepare_libraries()
    with console.display() as shown:
        shown.tell(f"Loading {model}")
        loaded, tokenizer = load_with_tokenizer(model)
        grid = Grid(**text, eval_data=eval_data, valid_data=valid_data, eval_windows=eval_windows)
        job = Sweep(loaded, tokenizer, model, grid, output)
        every = [recipe for recipes in cells.values() for recipe in recipes]
        results = job.run(shown.watch, shown.watch_eval, shown.begin, every)
    found = {job.key(recipe): result for recipe, result in zip(every, results, strict=True)}

    def figure(amount: str, row: str, column: str) -> str:
        measured = [found[job.key(recipe)] for recipe in cells[amount, row, column]]
        return " / ".join(show([each[name] for each in measured]) for name in measures)

    measures = ("perplexity",) if valid_data is None else ("perplexity", "valid")
    dense = " / ".join(
        f"{results[0][name]:.2f}" for name in ("dense", "dense_valid")[: len(measures)]
    )
    for amount in amounts.split(","):
        table = Table(amount, *(columns or [""]), title=f"dense {dense}")
        for row in rows:
            table.add_row(row, *(figure(amount, row, column) for column in columns))
        for name in chosen:
            if (amount, name, "") in cells:
                table.add_row(name, figure(amount, name, ""))
        console.out.print(table)


if __name__ == "__main__":
    console.run(lambda: typer.run(main))
