"""Which tensors of a checkpoint make which parameters of a model, and putting them there.

A checkpoint's names need not be the model's: prefixes come and go, and experts that are files of
their own on disk are one fused parameter in the model. transformers knows the rules; here they are
applied to some parameters at a time, on a model that otherwise has no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.models.support import auto_class

NEEDED = "transformers>=5.6"
"""The first release whose source has all that is used here; constraints.txt has the one tested."""


class Tensors(Protocol):
    """Something that tensors can be read from by name. Exact ones are as they are computed with,
    whatever the checkpoint's type."""

    def is_exact(self, name: str) -> bool: ...
    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Types:
    """The type most weights have: in the model as it is made, in the checkpoint, in computing."""

    made: torch.dtype
    stored: torch.dtype
    computed: torch.dtype


def skeleton(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """A model without weights: parameters are on the meta device, buffers are real."""
    from accelerate import init_empty_weights

    made_by = auto_class(config, trust_remote_code)
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    with init_empty_weights(include_buffers=False):
        model: Any = made_by.from_config(config, **options)
    model.tie_weights()  # parameters that are one come out of the context as two
    return model.eval().requires_grad_(False)


@contextmanager
def _explain_other_release() -> Iterator[None]:
    """transformers promises nothing about what is used here: a release that has it no more, or not
    yet, is named."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise SympruneError(
            f"transformers {version('transformers')} does not map checkpoints to models the way "
            f"symprune knows ({error}); install {NEEDED}, or an older release if this one is newer."
        ) from error


class Names:
    """The way from a checkpoint's tensors to a model's parameters and back."""

    def __init__(self, model: Any, keys: Iterable[str], types: Types) -> None:
        self.model = model
        self.types = types
        self.sources: dict[str, list[tuple[str, str | None]]] = {}
        with _explain_other_release():
            self._find_sources(keys)

    def _find_sources(self, keys: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        model = self.model
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converters = {p: rule for rule in converters for p in rule.source_patterns}
        plan = model._get_dtype_plan(self.types.made)
        self._wide = [pattern.replace("*", ".*") for pattern in plan]
        known = model.state_dict()
        self._made_as = {name: tensor.dtype for name, tensor in known.items()}
        for key in sorted(keys, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, renamings, converters, model.base_model_prefix, known
            )
            if name not in known and key in known:
                name, pattern = key, None
            if name in known:
                self.sources.setdefault(name, []).append((key, pattern))
        model._weight_conversions = [rule for rule in rules if rule.was_used()]

    def share(self, prefix: str) -> None:
        """Parameters under `prefix` that are one and the same stand in the checkpoint once: each of
        them is made of the same tensors."""
        same: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name.startswith(prefix):
                same.setdefault(id(parameter), []).append(name)
        for names in same.values():
            known = next((name for name in names if name in self.sources), None)
            if known is not None:
                self.sources |= {n: self.sources[known] for n in names if n not in self.sources}

    def keys_of(self, parameters: Iterable[str]) -> list[str]:
        """The checkpoint's tensors behind some parameters."""
        return [key for name in parameters for key, _ in self.sources.get(name, [])]

    def load(self, tensors: Tensors, parameters: Iterable[str], device: torch.device) -> None:
        """Read parameters (and buffers) and put them into the model."""
        for name in parameters:
            exact = all(tensors.is_exact(key) for key, _ in self.sources[name])
            for target, value in self._assemble(tensors, name).items():
                self._set(target, value, device, exact)

    def read(self, tensors: Tensors, name: str) -> Tensor:
        """A parameter as the checkpoint has it, put together if it is in pieces there."""
        return self._assemble(tensors, name)[name]

    def _assemble(self, tensors: Tensors, name: str) -> dict[str, Tensor]:
        sources = self.sources[name]
        if sources[0][1] is None:
            return {name: tensors.read(sources[0][0])}
        with _explain_other_release():
            rule: Any = deepcopy(self._converters[sources[0][1]])
            for key, pattern in sources:
                rule.add_tensor(name, key, pattern, lambda key=key: tensors.read(key))
            made = rule.convert(name, model=self.model, config=self.model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    def _set(self, name: str, value: Tensor, device: torch.device, exact: bool) -> None:
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        there = getattr(module, leaf)
        if there.shape != value.shape:
            raise SympruneError(
                f"{name} is {tuple(value.shape)} in the checkpoint, "
                f"{tuple(there.shape)} by its configuration."
            )
        value = self._cast(name, value, exact).to(device)
        if leaf in module._buffers:
            module._buffers[leaf] = value
        else:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    def _cast(self, name: str, value: Tensor, exact: bool) -> Tensor:
        wide = any(re.search(pattern, name) for pattern in self._wide)
        if wide and value.is_floating_point():
            return value.to(torch.float32)
        if self._made_as[name] == self.types.made and value.is_floating_point():
            stored = value if exact else value.to(self.types.stored)
            return stored.to(self.types.computed)
        return value.to(self._made_as[name])

    def take_apart(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters under the names, and in the pieces, the checkpoint has them in."""
        plain = {n: v for n, v in values.items() if self.sources[n][0][1] is None}
        found = {self.sources[name][0][0]: value for name, value in plain.items()}
        fused = {name: value for name, value in values.items() if name not in plain}
        if not fused:
            return found
        with _explain_other_release():
            from transformers.core_model_loading import revert_weight_conversion

            return found | revert_weight_conversion(self.model, fused)


def release(model: nn.Module, parameters: Iterable[str]) -> None:
    """Let go of parameters' memory."""
    for name in parameters:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        there = module._parameters.get(leaf)
        if there is not None:
            empty = torch.empty_like(there, device="meta")
            module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
