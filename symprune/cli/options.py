"""The options several commands share, as Typer annotations, and how they become a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from symprune import __version__
from symprune.errors import SympruneError
from symprune.machine import durable

if TYPE_CHECKING:
    from symprune.recipe import Recipe

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Hub id, local folder, .gguf file, or a short name ([bold]symprune models[/bold]).",
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
ComputeDtype = Annotated[
    str,
    typer.Option(
        help="Type to compute blocks in, whatever they are stored in: auto, float32, bfloat16 or "
        "float16. auto: float32 on a CPU without instructions for the stored type.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Output folder. [dim]\\[default: MODEL-METHOD-50][/dim]"),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Say what would be done, how long it takes, and what memory and disk; do nothing.",
    ),
]
JSON = b'{\n  "written_by": "symprune '  # how a result begins: no other file is replaced
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this file, as JSON.")
]
CALIBRATION = "Calibration"
EVALUATION = "Evaluation"
Calibration = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=CALIBRATION,
        help="c4, wikitext2, builtin (Python's documentation, no network), self (the model writes "
        "it), hf:ORG/NAME (with :CONFIG:SPLIT:COLUMN), a file (text, .jsonl, .parquet) or folder, "
        "or several: 'c4*0.7 + mine.jsonl*0.3'. [dim]\\[default: c4][/dim]",
    ),
]
NSamples = Annotated[
    int | None,
    typer.Option(
        help="Calibration windows. [dim]\\[default: 128][/dim]", rich_help_panel=CALIBRATION
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=CALIBRATION,
        help="Tokens per window, at most what the model supports. [dim]\\[default: 2048][/dim]",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed of the windows drawn and of random criteria. [dim]\\[default: 0][/dim]",
        rich_help_panel=CALIBRATION,
    ),
]
TokenLimit = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=CALIBRATION,
        help="The most one token may count, as a multiple of the median token; 0: no limit. "
        "[dim]\\[default: the recipe's, else 0][/dim]",
    ),
]
Bos = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=CALIBRATION,
        help="Whether windows begin with BOS: auto (where the model needs it), always or never. "
        "[dim]\\[default: auto][/dim]",
    ),
]
Evaluate = Annotated[
    bool,
    typer.Option(
        "--eval/--no-eval",
        help="Measure perplexity before and after.",
        rich_help_panel=EVALUATION,
    ),
]
EvalData = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=EVALUATION,
        help="Text to measure it on: wikitext2, builtin, c4 or a file. "
        "[dim]\\[default: wikitext2; builtin with --calibration builtin][/dim]",
    ),
]
EvalWindows = Annotated[
    int | None,
    typer.Option(
        min=1, help="Use only the first N windows of that text.", rich_help_panel=EVALUATION
    ),
]
ReportError = Annotated[
    bool,
    typer.Option(
        "--report-error",
        help="Measure every layer's reconstruction error on the calibration data.",
        rich_help_panel=EVALUATION,
    ),
]

SCALE = "Large models"
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="auto: divide the blocks among all devices, as accelerate does.",
        rich_help_panel=SCALE,
    ),
]
Offload = Annotated[
    Path | None,
    typer.Option(
        "--offload-activations",
        metavar="DIR",
        help="Keep the hidden states in a file in this folder, not in memory.",
        rich_help_panel=SCALE,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Samples that pass through a block together. "
        "[dim]\\[1 on a CPU, else what memory allows][/dim]",
        rich_help_panel=SCALE,
    ),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart",
        help="Discard an unfinished run of this output instead of resuming it.",
        rich_help_panel=SCALE,
    ),
]
Log = Annotated[
    Path | None,
    typer.Option(
        "--log",
        help="Append progress, speed and memory to this file, as JSON lines.",
        rich_help_panel=SCALE,
    ),
]
ReportTo = Annotated[
    list[str] | None,
    typer.Option(
        "--report-to",
        metavar="NAME",
        help="Log figures as the run goes on: tensorboard or wandb (Weights & Biases), if it is "
        "installed; all: to what is; repeatable. [dim]\\[none][/dim]",
    ),
]

REFINEMENT = "Refinement"
MaxCycles = Annotated[
    int | None,
    typer.Option(
        help="Most exchanges in a row of weights. [dim]\\[50][/dim]", rich_help_panel=REFINEMENT
    ),
]
UpdateThreshold = Annotated[
    float | None,
    typer.Option(
        help="A row is done once its expected error is below this. [dim]\\[0.1][/dim]",
        rich_help_panel=REFINEMENT,
    ),
]
VarPower = Annotated[
    float | None,
    typer.Option(
        help="Power of the variance in the grow key. [dim]\\[1][/dim]", rich_help_panel=REFINEMENT
    ),
]
RefineLayers = Annotated[
    str | None,
    typer.Option(
        help="Which matrices to refine: attn, mlp or all. [dim]\\[attn; swap: all][/dim]",
        rich_help_panel=REFINEMENT,
    ),
]
MaxSwaps = Annotated[
    int | None,
    typer.Option(
        help="swap: most swaps in a row of weights. [dim]\\[60][/dim]", rich_help_panel=REFINEMENT
    ),
]
UPDATE = "Update of the kept weights"
UpdateName = Annotated[
    str | None,
    typer.Option(
        "--update",
        help="lsq: re-fit them to the dense layer's outputs. Baselines, which find their own mask: "
        "sparsegpt, admm, alps.",
        rich_help_panel=UPDATE,
    ),
]
UpdateIters = Annotated[
    int | None,
    typer.Option(
        help="lsq, alps: most conjugate gradient steps; admm: iterations. "
        "[dim]\\[20; alps: 10][/dim]",
        rich_help_panel=UPDATE,
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        help="lsq: how many times to find mask and weights in turn, with rising sparsity. "
        "[dim]\\[1][/dim]",
        rich_help_panel=UPDATE,
    ),
]
ALLOCATION = "Allocation"
Allocate = Annotated[
    str | None,
    typer.Option(
        help="uniform: every layer gives the same. owl: blocks with outliers give less. lsa: parts "
        "that err little without half of their weights give less. atp: early blocks give less. "
        "error: the budget goes where it costs least. search: tries them, takes the best. "
        "[dim]\\[uniform][/dim]",
        rich_help_panel=ALLOCATION,
    ),
]
Spread = Annotated[
    float | None,
    typer.Option(
        help="How far a layer's sparsity may be from the model's. "
        "[dim]\\[owl, lsa, atp 0.08, error 0.1][/dim]",
        rich_help_panel=ALLOCATION,
    ),
]
GramDevice = Annotated[
    str,
    typer.Option(
        help="Where swap, lsq and --report-error keep X^T X: auto (with the layer), cpu or disk.",
        rich_help_panel=UPDATE,
    ),
]
SameSign = Annotated[
    bool | None,
    typer.Option(
        "--same-sign/--no-same-sign",
        help="Stop refining a row before its error changes sign. [dim]\\[no][/dim]",
        rich_help_panel=REFINEMENT,
    ),
]
Accept = Annotated[
    str | None,
    typer.Option(
        help="published: make all exchanges. improving: only those that shrink the expected error. "
        "[dim]\\[improving][/dim]",
        rich_help_panel=REFINEMENT,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--refine-preset",
        help="r2-dsnot: the thesis's settings for base wanda or ria. [dim]\\[by method][/dim]",
        rich_help_panel=REFINEMENT,
    ),
]
GrowRelative = Annotated[
    bool | None,
    typer.Option(
        "--grow-relative/--no-grow-relative",
        help="r2-dsnot: use relative importance when growing.",
        rich_help_panel=REFINEMENT,
    ),
]
PruneRelative = Annotated[
    bool | None,
    typer.Option(
        "--prune-relative/--no-prune-relative",
        help="r2-dsnot: use relative importance when pruning.",
        rich_help_panel=REFINEMENT,
    ),
]
Gamma1 = Annotated[
    float | None,
    typer.Option(
        help="r2-dsnot: weight of the regulariser when growing.", rich_help_panel=REFINEMENT
    ),
]
Gamma2 = Annotated[
    float | None,
    typer.Option(
        help="r2-dsnot: weight of the regulariser when pruning.", rich_help_panel=REFINEMENT
    ),
]
NormP = Annotated[
    float | None,
    typer.Option(
        help="r2-dsnot: the regulariser's norm. [dim]\\[2][/dim]", rich_help_panel=REFINEMENT
    ),
]
RefineAlpha = Annotated[
    float | None,
    typer.Option(
        help="r2-dsnot: power of the input norm when pruning by relative importance. "
        "[dim]\\[0.5][/dim]",
        rich_help_panel=REFINEMENT,
    ),
]
LiteralGrowth = Annotated[
    bool | None,
    typer.Option(
        "--literal-growth/--no-literal-growth",
        help="r2-dsnot: the grow key as printed, without the weight.",
        rich_help_panel=REFINEMENT,
    ),
]


Method = Annotated[
    str | None,
    typer.Option(
        help="Criterion; [bold]symprune methods[/bold] lists them. Your own: module:function. "
        "[dim]\\[default: ria][/dim]"
    ),
]
Sparsity = Annotated[
    float | None,
    typer.Option(help="Fraction of each group to remove. [dim]\\[default: 0.5][/dim]"),
]
PatternText = Annotated[
    str | None, typer.Option(help="N:M instead of a sparsity; 2:4 keeps 2 of every 4.")
]
Group = Annotated[
    str | None,
    typer.Option(
        help="row: every output channel loses the same number (Wanda's way). "
        "layer: one threshold per matrix (RIA's way). [dim]\\[default: row][/dim]"
    ),
]
Alpha = Annotated[
    float | None, typer.Option(help="Power of the input norm. [dim]\\[ria: 0.5][/dim]")
]
Beta = Annotated[
    float | None,
    typer.Option(help="stochria: share of weights sampled. symwanda: power of the output norm."),
]
P = Annotated[float | None, typer.Option("--p", help="lp: which norm: 0, 1, 2, 3, 4 or inf.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other parameter of the method."),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="fast, mask-only, balanced, best, or a YAML or JSON file; "
        "options given here override it.",
    ),
]


def select_given(**options: Any) -> dict[str, Any]:
    """The options that were typed."""
    return {name: value for name, value in options.items() if value is not None}


def with_step(recipe: Recipe, step: str, name: str | None, options: dict[str, Any]) -> Recipe:
    """The recipe with a step (`refine`, `update`, `allocate`), or the one it has with `options`."""
    if name in ("none", "uniform"):
        name, recipe = None, recipe.with_changes(**{step: None})
    current = dict(getattr(recipe, step) or {})
    if name is None and not current:
        if options:
            option = next(iter(options)).replace("_", "-")
            raise SympruneError(f"Option {option} needs --{step}.")
        return recipe
    if name is not None and name != current.get("name"):
        current = {"name": name}
    return recipe.with_changes(**{step: {**current, **options}})


def with_token_limit(recipe: Recipe, limit: float | None) -> Recipe:
    """The recipe with another limit; 0 takes its limit away, None leaves it."""
    return recipe if limit is None else recipe.with_changes(token_limit=limit or None)


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Write a result for programs, if a file was named."""
    if path is None:
        return
    try:
        signed = {"written_by": f"symprune {__version__}", **record}
        durable.write_text(path, json.dumps(signed, indent=2, default=str) + "\n")
    except OSError as error:
        raise SympruneError(f"Cannot write {path}: {error.strerror}.") from error
