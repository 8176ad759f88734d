"""What each method sees on one matrix of a real model: pictures, and its error on held-out tokens.

    python scripts/picture_layer.py --model smollm2-135m --calibration builtin

The matrix is measured in the dense model on a few windows, then pruned by every method from the
same statistics. Held-out windows are of the same text and decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import Tensor

from symprune import Recipe, calibration
from symprune.checkpoint.load import load_with_tokenizer
from symprune.cli import console
from symprune.cli import options as o
from symprune.engine.decide import Decision, decide
from symprune.engine.forward import ready
from symprune.errors import SympruneError
from symprune.stats import GRAM, MOMENTS, SQUARE, ChannelStats

BLUE, ORANGE, GREY, INK = "#2a78d6", "#eb6834", "#d9d9d4", "#1c1c1a"
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "Wanda": {"method": "wanda"},
    "RIA": {"method": "ria"},
    "SymWanda": {"method": "symwanda"},
    "Wanda + DSnoT": {"method": "wanda", "refine": {"name": "dsnot", "layers": "all"}},
    "Wanda + swaps": {"method": "wanda", "refine": {"name": "swap"}},
    "Wanda + least squares": {"method": "wanda", "update": {"name": "lsq"}},
    "swaps + least squares": {
        "method": "wanda", "refine": {"name": "swap"}, "update": {"name": "lsq"},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One matrix and the sums over the tokens it was measured on."""

    weight: Tensor
    inputs: ChannelStats
    outputs: ChannelStats
    held_out: ChannelStats


def measure(model: Any, name: str, tokens: Tensor, held_out: Tensor) -> Measured:
    """The matrix `name` of a dense model, and what goes in and comes out of it."""
    found = dict(model.named_modules()).get(name)
    weight = getattr(found, "weight", None)
    if found is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise SympruneError(f"The model has no matrix called {name!r}.")
    rows, columns = weight.shape
    inputs, watched = (ChannelStats(columns, {SQUARE, MOMENTS, GRAM}) for _ in range(2))
    outputs = ChannelStats(rows, {SQUARE})
    deciding = True

    def look(_: Any, given: tuple[Tensor, ...], output: Tensor) -> None:
        if deciding:
            inputs.add(given[0])
            outputs.add(output)
        else:
            watched.add(given[0])

    hook = found.register_forward_hook(look)
    with ready(model):
        for window in tokens:
            model(window[None], use_cache=False)
        deciding = False
        for window in held_out:
            model(window[None], use_cache=False)
    hook.remove()
    return Measured(weight.detach().float(), inputs, outputs, watched)


def prune_with_each(seen: Measured, sparsity: float) -> dict[str, Decision]:
    """What every method makes of the matrix."""
    return {
        label: decide(
            label, "attn", seen.weight, seen.inputs, seen.outputs,
            Recipe(sparsity=sparsity, **settings), report_error=True, held_out=seen.held_out,
        )
        for label, settings in METHODS.items()
    }  # fmt: skip


def values_of(seen: Measured, decision: Decision) -> Tensor:
    """The matrix as it would be saved."""
    return seen.weight * decision.keep if decision.weight is None else decision.weight


def row_errors(seen: Measured, pruned: Tensor) -> Tensor:
    """Of every row ||X(w~-w)|| / ||Xw|| on held-out tokens."""
    gram, lost = seen.held_out.gram, pruned - seen.weight
    share = ((lost @ gram) * lost).sum(1) / ((seen.weight @ gram) * seen.weight).sum(1)
    return share.clamp(min=0).sqrt()


