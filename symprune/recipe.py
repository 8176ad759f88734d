"""Recipe: what to do to a model, validated, one YAML or JSON file <-> one dataclass."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from symprune import masks, scores
from symprune.errors import SympruneError


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which weights go; two equal recipes give the same bits.

    sparsity is the fraction of every group that goes; a pattern N:M keeps N of every M instead.
    group is `row` (each output channel loses the same number, Wanda's way) or `layer` (one
    threshold per matrix, RIA's way and the thesis's Tables 6.2-6.4).
    """

    method: str = "ria"
    params: Mapping[str, Any] = field(default_factory=dict)
    sparsity: float | None = None
    pattern: str | None = None
    group: str = "row"
    calibration: str = "c4"
    nsamples: int = 128
    seqlen: int = 2048
    seed: int = 0

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
        for name in ("nsamples", "seqlen"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise SympruneError(f"{name} must be a whole number above 0.")
        object.__setattr__(self, "params", scores.get(self.method).check(self.params))

    @property
    def n_of_m(self) -> masks.Pattern | None:
        return masks.Pattern.parse(self.pattern) if self.pattern else None

    @property
    def criterion(self) -> scores.Criterion:
        return scores.get(self.method)

    @property
    def target_sparsity(self) -> float:
        """The fraction of prunable weights that goes."""
        return self.n_of_m.sparsity if self.n_of_m else float(self.sparsity or 0)

    def describe(self) -> str:
        """One line for tables: `ria alpha=0.5, 50 % per row`."""
        params = " ".join(f"{key}={_plain(value)}" for key, value in self.params.items())
        amount = self.pattern or f"{100 * self.target_sparsity:g} % per {self.group}"
        return f"{' '.join(part for part in (self.method, params) if part)}, {amount}"

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
                raise SympruneError(f"A recipe has no {name!r}; {hint}")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        if Path(path).suffix == ".json":
            text = json.dumps(self.to_dict(), indent=2) + "\n"
        Path(path).write_text(text)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe file; JSON is YAML too."""
        try:
            values = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise SympruneError(f"Cannot read recipe {path}: {error.strerror}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise SympruneError(f"Recipe {path} is neither YAML nor JSON.") from error
        if not isinstance(values, dict):
            raise SympruneError(f"Recipe {path} is not a list of names and values.")
        return cls.from_dict(values)

    def with_changes(self, **changes: Any) -> Recipe:
        """A copy with some fields replaced; a new sparsity displaces a pattern and vice versa."""
        if changes.get("pattern") is not None and "sparsity" not in changes:
            changes["sparsity"] = None
        if changes.get("sparsity") is not None and "pattern" not in changes:
            changes["pattern"] = None
        if "method" in changes and "params" not in changes and changes["method"] != self.method:
            changes["params"] = {}
        return replace(self, **changes)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
