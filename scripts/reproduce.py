"""Reproduce a table of the thesis's chapter 6 on a model of your choice.

    python scripts/reproduce.py TABLE --model M      TABLE: 6.2 6.3 6.4 6.5 6.6 E.1 E.2 E.3 E.4

Groups are those the thesis used: `layer` for 6.2-6.4 and E.1-E.3 (RIA's code), `row` for 6.5, 6.6
and E.4 (DSnoT's code), with DSnoT's published rule of accepting every exchange. Where the model is
one of the thesis's, its figure stands beside the measured one. Runs resume: finished cells are
kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import typer
from published import FIGURES, published
from rich.table import Table

from symprune.checkpoint.load import load_with_tokenizer
from symprune.cli import console
from symprune.cli import options as o
from symprune.engine.walk import prune
from symprune.errors import SympruneError
from symprune.jobs.sweep import Grid, Sweep, append_result, read_results
from symprune.recipe import Recipe

SEEDS = 3
WIDE = 120  # columns, where no terminal says how many there are


@dataclass(frozen=True)
class Line:
    """One row of a table: its label, what differs from the default recipe, over which seeds."""

    label: str
    recipe: dict[str, Any]
    seeds: int = 1


@dataclass(frozen=True)
class Setup:
    """What the user chose."""

    model: str
    output: Path
    shared: dict[str, Any] = field(default_factory=dict)


def layer(method: str, sparsity: float = 0.5, **params: Any) -> dict[str, Any]:
    return {"method": method, "params": params, "sparsity": sparsity, "group": "layer"}


def amounts() -> list[Line]:
    lines = [Line("magnitude, 50 %", layer("magnitude"))]
    for amount in ("50 %", "2:4", "4:8"):
        for method in ("wanda", "ria", "stochria"):
            recipe = layer(method, alpha=1)
            if ":" in amount:
                recipe = {"method": method, "params": {"alpha": 1}, "pattern": amount}
            seeds = SEEDS if method == "stochria" else 1
            if amount == "50 %" or method != "wanda":
                lines.append(Line(f"{method}, {amount}", recipe, seeds))
    return lines


def refined(base: str, name: str | None, **options: Any) -> dict[str, Any]:
    """60 %, alpha 0.5, per row, as Tables 6.5, 6.6 and E.4."""
    recipe: dict[str, Any] = {"method": base, "sparsity": 0.6, "group": "row"}
    if base != "magnitude":
        recipe["params"] = {"alpha": 0.5}
    if name:
        recipe["refine"] = {"name": name, "accept": "published", **options}
    return recipe


def refinements(bases: tuple[str, ...]) -> list[Line]:
    return [
        Line(base + (f" + {name}" if name else ""), refined(base, name))
        for base in bases
        for name in (None, "dsnot", "r2-dsnot")
    ]


def ablation() -> list[Line]:
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "wanda": {
            "best (g, gamma2 1e-4)": {},
            "p = 1": {"norm_p": 1},
            "p = inf": {"norm_p": float("inf")},
            "gamma2 0": {"gamma2": 0},
            "gamma2 1e-3": {"gamma2": 1e-3},
            "neither": {"grow_relative": False},
            "p only": {"grow_relative": False, "prune_relative": True},
            "g and p": {"prune_relative": True},
        },
        "ria": {
            "best (p, gamma2 1e-3)": {},
            "p = 1": {"norm_p": 1},
            "p = inf": {"norm_p": float("inf")},
            "gamma2 0": {"gamma2": 0},
            "gamma2 1e-4": {"gamma2": 1e-4},
            "neither": {"prune_relative": False},
            "g only": {"grow_relative": True, "prune_relative": False},
            "g and p": {"grow_relative": True},
        },
    }
    return [
        Line(f"{base}: {name}", refined(base, "r2-dsnot", **options))
        for base, variants in changes.items()
        for name, options in variants.items()
    ]


TABLES: dict[str, list[Line]] = {
    "6.2": amounts(),
    "6.3": [
        Line(f"{method}, alpha {alpha:g}", layer(method, alpha=alpha))
        for method in ("wanda", "col-sum", "row-sum", "ria")
        for alpha in (0, 0.5, 1, 2)
    ],
    "6.4": [
        Line(
            f"{method}, {sparsity:.0%}".replace("%", " %"),
            layer(method, sparsity, alpha=1),
            3 if method == "stochria" else 1,
        )
        for sparsity in (0.5, 0.6, 0.7)
        for method in ("wanda", "ria", "stochria")
    ],
    "6.5": refinements(("magnitude", "wanda", "ria")),
    "6.6": [Line("dense", {}), *refinements(("magnitude", "ria"))],
    "E.1": [Line(f"p = {p:g}", layer("lp", p=p, alpha=1)) for p in (1, 2, 3, 4, 0, float("inf"))],
    "E.2": [Line(f"S{n}", layer("lp", strategy=f"s{n}", alpha=0.5)) for n in (1, 2, 3, 4)],
    "E.3": [
        Line(f"beta = {beta:g}", layer("stochria", alpha=1, beta=beta), 3)
        for beta in (1, 0.9, 0.5, 0.1, 0.05, 0.01)
    ],
    "E.4": ablation(),
}


def recipe_for(line: Line, seed: int, setup: Setup) -> Recipe:
    shared = {k: v for k, v in setup.shared.items() if not k.startswith("eval")}
    return Recipe(**line.recipe, **shared, seed=seed, calibration_seed=0)


def perplexities(table: str, setup: Setup) -> None:
    """Measure and print a table of perplexities."""
    lines = TABLES[table]
    cells = [(line, seed) for line in lines for seed in range(line.seeds)]
    with console.display() as shown:
        shown.tell(f"Loading {setup.model}")
        model, tokenizer = load_with_tokenizer(setup.model)
        job = Sweep(model, tokenizer, setup.model, Grid(**setup.shared), setup.output)
        recipes = [recipe_for(line, seed, setup) for line, seed in cells]
        results = job.run(shown.watch, shown.watch_eval, shown.begin, recipes)
    title = f"Table {table}, {setup.model}, dense {results[0]['dense']:.2f}"
    shown_table = Table("row", title=title, title_justify="left")
    for name in ("measured", "±", "thesis"):
        shown_table.add_column(name, justify="right")
    for line in lines:
        found = zip(cells, results, strict=True)
        values = [result["perplexity"] for (mine, _), result in found if mine is line]
        spread = f"{stdev(values):.2f}" if len(values) > 1 else ""
        said = published(table, line.label, setup.model)
        thesis = "" if said is None else f"{said:g}"
        shown_table.add_row(line.label, f"{mean(values):.2f}", spread, thesis)
    console.out.print(shown_table)


def accuracies(table: str, setup: Setup, tasks: str, task_data: Path | None, limit: int) -> None:
    """Measure and print Table 6.6: zero-shot accuracies, in percent."""
    from symprune.eval import zeroshot

    names = list(zeroshot.THESIS_TASKS) if tasks == "thesis" else tasks.split(",")
    zeroshot.check_tasks(names, task_data)
    shown_table = Table("row", *names, "mean", "thesis", title=f"Table {table}, {setup.model}")
    done = read_results(setup.output, {"key": str, "tasks": dict})
    for line in TABLES[table]:
        key = f"{table}/{setup.model}/{line.label}/{tasks}/{limit}/{sorted(setup.shared.items())}"
        if key not in done:
            model, tokenizer = load_with_tokenizer(setup.model)
            if line.recipe:
                prune(model, tokenizer, recipe_for(line, 0, setup))
            result = zeroshot.evaluate(
                model, tokenizer, names, task_data=task_data, limit=limit or None
            )
            done[key] = {"key": key, **result.to_json()}
            append_result(setup.output, done[key])
        scores = [100 * done[key]["tasks"][name]["value"] for name in names]
        said = published(table, line.label, setup.model)
        figures = [f"{score:.1f}" for score in (*scores, mean(scores))]
        shown_table.add_row(line.label, *figures, "" if said is None else f"{said:g}")
    if not console.out.is_terminal:
        console.out.width = WIDE
    console.out.print(shown_table)


def main(
    table: Annotated[str, typer.Argument(help=" ".join(FIGURES))],
    model: o.Model,
    calibration: Annotated[str, typer.Option()] = "c4",
    nsamples: Annotated[int, typer.Option()] = 128,
    seqlen: Annotated[int, typer.Option()] = 2048,
    eval_data: Annotated[str, typer.Option()] = "wikitext2",
    eval_windows: o.EvalWindows = None,
    tasks: Annotated[str, typer.Option(help="For Table 6.6.")] = "thesis",
    task_data: Annotated[Path | None, typer.Option(help="For Table 6.6.")] = None,
    limit: Annotated[int, typer.Option(help="For Table 6.6: questions per task; 0: all.")] = 0,
    output: Annotated[Path, typer.Option(help="Finished cells.")] = Path("out/reproduce.jsonl"),
) -> None:
    """Reproduce one table of the thesis's chapter 6."""
    if table not in TABLES:
        raise SympruneError(f"There is no table {table!r}; choose {', '.join(TABLES)}.")
    console.prepare_libraries()
    shared = {
        "calibration": calibration, "nsamples": nsamples, "seqlen": seqlen,
        "eval_data": eval_data, "eval_windows": eval_windows,
    }  # fmt: skip
    setup = Setup(model, output, shared)
    if table == "6.6":
        accuracies(table, setup, tasks, task_data, limit)
    else:
        perplexities(table, setup)


if __name__ == "__main__":
    console.run(lambda: typer.run(main))