def _figure(width: float, height: float, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    return figure, figure.subplots(1, columns)


def draw_statistics(seen: Measured) -> Any:
    """How unequal channels are, by each of the four norms a criterion may read."""
    figure, axes = _figure(8, 3, 2)
    sizes = seen.weight.abs()
    sides = (
        ("input channels", (("x: activations", seen.inputs.norm), ("c: weights", sizes.sum(0)))),
        ("output channels", (("y: activations", seen.outputs.norm), ("r: weights", sizes.sum(1)))),
    )
    for axis, (side, norms) in zip(axes, sides, strict=True):
        for (label, norm), colour in zip(norms, (BLUE, ORANGE), strict=True):
            axis.plot(sorted((norm / norm.median()).tolist()), color=colour, label=label)
        axis.set(yscale="log", xlabel=f"{side}, each line sorted by itself")
        axis.legend(frameon=False, fontsize=8)
        axis.grid(color="#e4e4e0", lw=0.6)
    axes[0].set_ylabel("norm, median = 1")
    return figure


def draw_masks(seen: Measured, made: dict[str, Decision]) -> Any:
    """Which weights stay, of a sample of rows and columns; loud input channels to the right."""
    from matplotlib.colors import ListedColormap

    figure, axes = _figure(8, 2.4, 4)
    rows, columns = seen.weight.shape
    order = seen.inputs.norm.argsort()[:: max(1, columns // 64)]
    pairs = (
        ("magnitude", "magnitude"), ("Wanda", "magnitude"), ("RIA", "Wanda"), ("SymWanda", "Wanda"),
    )  # fmt: skip
    for axis, (label, other) in zip(axes, pairs, strict=True):
        here, there = (made[name].keep[:: max(1, rows // 64)][:, order] for name in (label, other))
        kind = here & there, here & ~there, ~here & there
        image = kind[0] * 1 + kind[1] * 2 + kind[2] * 3
        colours = ListedColormap(["white", GREY, BLUE, ORANGE])
        axis.imshow(image.numpy(), cmap=colours, vmin=0, vmax=3, interpolation="nearest")
        axis.set_title(label if label == other else f"{label}, against {other}", fontsize=9)
        axis.set(xticks=[], yticks=[], xlabel="quiet → loud inputs")
    axes[0].set_ylabel("output channels")
    return figure


def draw_refinements(seen: Measured, made: dict[str, Decision]) -> Any:
    """What DSnoT, swaps and least squares each make smaller, row by row, and what lsq changes."""
    figure, axes = _figure(8, 2.9, 3)
    before = values_of(seen, made["Wanda"])
    tokens_per_sample = seen.inputs.tokens / seen.inputs.samples
    mean = seen.inputs.mean / tokens_per_sample
    after = {name: values_of(seen, made[f"Wanda + {name}"]) for name in ("DSnoT", "swaps")}
    fitted = values_of(seen, made["Wanda + least squares"])
    pairs = (
        (((seen.weight - w) @ mean).abs() for w in (before, after["DSnoT"])),
        (row_errors(seen, w) for w in (before, after["swaps"])),
        (w[made["Wanda"].keep][:: max(1, int(made["Wanda"].keep.sum()) // 4000)]
         for w in (before, fitted)),
    )  # fmt: skip
    titles = (
        "DSnoT: |expected error| of a row", "swaps: error of a row, held out",
        "least squares: a kept weight",
    )  # fmt: skip
    for axis, pair, title in zip(axes, pairs, titles, strict=True):
        x, y = (values.tolist() for values in pair)
        low, high = min(*x, *y), max(*x, *y)
        axis.plot([low, high], [low, high], color=INK, lw=0.8)
        axis.scatter(x, y, s=3, color=BLUE, alpha=0.4, linewidths=0)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("before (Wanda)", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.locator_params(nbins=4)
    axes[0].set_ylabel("after", fontsize=8)
    return figure


def draw_errors(made: dict[str, Decision]) -> Any:
    """The error of every method, on held-out tokens and on those that decided."""
    figure, axis = _figure(8, 3.2, 1)
    labels = list(made)
    for key, colour, offset, label in (
        ("relative_error", GREY, 0.2, "calibration tokens"),
        ("held_out_error", BLUE, -0.2, "held-out tokens"),
    ):
        sizes = [made[name].figures[key] for name in labels]
        bars = axis.barh([n + offset for n in range(len(labels))], sizes, 0.38, color=colour)
        bars.set_label(label)
        axis.bar_label(bars, [f"{size:.3f}" for size in sizes], padding=3, fontsize=7)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("what the layer's output lost, ||X(W~ - W)|| / ||XW||")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def report(made: dict[str, Decision]) -> Table:
    """The errors, and how many of the weights that stay Wanda keeps as well."""
    table = Table("method", "held-out error", "calibration error", "kept by Wanda too")
    wanda = made["Wanda"].keep
    for label, decision in made.items():
        shared = float((decision.keep & wanda).sum() / decision.keep.sum())
        figures = decision.figures
        table.add_row(
            label, f"{figures['held_out_error']:.3f}", f"{figures['relative_error']:.3f}",
            f"{shared:.1%}",
        )  # fmt: skip
    return table


def main(
    model: o.Model = "smollm2-135m",
    matrix: Annotated[str, typer.Option()] = "model.layers.10.self_attn.q_proj",
    sparsity: Annotated[float, typer.Option()] = 0.5,
    calibration_data: Annotated[str, typer.Option("--calibration")] = "builtin",
    nsamples: Annotated[int, typer.Option()] = 32,
    seqlen: Annotated[int, typer.Option()] = 512,
    seed: Annotated[int, typer.Option()] = 0,
    pictures: Annotated[Path, typer.Option(help="A folder.")] = Path("docs/images"),
) -> None:
    """Draw what each method sees on one matrix."""
    console.prepare_libraries()
    loaded, tokenizer = load_with_tokenizer(model)
    text = (calibration_data, tokenizer, nsamples, seqlen, seed)
    tokens, held_out = calibration.calibration_tokens(*text), calibration.held_out_tokens(*text)
    if held_out is None:
        raise SympruneError(f"{calibration_data} has no text left that decides nothing.")
    seen = measure(loaded, matrix, tokens, held_out)
    made = prune_with_each(seen, sparsity)
    console.out.print(f"{matrix}: {seen.inputs.tokens} tokens, {seen.held_out.tokens} held out")
    console.out.print(report(made))
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = {
        "statistics": draw_statistics(seen), "masks": draw_masks(seen, made),
        "refinements": draw_refinements(seen, made), "errors": draw_errors(made),
    }  # fmt: skip
    for name, figure in drawn.items():
        figure.savefig(pictures / f"layer-{name}.png")


if __name__ == "__main__":
    console.run(lambda: typer.run(main))
