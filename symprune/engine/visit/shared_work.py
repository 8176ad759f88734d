"""Decisions about a block's matrices, divided among the processes: each makes some, all have all.

Every process has the same statistics to the bit, so it does not show who decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from symprune.engine.decide import Decision
from symprune.errors import SympruneError
from symprune.machine import distributed
from symprune.values.grid import OnGrid

Told = tuple[Decision, dict[str, tuple[torch.Size, torch.dtype]]]


def decide_together(
    work: Sequence[Callable[[], Decision]],
    costs: Sequence[float],
    devices: Sequence[torch.device],
    tick: Callable[[int], None] = lambda _: None,
) -> Iterator[Decision]:
    """What each piece of work comes to, one after the other. costs: how long each takes, in any
    unit; devices: where its tensors are. A failure in one process is one in all of them."""
    if distributed.size() == 1:
        for number, do in enumerate(work):
            tick(number)
            yield do()
        return
    owners, mine, failed = divide(costs, distributed.size()), dict[int, Decision](), ""
    try:
        for number, do in enumerate(work):
            if owners[number] == distributed.rank():
                tick(number)
                mine[number] = do()
    except SympruneError as error:
        failed = str(error)
    for sentence in filter(None, distributed.everyone(failed)):
        raise SympruneError(sentence)
    yield from _share(mine, owners, devices)


def divide(costs: Sequence[float], processes: int) -> list[int]:
    """Who does which piece of work: the longest first, each for the one who has least to do."""
    owners, busy = [0] * len(costs), [0.0] * processes
    for number in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        owners[number] = busy.index(min(busy))
        busy[owners[number]] += costs[number]
    return owners


def _share(
    mine: dict[int, Decision], owners: Sequence[int], devices: Sequence[torch.device]
) -> Iterator[Decision]:
    """First all learn what there is, then tensor after tensor is sent by whom it belongs to."""
    told: dict[int, Told] = {}
    for part in distributed.everyone({number: _describe(each) for number, each in mine.items()}):
        told |= part
    for number, (owner, device) in enumerate(zip(owners, devices, strict=True)):
        outline, kinds = told[number]
        tensors = _tensors(mine.pop(number)) if number in mine else {}
        found = {
            name: distributed.send(tensors.get(name), owner, shape, dtype, device)
            for name, (shape, dtype) in kinds.items()
        }
        yield _put(outline, found)


def _tensors(decision: Decision) -> dict[str, Tensor]:
    """Those of a decision, by name."""
    values = decision.values
    found: dict[str, Tensor | None] = {
        "keep": decision.keep,
        "weight": decision.weight,
        "unrounded": decision.unrounded,
        "codes": None if values is None else values.codes,
        "scales": None if values is None else values.scales,
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _describe(decision: Decision) -> Told:
    """A decision without its tensors, and what these are."""
    kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in _tensors(decision).items()}
    nothing = torch.empty(0)
    grid = decision.values and OnGrid(nothing, nothing, decision.values.grid)
    return replace(decision, keep=nothing, weight=None, values=grid, unrounded=None), kinds


def _put(outline: Decision, found: dict[str, Tensor]) -> Decision:
    """A decision from what `_describe` made of it and its tensors."""
    values: Any = outline.values
    if values is not None:
        values = OnGrid(found["codes"], found["scales"], values.grid)
    return replace(
        outline,
        keep=found["keep"],
        weight=found.get("weight"),
        values=values,
        unrounded=found.get("unrounded"),
    )
