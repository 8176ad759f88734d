"""What the blocks' forwards take besides the hidden states, for every sample.

Masks and position embeddings are the same for all samples and kept once. Some models also hand
their blocks something of the sample itself: per-layer inputs, the embedded tokens, the tokens. What
differs between samples is kept for each of them. And some pass one mapping through all blocks that
earlier ones fill and later ones read: every sample has a mapping of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.machine import host

BlockInputs = tuple[tuple[Any, ...], dict[str, Any]]
Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


class Arguments:
    """The arguments of every block.

    They are made from the first sample's; all others' are compared with those, and what differs is
    kept in a second pass over the samples. allocate(shape, dtype, device) makes the room for it, if
    not in memory.
    """

    def __init__(
        self, first: list[BlockInputs], samples: int, allocate: Allocate | None = None
    ) -> None:
        self._blocks = first
        self._samples = samples
        self._allocate = allocate
        self._first = list(_leaves(first))
        self._places = {id(leaf): place for place, leaf in enumerate(self._first)}
        self._own = {p for p, leaf in enumerate(self._first) if not isinstance(leaf, Tensor)}
        self._equal: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor | list[Any]] = {}

    @property
    def carry_state(self) -> bool:
        """Whether blocks leave something for later blocks besides the hidden states."""
        return any(not isinstance(leaf, Tensor) for leaf in self._first)

    @property
    def in_memory(self) -> bool:
        """Whether room is made in memory."""
        return self._allocate is None

    @property
    def stack(self) -> bool:
        """Whether several samples' arguments can be given to a block at once."""
        return not any(isinstance(kept, list) for kept in self._kept.values())

    def compare(self, blocks: list[BlockInputs]) -> None:
        """Hold another sample's arguments against the first one's; nobody waits for the answer."""
        for place, leaf in enumerate(self._check(blocks)):
            first = self._first[place]
            if leaf is first or place in self._own:
                continue
            if leaf.shape != first.shape or leaf.dtype != first.dtype:
                self._own.add(place)
            else:
                equal = (leaf == first).all()
                self._equal[place] = self._equal.get(place, equal) & equal

    def differ(self) -> bool:
        """Whether a sample has arguments of its own, which are still to be kept; asked once."""
        answers = zip(self._equal, host.bring(list(self._equal.values())), strict=True)
        self._own |= {place for place, equal in answers if not equal}
        self._equal.clear()
        return bool(self._own)

    def keep(self, sample: int, blocks: list[BlockInputs]) -> None:
        """Keep what is a sample's own; samples come in order."""
        leaves = self._check(blocks)
        for place in self._own:
            leaf, kept = leaves[place], self._kept.get(place)
            if sample == 0:
                kept = self._kept[place] = self._make_room(leaf)
            elif isinstance(kept, Tensor) and kept.shape[1:] != leaf.shape[1:]:
                kept = self._kept[place] = [kept[i : i + 1] for i in range(sample)]
            if isinstance(kept, Tensor):
                kept[sample : sample + 1] = leaf.to(kept.device)
            elif kept is not None:
                kept.append(leaf)

    def _check(self, blocks: list[BlockInputs]) -> list[Any]:
        leaves = list(_leaves(blocks))
        if len(leaves) != len(self._first):
            raise SympruneError(
                "The blocks of the model take other arguments for one sample than for another."
            )
        return leaves

    def _make_room(self, leaf: Any) -> Tensor | list[Any]:
        """For one argument of all samples: one tensor if it has a dimension for samples."""
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != 1:
            return []
        return self.allocate((self._samples, *leaf.shape[1:]), leaf.dtype, leaf.device)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room where that of all samples is made."""
        if self._allocate is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return self._allocate(shape, dtype, device)

    def of(self, block: int, samples: range, device: torch.device) -> BlockInputs:
        """What a block takes for consecutive samples, on its device."""

        def pick(value: Any) -> Any:
            place = self._places.get(id(value))
            if place is not None:
                kept = self._kept.get(place)
                if isinstance(kept, list):
                    return _move(kept[samples.start], device)
                return (value if kept is None else kept[samples.start : samples.stop]).to(device)
            if type(value) in (tuple, list):
                return type(value)(pick(item) for item in value)
            if type(value) is dict:
                return {key: pick(item) for key, item in value.items()}
            return value

        return pick(self._blocks[block])  # type: ignore[no-any-return]

    def only(self, samples: range) -> Arguments:
        """The arguments of some samples, as if there were no others. What blocks write to is a
        copy: nobody else sees what they leave there."""
        part = Arguments(self._blocks, len(samples), self._allocate)
        for place, kept in self._kept.items():
            some = kept[samples.start : samples.stop]
            if isinstance(some, list):
                some = [copy(each) if isinstance(each, MutableMapping) else each for each in some]
            part._kept[place] = some
        return part


def _leaves(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The tensors in nested arguments, and the mappings blocks write to; each once."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor) or _is_state(value):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item, seen)
    elif type(value) is dict:
        for item in value.values():
            yield from _leaves(item, seen)


def _is_state(value: Any) -> bool:
    """A mapping that is empty in front of the first block is there to be filled by the blocks."""
    return isinstance(value, MutableMapping) and (type(value) is not dict or not value)


def _move(value: Any, device: torch.device) -> Any:
    """A sample's own tensor on the device; of a mapping, its content: it stays the same mapping."""
    if isinstance(value, Tensor):
        return value.to(device)
    for key, item in value.items():
        if isinstance(item, Tensor):
            value[key] = item.to(device)
        elif type(item) in (tuple, list):
            value[key] = type(item)(i.to(device) if isinstance(i, Tensor) else i for i in item)
    return value
