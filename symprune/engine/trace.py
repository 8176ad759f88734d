"""Which weights choose what is computed: their product is looked up for what is largest.

Routers go by many names, but what they do is always the same: the result of one product, turned
into probabilities or corrected by a bias, decides which experts a token is given to. So results are
followed from a product with a weight to the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

CHOICES = {
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("topk", "argmax", "sort", "argsort", "kthvalue")
}


class Trace:
    """Follows one forward pass; parameters are known by their identity."""

    def __init__(self) -> None:
        self.going = True
        self.choosing: set[int] = set()
        self._weights = WeakIdKeyDictionary()  # tensor -> the parameter it was made from
        self._behind = WeakIdKeyDictionary()  # tensor -> the parameters whose product it comes from

    def stop(self) -> None:
        self.going = False
        self._weights.clear()
        self._behind.clear()

    def follow(self, func: Any, factors: tuple[Tensor, ...], given: Any, result: Any) -> set[int]:
        """Take note of a step; the parameters that stood in it as factors."""
        in_product = {w for factor in factors for w in self._made_from(factor)}
        if in_product:
            self._note(self._behind, result, in_product)
            return in_product
        tensors = list(_tensors(given))
        made_from = [self._made_from(tensor) for tensor in tensors]
        if tensors and all(made_from):
            self._note(self._weights, result, set().union(*made_from))
            return set()
        behind = set().union(*(self._behind.get(tensor, set()) for tensor in tensors))
        if func in CHOICES:
            self.choosing |= behind
        else:
            self._note(self._behind, result, behind)
        return set()

    def _made_from(self, tensor: Tensor) -> set[int]:
        """The parameters a tensor is, or was made from alone: a slice, a copy in another type."""
        return (
            {id(tensor)} if isinstance(tensor, nn.Parameter) else self._weights.get(tensor, set())
        )

    def _note(self, where: WeakIdKeyDictionary, result: Any, parameters: set[int]) -> None:
        if parameters:
            for tensor in _tensors(result):
                where[tensor] = parameters


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
