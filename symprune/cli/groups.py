"""Options that belong together and several commands take: one argument there, many for the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from symprune.cli import options as o
from symprune.errors import SympruneError
from symprune.validation import parse_assignments

if TYPE_CHECKING:
    from symprune.recipe import Recipe

VALUES = "Values"
ValuesName = Annotated[
    str | None,
    typer.Option(
        "--values",
        help="Put the kept weights on a grid, fitted to the dense layer's outputs: int8, int4, "
        "int3 or int2. With --sparsity 0 all weights are kept. [dim]\\[default: as stored][/dim]",
        rich_help_panel=VALUES,
    ),
]
ValuesSolve = Annotated[
    str | None,
    typer.Option(
        help="How the values are found: descent, gptq, or nearest, which needs no text. "
        "[dim]\\[default: descent][/dim]",
        rich_help_panel=VALUES,
    ),
]
ValuesHead = Annotated[
    str | None,
    typer.Option(
        help="Round embeddings and head to a grid as well: int8 or int4. "
        "[dim]\\[default: as stored][/dim]",
        rich_help_panel=VALUES,
    ),
]
RECONSTRUCTION = "Reconstruction"
ReconstructName = Annotated[
    str | None,
    typer.Option(
        "--reconstruct",
        help="block: train each block's kept weights until it gives the dense model's outputs "
        "again, through the rounding where there are --values; part: attention first, then the "
        "MLP. [dim]\\[default: no][/dim]",
        rich_help_panel=RECONSTRUCTION,
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        help="Passes over the calibration windows, at most; windows that are not trained on say "
        "which was the best. [dim]\\[default: 4][/dim]",
        rich_help_panel=RECONSTRUCTION,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Adam's first rate, relative to the size of a weight. [dim]\\[default: 0.01][/dim]",
        rich_help_panel=RECONSTRUCTION,
    ),
]
Permute = Annotated[
    str | None,
    typer.Option(
        help="With --pattern: put channels into an order that it keeps more in, folded into the "
        "weights: mlp, heads, residual, several with commas, all, or auto, what the model's "
        "structure allows. [dim]\\[default: no][/dim]",
    ),
]
Experts = Annotated[
    str | None,
    typer.Option(
        metavar="drop:P%",
        help="First drop P % of every layer's experts, by the mean router-weighted norm of their "
        "outputs (REAP); with --sparsity 0 nothing else. [dim]\\[default: none][/dim]",
    ),
]
STATISTICS = "Statistics"
Inputs = Annotated[
    str | None,
    typer.Option(
        help="Measure each block behind the blocks that are pruned already, or all of them in the "
        "dense model, in one pass instead of two: pruned or dense. [dim]\\[default: pruned][/dim]",
        rich_help_panel=STATISTICS,
    ),
]
Sequential = Annotated[
    bool | None,
    typer.Option(
        "--sequential/--no-sequential",
        help="Measure and prune a block group by group in the order data flows through it: q/k/v, "
        "then o, then gate/up, then down. [dim]\\[default: no][/dim]",
        rich_help_panel=STATISTICS,
    ),
]
Targets = Annotated[
    str | None,
    typer.Option(
        help="What weights are fitted to: the layer's own outputs, the dense model's (dense), or "
        "what held-out tokens choose between them (mixed); the last two go group by group. "
        "[dim]\\[default: own][/dim]",
        rich_help_panel=STATISTICS,
    ),
]
SelfSamples = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=o.CALIBRATION,
        help="Windows more that the dense model, loaded as a whole, writes itself: against fitting "
        "few tokens too well. [dim]\\[default: 0][/dim]",
    ),
]
KeepHashes = Annotated[
    bool,
    typer.Option(
        "--keep-hashes/--no-keep-hashes",
        help="Keep hashes of some passages that were calibrated on in the record, so that eval can "
        "warn of them. Who has a passage can tell by them that it was there.",
        rich_help_panel=o.CALIBRATION,
    ),
]
HUB = "Hub"
Revision = Annotated[
    str | None,
    typer.Option(
        help="Branch, tag or commit of a model on the hub. [dim]\\[main][/dim]",
        rich_help_panel=HUB,
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        help="Token for gated or private models, if you are not logged in; it is kept nowhere.",
        rich_help_panel=HUB,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code that comes with a model.",
        rich_help_panel=HUB,
    ),
]


@dataclass(frozen=True)
class Choosing:
    """Which weights go: a recipe, a criterion, how many."""

    recipe: o.RecipeName = None
    method: o.Method = None
    sparsity: o.Sparsity = None
    pattern: o.PatternText = None
    group: o.Group = None
    alpha: o.Alpha = None
    beta: o.Beta = None
    p: o.P = None
    set_: o.Set = None
    token_limit: o.TokenLimit = None

    def build(self, **others: Any) -> Recipe:
        """The recipe these options and `others` (None: not given) describe."""
        from symprune.criteria import allow_code
        from symprune.recipe import Recipe

        allow_code(self.method)
        if self.sparsity is not None and self.pattern is not None:
            raise SympruneError("Give --sparsity or --pattern, not both.")
        changes = o.select_given(
            method=self.method,
            sparsity=self.sparsity,
            pattern=self.pattern,
            group=self.group,
            **others,
        )
        chosen = Recipe.named(self.recipe) if self.recipe else Recipe()
        chosen = chosen.with_changes(**changes)
        chosen = o.with_token_limit(chosen, self.token_limit)
        params = o.select_given(alpha=self.alpha, beta=self.beta, p=self.p)
        params |= parse_assignments(self.set_ or [])
        return chosen.with_changes(params={**chosen.params, **params}) if params else chosen


@dataclass(frozen=True)
class Refining:
    """The options of DSnoT and R2-DSnoT."""

    max_cycles: o.MaxCycles = None
    update_threshold: o.UpdateThreshold = None
    var_power: o.VarPower = None
    refine_layers: o.RefineLayers = None
    same_sign: o.SameSign = None
    accept: o.Accept = None
    refine_preset: o.Preset = None
    grow_relative: o.GrowRelative = None
    prune_relative: o.PruneRelative = None
    gamma1: o.Gamma1 = None
    gamma2: o.Gamma2 = None
    norm_p: o.NormP = None
    refine_alpha: o.RefineAlpha = None
    literal_growth: o.LiteralGrowth = None

    def select_given(self) -> dict[str, Any]:
        """What was typed, under the names the refinements have for it."""
        return o.select_given(**{k.removeprefix("refine_"): v for k, v in vars(self).items()})


@dataclass(frozen=True)
class Valuing:
    """What grids the weights are on."""

    values: ValuesName = None
    values_solve: ValuesSolve = None
    values_head: ValuesHead = None

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with them; `none` takes away what it has."""
        solve = o.select_given(solve=self.values_solve)
        recipe = o.with_step(recipe, "values", self.values, solve)
        if self.values_head is None:
            return recipe
        head = None if self.values_head == "none" else self.values_head
        return recipe.with_changes(values_head=head)


