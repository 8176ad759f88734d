"""Perplexity against honest bits: how few bits a weight may take, with a mask and without.

    python scripts/bits.py --model M --valid-data TEXT [--calibration ...] [--seeds 3]

A row is a sparsity (0: all weights kept), a grid and how the values were put on it. Its bits are
those of the prunable matrices in a packed file: mask, scales and codes, runs padded to bytes. One
table and one picture; runs resume, finished cells are kept, and `--cells none` only draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from trials import Trials

from symprune import MaskSet, Recipe
from symprune.cli import console
from symprune.cli import options as o
from symprune.errors import SympruneError
from symprune.jobs.sweep import append_result, read_results
from symprune.models.layout import Layout
from symprune.values.bits import packed_bits
from symprune.values.grid import GRIDS

FLOAT_BITS = 16
TRAINED = "trained"
RESULT = {"key": str, "test": float, "valid": float}
SERIES = {  # label -> amount and solve, colour, marker
    "all kept, nearest": ("0", "nearest", "#b9b9b4", "o"),
    "all kept, GPTQ": ("0", "gptq", "#83837e", "s"),
    "all kept, descent": ("0", "descent", "#1c1c1a", "D"),
    "30 % removed": ("30", "descent", "#7fc8a9", "v"),
    "50 % removed": ("50", "descent", "#2a78d6", "o"),
    "60 % removed": ("60", "descent", "#eb6834", "^"),
    "70 % removed": ("70", "descent", "#9b4dca", "s"),
    "2:4": ("2:4", "descent", "#d4a017", "P"),
    "all kept, blocks trained": ("0", TRAINED, "#1c1c1a", "*"),
    "50 % removed, blocks trained": ("50", TRAINED, "#2a78d6", "*"),
}


@dataclass(frozen=True)
class Cell:
    """One model to make: how much goes, on which grid (`bf16`: none), and how it gets there.

    A solve `trained` is `descent`, after which blocks are trained through the rounding, on windows
    of the dense model's own, too.
    """

    amount: str
    values: str
    solve: str = "descent"
    seed: int = 0

    @property
    def key(self) -> str:
        return f"{self.amount} {self.values} {self.solve} {self.seed}"

    def recipe(self, text: dict[str, Any]) -> Recipe:
        amount = {"pattern": self.amount} if ":" in self.amount else {
            "sparsity": int(self.amount) / 100
        }  # fmt: skip
        solve = "descent" if self.solve == TRAINED else self.solve
        values = None if self.values == "bf16" else {"name": self.values, "solve": solve}
        start = Recipe.named("balanced").with_changes(**amount)
        if self.solve == TRAINED:
            best = Recipe.named("best")
            start = start.with_changes(reconstruct=best.reconstruct, self_samples=best.self_samples)
        return start.with_changes(values=values, seed=self.seed, **text)


WIDTHS = ("int4", "int3", "int2")
MAIN = (*(Cell("50", values) for values in WIDTHS), *(Cell("0", values) for values in WIDTHS))
OTHERS = (
    *(Cell("0", values, solve) for values in ("int8", *WIDTHS) for solve in ("nearest", "gptq")),
    *(Cell("30", values) for values in WIDTHS),
    *(Cell(amount, each) for each in ("bf16", "int4", "int8") for amount in ("60", "70", "2:4")),
    Cell("50", "bf16"), Cell("50", "int8"),
    *(Cell("50", "int4", solve) for solve in ("nearest", "gptq")),
)  # fmt: skip
FITTED = (
    Cell("50", "int4", TRAINED), Cell("0", "int3", TRAINED), Cell("50", "int3", TRAINED),
    Cell("0", "int2", TRAINED), Cell("50", "int2", TRAINED), Cell("0", "int4", TRAINED),
)  # fmt: skip


def honest_bits(layout: Layout, masks: MaskSet, values: str) -> float:
    """Bits a prunable weight takes in a packed file: mask, scales and codes."""
    bits, weights = 0, 0
    for matrix in layout.all_matrices():
        keep = matrix.slice_of(masks[matrix.parameter_name])
        bits += packed_bits(keep, FLOAT_BITS, GRIDS.get(values))
        weights += keep.numel()
    return bits / weights


def draw(rows: dict[Cell, list[dict[str, Any]]], dense: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axis = figure.subplots()
    for label, (amount, solve, colour, marker) in SERIES.items():
        points = [
            (mean(c["bits"] for c in cells), [c["test"] for c in cells], cell.values)
            for cell, cells in rows.items()
            if (cell.amount, cell.solve) == (amount, solve)
        ]
        points.sort(key=lambda point: point[0])
        if not points:
            continue
        x, y = [p[0] for p in points], [mean(p[1]) for p in points]
        style = {"descent": "-", TRAINED: "-."}.get(solve, "--")
        axis.plot(x, y, style, marker=marker, color=colour, label=label, markersize=5, lw=1.4)
    axis.axhline(dense, color="#83837e", lw=0.8, ls=":")
    axis.annotate(f"dense {dense:.1f}", (16, dense), va="bottom", ha="right", fontsize=8)
    axis.set(xscale="log", yscale="log", ylim=(0.92 * dense, 1200))
    axis.set_xlabel("bits a prunable weight takes: mask, scales and codes")
    axis.set_ylabel("perplexity")
    ticks = [1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 16]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    levels = [40, 60, 80, 100, 150, 200, 300, 500, 1000]
    axis.set_yticks(levels, [str(level) for level in levels])
    axis.grid(color="#e4e4e0", lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    model: o.Model,
    valid_data: Annotated[str, typer.Option(help="Text that choices may be made on.")],
    cells: Annotated[str, typer.Option(help="all, main, trained or none.")] = "all",
    amounts: Annotated[str, typer.Option(help="Only these.")] = "0,30,50,60,70,2:4",
    seeds: Annotated[int, typer.Option(help="For the main rows.")] = 3,
    calibration_data: Annotated[str, typer.Option("--calibration")] = "c4",
    nsamples: Annotated[int, typer.Option()] = 128,
    seqlen: Annotated[int, typer.Option()] = 2048,
    eval_data: Annotated[str, typer.Option()] = "wikitext2",
    eval_windows: o.EvalWindows = None,
    output: Annotated[Path, typer.Option(help="Finished cells.")] = Path("out/bits.jsonl"),
    picture: Annotated[Path, typer.Option()] = Path("out/bits.png"),
) -> None:
    """Measure perplexity against honest bits."""
    text = {"calibration": calibration_data, "nsamples": nsamples, "seqlen": seqlen, "bos": "never"}
    groups = {"all": (*MAIN, *OTHERS, *FITTED), "main": MAIN, "trained": FITTED, "none": ()}
    if cells not in groups:
        raise SympruneError(f"There are no cells {cells!r}; choose {', '.join(groups)}.")
    wanted = list(groups[cells])
    more = range(1, seeds if cells in ("all", "main") else 1)
    wanted += [Cell(c.amount, c.values, c.solve, seed) for c in MAIN for seed in more]
    wanted = [cell for cell in wanted if cell.amount in amounts.split(",")]
    done = read_results(output, RESULT)
    if any(cell.key not in done for cell in wanted) or "dense" not in done:
        _run(model, wanted, text, (eval_data, valid_data), eval_windows, output)
        done = read_results(output, RESULT)
    rows: dict[Cell, list[dict[str, Any]]] = {}
    for cell in (*MAIN, *OTHERS, *FITTED):
        every = [Cell(cell.amount, cell.values, cell.solve, seed).key for seed in range(seeds)]
        found = [done[key] for key in every if key in done]
        if found:
            rows[cell] = found
    table = Table("removed", "values", "solve", "bits", "test", "validation", "seeds")
    for cell, found in sorted(rows.items(), key=lambda row: row[1][0]["bits"]):
        tests = [each["test"] for each in found]
        spread = f" ± {stdev(tests):.1f}" if len(tests) > 1 else ""
        valid = mean(each["valid"] for each in found)
        table.add_row(
            cell.amount, cell.values, "" if cell.values == "bf16" else cell.solve,
            f"{found[0]['bits']:.2f}", f"{mean(tests):.1f}{spread}", f"{valid:.1f}",
            str(len(found)),
        )  # fmt: skip
    console.out.print(table)
    draw(rows, done["dense"]["test"], picture)


def _run(
    name: str,
    cells: list[Cell],
    text: dict[str, Any],
    data: tuple[str, str],
    windows: int | None,
    output: Path,
) -> None:
    console.prepare_libraries()
    texts = dict(zip(("test", "valid"), data, strict=True))
    trials = Trials(name, texts, text["seqlen"], windows, stored=torch.bfloat16)
    if "dense" not in read_results(output, RESULT):
        append_result(output, {"key": "dense", **trials.measure()})
    for number, cell in enumerate(cells):
        if cell.key in read_results(output, RESULT):
            continue
        console.out.print(f"{number + 1}/{len(cells)} {cell.key}")
        with trials.pruned(cell.recipe(text)) as trial:
            result = {
                "key": cell.key,
                "bits": honest_bits(trials.layout, trial.report.masks, cell.values),
                **trial.perplexities,
                "seconds": round(trial.seconds, 1),
            }
        append_result(output, result)


if __name__ == "__main__":
    console.run(lambda: typer.run(main))
