"""What the blocks' forwards take besides the hidden states, for every sample.

Masks and position embeddings are the same for all samples and kept once. Some models also hand
their blocks something of the sample itself: per-layer inputs, the embedded tokens, the tokens. What
differs between samples is kept for each of them. And some pass one mapping through all blocks that
earlier ones fill and later ones read: every sample has a mapping of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from symprune.errors import SympruneError

BlockInputs = tuple[tuple[Any, ...], dict[str, Any]]
Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


class Arguments:
    """The arguments of every block; made from the first sample's, the others' are added.

    allocate(shape, dtype, device) makes the room for what differs, if not in memory.
    """

    def __init__(
        self, first: list[BlockInputs], samples: int, allocate: Allocate | None = None
    ) -> None:
        self._blocks = first
        self._samples = samples
        self._allocate = allocate
        self._first = list(_leaves(first))
        self._places = {id(leaf): place for place, leaf in enumerate(self._first)}
        self._differing: dict[int, Tensor | list[Any]] = {}
        for place, leaf in enumerate(self._first):
            if not isinstance(leaf, Tensor):
                self._differing[place] = [leaf]

    @property
    def carry_state(self) -> bool:
        """Whether blocks leave something for later blocks besides the hidden states."""
        return any(not isinstance(leaf, Tensor) for leaf in self._first)

    @property
    def stack(self) -> bool:
        """Whether several samples' arguments can be given to a block at once."""
        return not any(isinstance(kept, list) for kept in self._differing.values())

    def add(self, sample: int, blocks: list[BlockInputs]) -> None:
        """The arguments of the next sample."""
        leaves = list(_leaves(blocks))
        if len(leaves) != len(self._first):
            raise SympruneError(
                "The blocks of the model take other arguments for one sample than for another."
            )
        for place, leaf in enumerate(leaves):
            kept = self._differing.get(place)
            if isinstance(kept, list):
                kept.append(leaf)
            elif kept is not None and kept.shape[1:] == leaf.shape[1:]:
                kept[sample : sample + 1] = leaf.to(kept.device)
            elif kept is not None or not _equal(leaf, self._first[place]):
                self._separate(place, sample, leaf)

    def _separate(self, place: int, sample: int, leaf: Tensor) -> None:
        """From here on a sample's own; all before it had the first one's."""
        first = self._first[place]
        before = self._differing.get(place)
        if before is None and first.dim() and first.shape[0] == 1 and leaf.shape == first.shape:
            shape = (self._samples, *first.shape[1:])
            if self._allocate is None:
                kept = torch.empty(shape, dtype=first.dtype, device=first.device)
            else:
                kept = self._allocate(shape, first.dtype, first.device)
            kept[:sample] = first.to(kept.device)
            kept[sample : sample + 1] = leaf.to(kept.device)
            self._differing[place] = kept
        else:
            old = [first] * sample if before is None else [before[i : i + 1] for i in range(sample)]
            self._differing[place] = [*old, leaf]

    def of(self, block: int, samples: range, device: torch.device) -> BlockInputs:
        """What a block takes for consecutive samples, on its device."""

        def pick(value: Any) -> Any:
            place = self._places.get(id(value))
            if place is not None:
                kept = self._differing.get(place)
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
        """The arguments of some samples, as if there were no others."""
        part = Arguments(self._blocks, len(samples), self._allocate)
        part._differing = {
            place: kept[samples.start : samples.stop] for place, kept in self._differing.items()
        }
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


def _equal(left: Tensor, right: Tensor) -> bool:
    if left is right:
        return True
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)


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