@dataclass(frozen=True)
class Reconstructing:
    """How blocks are trained."""

    reconstruct: ReconstructName = None
    epochs: Epochs = None
    rate: Rate = None

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with them; `none` takes away what it has."""
        options = o.select_given(epochs=self.epochs, rate=self.rate)
        return o.with_step(recipe, "reconstruct", self.reconstruct, options)


@dataclass(frozen=True)
class Measuring:
    """What a block's statistics are measured on, and what its weights are fitted to."""

    inputs: Inputs = None
    sequential: Sequential = None
    targets: Targets = None

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with what was typed."""
        return recipe.with_changes(**o.select_given(**vars(self)))


@dataclass(frozen=True)
class Loading:
    """How the model is fetched from the hub."""

    revision: Revision = None
    token: Token = None
    trust_remote_code: TrustRemoteCode = False

    def access(self) -> Any:
        """As `hub.resolve` takes it."""
        from symprune.models.hub import Access

        return Access(self.revision, self.token, self.trust_remote_code)


@dataclass(frozen=True)
class Running:
    """Where and how a run goes, and what it measures and leaves behind."""

    gram_device: o.GramDevice = "auto"
    report_error: o.ReportError = False
    dtype: o.Dtype = "auto"
    compute_dtype: o.ComputeDtype = "auto"
    device: o.Device = "auto"
    output: o.Output = None
    force: o.Force = False
    evaluate: o.Evaluate = True
    eval_data: o.EvalData = None
    eval_windows: o.EvalWindows = None
    keep_hashes: KeepHashes = True
    json_file: o.JsonFile = None
    device_map: o.DeviceMap = None
    batch_size: o.BatchSize = None
    offload_activations: o.Offload = None
    restart: o.Restart = False
    log: o.Log = None
    report_to: o.ReportTo = None

    def settings(self) -> dict[str, Any]:
        """What is the job's own, under the names a `run.Job` has for it."""
        settings = {**vars(self), "offload": self.offload_activations}
        others = ("json_file", "offload_activations", "report_to")
        return {k: v for k, v in settings.items() if k not in others}


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer from one that takes groups of options: each field is an option."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        group: Any = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        parameters += [
            parameter.replace(name=each.name, annotation=hints[each.name], default=each.default)
            for each in fields(group)
        ]

    def run(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{each.name: options.pop(each.name) for each in fields(group)})
        command(**options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
