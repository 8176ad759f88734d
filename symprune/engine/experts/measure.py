"""How much of a layer's output comes from each expert, measured on the tokens that are routed to
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from symprune.engine.experts.mixtures import Mixture
from symprune.experts import score


@dataclass
class Load:
    """Of each expert of a layer: how many tokens came to it, the sum of the router's weights they
    came with, and the sum of what they say of it."""

    tokens: list[int]
    gates: list[float]
    sums: list[float]

    @classmethod
    def empty(cls, count: int) -> Load:
        return cls([0] * count, [0.0] * count, [0.0] * count)

    @property
    def scores(self) -> list[float]:
        """REAP's scores; 0 for an expert that no token came to."""
        pairs = zip(self.sums, self.tokens, strict=True)
        return [total / count if count else 0.0 for total, count in pairs]


@contextmanager
def watching(mixtures: Iterable[Mixture], loads: dict[str, Load]) -> Iterator[None]:
    """Add what passes the mixtures, under their names, to `loads`."""
    handles = []
    for mixture in mixtures:
        load = loads.setdefault(mixture.name, Load.empty(mixture.count))
        handles.append(mixture.experts.register_forward_pre_hook(_adder(load)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adder(load: Load) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def add(experts: nn.Module, args: tuple[Any, ...]) -> None:
        hidden, picked, gates = args
        for number in torch.unique(picked).tolist():
            tokens, places = torch.where(picked == number)
            outputs = _run_expert(experts, hidden[tokens], number, gates)
            weights = gates[tokens, places]
            found = score(weights, outputs).cpu().double()
            load.tokens[number] += len(found)
            load.gates[number] += float(weights.double().sum())
            load.sums[number] += float(found.sum())

    return add


def _run_expert(experts: nn.Module, hidden: Tensor, number: int, gates: Tensor) -> Tensor:
    """The output of one expert, as if the router had given it the whole weight."""
    picked = torch.full((len(hidden), 1), number, device=hidden.device)
    whole = torch.ones((len(hidden), 1), dtype=gates.dtype, device=hidden.device)
    found: Tensor = experts.forward(hidden, picked, whole)
    return found
