"""Recipe: what to do to a model, validated, one YAML or JSON file <-> one dataclass."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from symprune import criteria, masks
from symprune.allocate import Allocation, choose_allocation
from symprune.card.plan import read_plan
from symprune.corpus import mixture
from symprune.errors import SympruneError
from symprune.experts import Drop
from symprune.machine import durable
from symprune.permute import AUTO, choose_parts
from symprune.reconstruct import BlockReconstruction, choose_reconstruction
from symprune.refine import Refinement, choose_refinement
from symprune.stats import GRAM
from symprune.update import LeastSquares, Update, choose_update
from symprune.update.targets import OWN, TARGETS
from symprune.validation import (
    check_choice,
    check_names,
    check_seed,
    check_whole,
    read_mapping,
    to_mapping,
)
from symprune.values import Rounding, choose_rounding
from symprune.values.grid import GRIDS, Grid

BOS = ("auto", "always", "never")
INPUTS = ("pruned", "dense")
HEAD_VALUES = ("int8", "int4")
MOST = {"nsamples": 1_000_000, "seqlen": 10_000_000, "self_samples": 1_000_000}
"""Windows, and tokens in a window, that any machine may be asked to hold."""
SHIPPED = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which weights go; two equal recipes give the same bits.

    Args:
        method: The criterion (`symprune methods` lists them), or your own as `module:function`,
            after `criteria.allow_code`.
        params: The criterion's parameters, by name.
        sparsity: The fraction of every group that goes; left out, 0.5, if there is no pattern.
        pattern: N:M instead: N of every M stay, as in `2:4`.
        group: `row`, each output channel loses the same number (Wanda's way), or `layer`, one
            threshold per matrix (RIA's way and the thesis's Tables 6.2-6.4).
        refine: A refinement of the mask: a name, or a mapping with `name` and options.
        update: An update of the kept weights, likewise.
        allocate: How much each layer gives, likewise; left out, all give the same.
        values: The grid the kept weights are on (int8, int4, int3, int2), likewise; left out, they
            have the model's type. With sparsity 0 all weights are kept, and no other step is taken.
        reconstruct: A training of each block's kept weights on the dense model's outputs, through
            the rounding where there are values: `block`, likewise.
        inputs: What statistics are measured on: the outputs of the `pruned` blocks before, or of
            the `dense` ones. (The option of that name of `reconstruct` says the same of training.)
        sequential: Whether a block is measured and pruned group by group in the order data flows
            through it, each group behind the pruned ones before it.
        targets: What updates and values are fitted to: the layer's `own` outputs on the inputs it
            has behind pruned blocks, the `dense` model's outputs, or, `mixed`, a part of the way
            between them that held-out tokens choose. The last two go group by group.
        values_head: The grid of the embeddings and the head (int8, int4), rounded to the nearest.
        permute: With a pattern, which channels are put into an order it keeps more in, folded into
            the weights: `mlp`, `heads`, `residual` (with commas between them), `all`, or `auto`,
            those that the model's structure allows.
        experts: Whole experts that go first, of a mixture: `drop:25%` of every layer's, those whose
            outputs, as the router weighs them, are smallest. With sparsity 0 nothing else goes.
        token_limit: What one calibration token counts for at most, in lengths of the median token.
        calibration: The text: c4, wikitext2, builtin, a file or folder, a data set of the hub
            (`hf:ORG/NAME`), `self` (the model writes it), or several, `c4*0.7 + mine.jsonl*0.3`.
        nsamples: How many windows of it.
        seqlen: How many tokens in a window.
        self_samples: How many windows more the dense model writes itself, from beginnings in the
            others; left out, none.
        seed: Of everything random.
        calibration_seed: Of the choice of windows; left out, `seed`.
        bos: Whether windows of text begin with BOS, in calibration and evaluation: `auto` (where
            the model needs it), `always` or `never`.
    """

    method: str = "ria"
    params: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    sparsity: float | None = None
    pattern: str | None = None
    group: str = "row"
    refine: str | Mapping[str, Any] | None = None
    update: str | Mapping[str, Any] | None = None
    allocate: str | Mapping[str, Any] | None = None
    values: str | Mapping[str, Any] | None = None
    reconstruct: str | Mapping[str, Any] | None = None
    inputs: str = "pruned"
    sequential: bool = False
    targets: str = "own"
    values_head: str | None = None
    permute: str | list[str] | None = None
    experts: str | None = None
    token_limit: float | None = None
    calibration: str = "c4"
    nsamples: int = 128
    seqlen: int = 2048
    self_samples: int | None = None
    seed: int = 0
    calibration_seed: int | None = None
    bos: str = "auto"

    def __post_init__(self) -> None:
        if self.sparsity is not None and self.pattern is not None:
            raise SympruneError("Give a sparsity or a pattern, not both.")
        if self.pattern is not None:
            object.__setattr__(self, "pattern", str(masks.Pattern.parse(self.pattern)))
        elif self.sparsity is None:
            object.__setattr__(self, "sparsity", 0.5)
        elif not isinstance(self.sparsity, int | float) or not 0 <= self.sparsity < 1:
            raise SympruneError(f"Sparsity {self.sparsity} is outside [0, 1).")
        if self.group not in masks.GROUPS:
            raise SympruneError(f"Unknown group {self.group!r}; choose row or layer.")
        if self.pattern is not None and self.group != "row":
            raise SympruneError(f"Pattern {self.pattern} is its own group; leave out the group.")
        if self.self_samples == 0:
            object.__setattr__(self, "self_samples", None)
        for name, most in MOST.items():
            if name != "self_samples" or self.self_samples is not None:
                check_whole(name, getattr(self, name), 1, most)
        for name, seed in {"seed": self.seed, "calibration_seed": self.text_seed}.items():
            check_seed(name, seed)
        for name in ("calibration", "group"):
            if not isinstance(getattr(self, name), str):
                raise SympruneError(f"{name} is a name, not {getattr(self, name)!r}.")
        mixture.parse(self.calibration)
        limit = self.token_limit
        if limit is not None and not (isinstance(limit, int | float) and 1 <= limit < math.inf):
            raise SympruneError(f"token_limit {limit} is not a number from 1 on.")
        check_choice("bos", self.bos, BOS)
        check_choice("inputs", self.inputs, INPUTS)
        check_choice("targets", self.targets, TARGETS)
        if not isinstance(self.sequential, bool):
            raise SympruneError(f"sequential is true or false, not {self.sequential!r}.")
        if self.keeps_all:  # nothing to refine, to update or to allocate
            for step in ("refine", "update", "allocate"):
                object.__setattr__(self, step, None)
        object.__setattr__(self, "params", criteria.get(self.method).check(self.params))
        object.__setattr__(self, "refine", to_mapping(self.refinement))
        object.__setattr__(self, "update", to_mapping(self.weight_update))
        object.__setattr__(self, "allocate", to_mapping(self.allocation))
        object.__setattr__(self, "values", to_mapping(self.rounding))
        object.__setattr__(self, "reconstruct", to_mapping(self.reconstruction))
        if self.permute != AUTO:
            object.__setattr__(self, "permute", ",".join(choose_parts(self.permute)) or None)
        self._check_steps()

    def _check_steps(self) -> None:
        update = self.weight_update
        if self.values_head is not None:
            check_choice("values_head", self.values_head, HEAD_VALUES)
        if self.refine is not None and update is not None and update.finds_mask:
            raise SympruneError(f"{update.finds_mask}: leave out the refinement.")
        self._check_flow()
        self._check_experts()
        if self.allocate is not None and self.pattern is not None:
            raise SympruneError(
                f"Pattern {self.pattern} takes the same from every layer: leave out the allocation."
            )
        if self.permute not in (None, AUTO) and self.pattern is None:
            raise SympruneError(
                "Without an N:M pattern the order of channels changes nothing: leave out --permute."
            )

    def _check_experts(self) -> None:
        if self.experts is None:
            return
        object.__setattr__(self, "experts", str(Drop.parse(self.experts)))
        writes = any(part.source == mixture.OWN for part in mixture.parse(self.calibration))
        if writes or self.self_samples is not None:
            raise SympruneError(
                "experts are measured on text that is there before the run: leave out calibration "
                "self and self_samples."
            )

    def check_takes_masks(self) -> None:
        """Fail where it cannot go on from masks that were made earlier."""
        update = self.weight_update
        if update is not None and update.finds_mask:
            raise SympruneError(f"{update.finds_mask}: leave out the masks to start from.")
        if self.allocate is not None:
            raise SympruneError("Masks say how much each layer gives: leave out the allocation.")
        if self.experts is not None:
            raise SympruneError(
                "Masks made with --experts fit the model beside them, which has fewer experts than "
                "the dense one: make new ones."
            )
        if self.permuted_parts:
            raise SympruneError(
                "Masks made with --permute fit the weights beside them, not the dense model's: "
                "make new ones."
            )

    def _check_flow(self) -> None:
        fitted = (self.weight_update, self.rounding)
        if self.targets != OWN and all(step is None or step.needs != GRAM for step in fitted):
            raise SympruneError(
                f"targets {self.targets} is what weights are fitted to: give an update, or values "
                "that are not rounded to the nearest."
            )
        if self.inputs == "dense" and self.by_groups:
            raise SympruneError(
                "inputs dense measures the dense model, where no group is behind a pruned one: "
                "leave out sequential and targets."
            )
        if self.by_groups and self.permute not in (None, AUTO):
            raise SympruneError(
                "permute orders the channels of a block that was measured at once: leave out "
                "sequential and targets."
            )
        if self.by_groups and "regional_gradient" in self.criterion.needs:
            raise SympruneError(
                f"Method {self.method} needs the gradients of a dense block: leave out sequential "
                "and targets."
            )

    @property
    def permuted_parts(self) -> tuple[str, ...]:
        """Whose channels are put into another order, if the model's structure allows it."""
        nothing = self.pattern is None or self.leaves_order
        return () if nothing else choose_parts(self.permute)

    @property
    def leaves_order(self) -> bool:
        """Whether channels that could be permuted are not, since groups are measured apart."""
        return self.permute == AUTO and self.pattern is not None and self.by_groups

    @property
    def fewer_experts(self) -> Drop | None:
        return None if self.experts is None else Drop.parse(self.experts)

    @property
    def text_seed(self) -> int:
        return self.seed if self.calibration_seed is None else self.calibration_seed

    @property
    def n_of_m(self) -> masks.Pattern | None:
        return masks.Pattern.parse(self.pattern) if self.pattern else None

    @property
    def criterion(self) -> criteria.Criterion:
        return criteria.get(self.method)

    @property
    def refinement(self) -> Refinement | None:
        return choose_refinement(self.refine)

    @property
    def weight_update(self) -> Update | None:
        return choose_update(self.update)

    @property
    def rounds(self) -> int:
        """How often mask and weights are found in turn."""
        chosen = self.weight_update
        return chosen.rounds if isinstance(chosen, LeastSquares) else 1

    @property
    def allocation(self) -> Allocation | None:
        return choose_allocation(self.allocate)

    @property
    def rounding(self) -> Rounding | None:
        return choose_rounding(self.values)

    @property
    def reconstruction(self) -> BlockReconstruction | None:
        return choose_reconstruction(self.reconstruct)

    @property
    def by_groups(self) -> bool:
        """Whether the groups of a block are measured one after the other."""
        return self.sequential or self.targets != OWN

    @property
    def follows_pruned(self) -> bool:
        """Whether something is measured or trained on the outputs of pruned blocks."""
        trained = self.reconstruction
        return self.inputs == "pruned" or (trained is not None and trained.inputs == "pruned")

    @property
    def trains_apart(self) -> bool:
        """Whether blocks are trained, and none on what became of another."""
        return self.reconstruction is not None and not self.follows_pruned

    @property
    def trains_predictions(self) -> bool:
        """Whether the last block is trained on what the head predicts behind pruned blocks."""
        trained = self.reconstruction
        return trained is not None and trained.last == "predictions" and self.follows_pruned

    @property
    def follows_dense(self) -> bool:
        """Whether the outputs of dense blocks are made use of."""
        needed = self.inputs == "dense" or self.targets != OWN
        return needed or self.reconstruction is not None

    @property
    def head_grid(self) -> Grid | None:
        return None if self.values_head is None else GRIDS[self.values_head]

    @property
    def keeps_all(self) -> bool:
        """Whether no single weight goes and values are asked for, or fewer experts: then no
        criterion has a say."""
        return (self.values is not None or self.experts is not None) and self.target_sparsity == 0

    @property
    def target_sparsity(self) -> float:
        """The fraction of prunable weights that goes."""
        return self.n_of_m.sparsity if self.n_of_m else float(self.sparsity or 0)

    def describe(self) -> str:
        """One line for tables: `ria alpha=0.5, 50 % per row`."""
        parts = [] if self.experts is None else [f"experts {self.experts}"]
        kept = "all other weights kept" if parts else "all weights kept"
        parts += [kept] if self.keeps_all else self._describe_mask()
        if self.token_limit is not None:
            parts.append(f"token limit {self.token_limit:g}")
        if self.self_samples is not None:
            parts.append(f"{self.self_samples} windows of its own")
        if self.inputs == "dense":
            parts.append("measured on the dense model")
        if self.by_groups:
            parts.append("group by group")
        if self.targets != OWN:
            parts.append(f"towards {self.targets} targets")
        if self.rounding is not None:
            parts.append(f"{self.rounding.name} values by {self.rounding.solve}")
        if self.reconstruction is not None:
            epochs = self.reconstruction.epochs
            parts.append(f"blocks reconstructed in {epochs} epoch{'s' if epochs > 1 else ''}")
        if self.values_head is not None:
            parts.append(f"embeddings and head {self.values_head}")
        return ", ".join(parts)

    def _describe_mask(self) -> list[str]:
        params = " ".join(f"{key}={_plain(value)}" for key, value in self.params.items())
        amount = self.pattern or f"{100 * self.target_sparsity:g} % per {self.group}"
        steps = [" ".join(part for part in (self.method, params) if part)]
        steps += [step.name for step in (self.refinement, self.weight_update) if step]
        if self.rounds > 1:
            steps[-1] += f" in {self.rounds} rounds"
        if self.permuted_parts:
            parts = "channels" if self.permute == AUTO else " and ".join(self.permuted_parts)
            amount += f" with {parts} permuted"
        if self.allocation is not None:
            amount += f" allocated by {self.allocation.name}"
        return [" + ".join(steps), amount]

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        if not isinstance(values, Mapping):
            raise SympruneError(f"A recipe is names and values, not {values!r}.")
        check_names(values, [f.name for f in fields(cls)], "A recipe")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        if Path(path).suffix == ".json":
            text = json.dumps(self.to_dict(), indent=2) + "\n"
        durable.write_text(Path(path), text)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """From a YAML or JSON file, or from the card of a model that was made by a recipe."""
        if Path(path).suffix == ".md":
            return cls.from_dict(read_plan(Path(path)).recipe)
        return cls.from_dict(read_mapping(Path(path), "recipe"))

    @classmethod
    def named(cls, name: str) -> Recipe:
        """A recipe that ships with symprune (`fast`, `balanced`, ...), or a file."""
        shipped = SHIPPED / f"{name}.yaml"
        if shipped.is_file():
            return cls.load(shipped)
        if "." not in name and "/" not in name and not Path(name).exists():
            names = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
            raise SympruneError(f"There is no recipe {name!r}; choose {names}, or name a file.")
        return cls.load(name)

    def with_changes(self, **changes: Any) -> Recipe:
        """A copy with some fields replaced; a new sparsity displaces a pattern and what is
        permuted for it, and a new pattern a sparsity and its allocation."""
        if changes.get("pattern") is not None:
            changes = {"sparsity": None, "allocate": None, **changes}
        if changes.get("sparsity") is not None and "pattern" not in changes:
            kept = AUTO if self.permute == AUTO else None
            changes = {"permute": kept, **changes, "pattern": None}
        if "method" in changes and "params" not in changes and changes["method"] != self.method:
            changes["params"] = {}
        return replace(self, **changes)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
