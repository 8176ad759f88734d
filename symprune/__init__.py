"""symprune: make a pretrained language model sparse without training it.

`from symprune import prune, Recipe` for the engine; `symprune.scores`, `symprune.masks` and
`symprune.stats` work alone on any tensors. Names are resolved when first used, so importing the
package imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from symprune.runtime.register import watch

__version__ = "0.1.0"

_HOME = {
    "MaskSet": "symprune.maskset",
    "Recipe": "symprune.recipe",
    "Report": "symprune.engine.report",
    "SympruneError": "symprune.errors",
    "criterion": "symprune.criteria",
    "load": "symprune.checkpoint.load",
    "pack_model": "symprune.runtime.pack_model",
    "prune": "symprune.engine.walk",
}
_MODULES = (
    "calibration",
    "criteria",
    "errors",
    "eval",
    "fed",
    "masks",
    "maskset",
    "recipe",
    "scores",
    "stats",
)

__all__ = [
    "MaskSet",
    "Recipe",
    "Report",
    "SympruneError",
    "criterion",
    "load",
    "pack_model",
    "prune",
]

watch()  # transformers can load packed models from here on


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"symprune.{name}")
    raise AttributeError(f"module 'symprune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
