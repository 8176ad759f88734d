"""What a run did: per layer, in total, and the masks."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from symprune.engine.text.bos import Bos
from symprune.maskset import MaskSet
from symprune.recipe import Recipe
from symprune.update.targets import OWN, TOKENS_A_CHANNEL
from symprune.values.grid import OnGrid

SHARE = "target_share"  # how far from its own outputs to the dense model's a matrix is fitted


@dataclass(frozen=True)
class LayerReport:
    """What happened to one matrix; dense says why it was not pruned, where it was not."""

    name: str
    kind: str
    part: str
    rows: int
    columns: int
    removed: int
    tokens: int
    figures: dict[str, float] = field(default_factory=dict)
    dense: str = ""

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def sparsity(self) -> float:
        return self.removed / self.size

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(self).items() if name != "figures"}
        if not self.dense:
            del plain["dense"]
        return {**plain, "sparsity": self.sparsity, **self.figures}


@dataclass(repr=False)
class Report:
    """What a run did: per layer, in total, and the masks.

    recipe: what was asked for. seqlen: how long the windows of text were. layers: what happened to
    each matrix. masks: what was kept. values: the matrices of a model in memory that are on a grid.
    seconds: how long each stage took. peak_memory: in bytes. parameters: the model's weights,
    prunable or not. notes: sentences the user should read. bos: what was decided about BOS, if text
    was read. allocation: how far the allocations that were tried were from the dense model, and
    which was chosen. experts: of each expert, how many tokens came to it and what they say of it,
    and which were dropped, if any were.
    """

    recipe: Recipe
    seqlen: int
    layers: list[LayerReport] = field(default_factory=list)
    masks: MaskSet = field(default_factory=MaskSet)
    values: dict[str, OnGrid] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    parameters: int = 0
    notes: list[str] = field(default_factory=list)
    bos: Bos | None = None
    allocation: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return (
            f"Report({self.recipe.describe()}: {self.removed:,} of {self.prunable:,} weights "
            f"removed, {len(self.layers)} matrices)"
        )

    @property
    def prunable(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def removed(self) -> int:
        return sum(layer.removed for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """Fraction of the prunable weights that went."""
        return self.removed / self.prunable if self.prunable else 0.0

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """kind -> (removed, size)"""
        totals: dict[str, tuple[int, int]] = {}
        for layer in self.layers:
            removed, size = totals.get(layer.kind, (0, 0))
            totals[layer.kind] = (removed + layer.removed, size + layer.size)
        return totals

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.to_dict(),
            "seqlen": self.seqlen,
            "bos": self.bos.to_dict() if self.bos else None,
            "allocation": self.allocation,
            **({} if self.experts is None else {"experts": self.experts}),
            "sparsity": self.sparsity,
            "prunable": self.prunable,
            "removed": self.removed,
            "parameters": self.parameters,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory,
            "notes": self.notes,
            "layers": [layer.to_dict() for layer in self.layers],
        }


def is_layer(plain: Any) -> bool:
    """Whether a value that was read is what `asdict` makes of a `LayerReport`."""
    kinds = {name: type(value) for name, value in vars(LayerReport("", "", "", 1, 1, 0, 0)).items()}
    if not isinstance(plain, dict) or plain.keys() != kinds.keys():
        return False
    alike = all(type(plain[name]) is kind for name, kind in kinds.items())
    figures = alike and all(isinstance(found, int | float) for found in plain["figures"].values())
    return figures and min(plain["rows"], plain["columns"]) > 0


def left_dense(layers: list[LayerReport]) -> list[str]:
    """A sentence for every reason matrices stayed dense, with their number by kind."""
    reasons: dict[str, Counter[str]] = {}
    for layer in layers:
        if layer.dense:
            reasons.setdefault(layer.dense, Counter())[layer.kind] += 1
    return [
        f"Left dense, {why}: {', '.join(f'{n} x {kind}' for kind, n in sorted(kinds.items()))}."
        for why, kinds in reasons.items()
    ]


def fitted_to(layers: list[LayerReport], targets: str) -> list[str]:
    """Sentences about which matrices were fitted to the dense model's outputs, and why others were
    not."""
    fitted = [layer for layer in layers if not layer.dense]
    if targets == OWN or not fitted:
        return []
    towards = [layer for layer in fitted if layer.figures.get(SHARE)]
    notes = [
        f"{len(towards)} of {len(fitted)} matrices are fitted to the dense model's outputs"
        f"{', in part' if targets == 'mixed' else ''}."
    ]
    others: dict[str, Counter[str]] = {}
    for layer in fitted:
        if SHARE not in layer.figures:
            few = layer.tokens < TOKENS_A_CHANNEL * layer.columns
            why = "experts, or several in a block"
            why = f"fewer than {TOKENS_A_CHANNEL} tokens a channel" if few else why
        elif not layer.figures[SHARE]:
            why = "the error on held-out tokens would not fall"
        else:
            continue
        others.setdefault(why, Counter())[layer.kind] += 1
    return notes + [
        f"Fitted to their own outputs, {why}: "
        f"{', '.join(f'{n} x {kind}' for kind, n in sorted(kinds.items()))}."
        for why, kinds in others.items()
    ]


def warnings(layers: list[LayerReport]) -> list[str]:
    """A sentence when steps that fit the calibration data made things worse on other tokens."""
    known = [layer for layer in layers if "held_out_error" in layer.figures]
    worse = [
        layer
        for layer in known
        if layer.figures["held_out_error"] > layer.figures["held_out_error_base"]
    ]
    if not worse:
        return []

    def rise(layer: LayerReport) -> float:
        return layer.figures["held_out_error"] - layer.figures["held_out_error_base"]

    most = max(worse, key=rise)
    before, after = (most.figures[name] for name in ("held_out_error_base", "held_out_error"))
    return [
        f"On held-out tokens the error of {len(worse)} of {len(known)} matrices is larger than "
        f"with the base mask alone, most in {most.name} ({before:.3g} -> {after:.3g}): the "
        "calibration set is too small for this recipe."
    ]
