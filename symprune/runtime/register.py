"""Telling transformers about packed models when it is imported, without importing it.

`import symprune` is enough for `AutoModelForCausalLM.from_pretrained` to load a packed model, and
imports neither torch nor transformers by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

WATCHED = "transformers.quantizers.auto"


def watch() -> None:
    """Register now if transformers is there, else as soon as it comes."""
    if WATCHED in sys.modules:
        _tell(sys.modules[WATCHED])
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _tell(module: ModuleType) -> None:
    import_module("symprune.runtime.hf_quantizer").register(module)


class _Watcher:
    """Sees the module of transformers being imported that lists the ways to load a model."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != WATCHED or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                _tell(module)

            loader.exec_module = execute_and_tell
        return spec
