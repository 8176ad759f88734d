"""What each step brings: criteria alone, refined, updated, both, against SparseGPT and the recipes.

    python scripts/frontier.py --model M [--amounts 50,2:4] [--methods wanda,ria] [--steps swap,lsq]
                               [--peers sparsegpt,mask-only,best] [--seeds 3]

One table of perplexities per amount. A seed draws other calibration text (and, for stochRIA, other
samples). Runs resume: finished cells are kept.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import typer
from rich.table import Table

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
PEERS: dict[str, Recipe] = {
    "sparsegpt": Recipe(method="magnitude", update="sparsegpt"),
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


def main(
    model: o.Model,
    amounts: Annotated[str, typer.Option(help="Percentages and patterns.")] = "50,60,70,2:4,4:8",
    methods: Annotated[str, typer.Option(help=", ".join(METHODS))] = "all",
    steps: Annotated[str, typer.Option(help=", ".join(STEPS))] = "all",
    peers: Annotated[str, typer.Option(help=", ".join(PEERS))] = "all",
    seeds: Annotated[int, typer.Option()] = 1,
    calibration: Annotated[str, typer.Option()] = "c4",
    nsamples: Annotated[int, typer.Option()] = 128,
    seqlen: Annotated[int, typer.Option()] = 2048,
    eval_data: Annotated[str, typer.Option()] = "wikitext2",
    eval_windows: o.EvalWindows = None,
    output: Annotated[Path, typer.Option(help="Finished cells.")] = Path("out/frontier.jsonl"),
) -> None:
    """Measure what refinement and update bring, per amount."""
    rows, columns = pick("method", methods, METHODS), pick("step", steps, STEPS)
    others = pick("peer", peers, PEERS)
    text = {"calibration": calibration, "nsamples": nsamples, "seqlen": seqlen}
    cells: dict[tuple[str, str, str], list[Recipe]] = {}
    for amount in amounts.split(","):
        for row in rows:
            for column in columns:
                recipe = Recipe(method=row, params=METHODS[row], **STEPS[column])
                cells[amount, row, column] = [recipe]
        cells |= {(amount, name, ""): [PEERS[name]] for name in others}
    for (amount, *_), recipes in cells.items():
        changed = recipes[0].with_changes(**amount_of(amount), **text)
        recipes[:] = [changed.with_changes(seed=seed) for seed in range(seeds)]
    console.prepare_libraries()
    with console.display() as shown:
        shown.tell(f"Loading {model}")
        loaded, tokenizer = load_with_tokenizer(model)
        grid = Grid(**text, eval_data=eval_data, eval_windows=eval_windows)
        job = Sweep(loaded, tokenizer, model, grid, output)
        every = [recipe for recipes in cells.values() for recipe in recipes]
        results = job.run(shown.watch, shown.watch_eval, shown.begin, every)
    found = {job.key(r): result["perplexity"] for r, result in zip(every, results, strict=True)}

    def figure(amount: str, row: str, column: str) -> str:
        values = [found[job.key(recipe)] for recipe in cells[amount, row, column]]
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        return f"{mean(values):.1f}{spread}"

    for amount in amounts.split(","):
        table = Table(amount, *columns, title=f"dense {results[0]['dense']:.2f}")
        for row in rows:
            table.add_row(row, *(figure(amount, row, column) for column in columns))
        for name in others:
            table.add_row(name, figure(amount, name, ""))
        console.out.print(table)


if __name__ == "__main__":
    console.run(lambda: typer.run(main))
