"""Which channels between matrices may change places, found by trying (`probe`), not by names.

A channel that goes into a matrix comes from one row of a matrix before it, or of several, as in a
gated MLP. Which rows shows when half of them are given other numbers, by every binary digit of
their place in turn. Channels may change places where they are treated alike: given the same
numbers, the same comes out. So all hidden channels of an MLP may, values only inside their head,
and what passes a norm or a convolution not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.engine.permute.probe import Probe

ROUNDINGS = 8  # that channels which are treated alike may differ by
MOST_CLASSES = 1024
_EXPERT = re.compile(r"(?<=experts)\.\d+(?=\.)|\.\d+$")


@dataclass(frozen=True)
class Link:
    """Channels between matrices, in units that move as one.

    columns are each unit's channels in all of the consumers, `[units, channels]`: several where
    heads share values. producers are rows of matrices, `[units]` each. The units of a class may
    change places with each other.
    """

    consumers: tuple[str, ...]
    columns: Tensor
    producers: tuple[tuple[str, Tensor], ...]
    classes: tuple[Tensor, ...]

    def of_expert(self, name: str) -> Link:
        """The same link of another expert: that whose matrix `name` is."""

        def other(known: str) -> str:
            numbers = iter(_EXPERT.findall(name))
            return _EXPERT.sub(lambda _: next(numbers), known)

        producers = tuple((other(known), rows) for known, rows in self.producers)
        consumers = tuple(other(known) for known in self.consumers)
        return Link(consumers, self.columns, producers, self.classes)


def kind(name: str) -> str:
    """The name that the matrices of all experts have in common."""
    return _EXPERT.sub(".#", name)


def find_links(probe: Probe) -> list[Link]:
    """The links of a block; of experts those of the first one a token came to."""
    products, _ = probe.run()
    first: dict[str, str] = {}
    for name in products.given:
        first.setdefault(kind(name), name)
    base = probe.inputs()
    rows = {m.name: m.weight.shape[0] for m in probe.matrices}
    behind: dict[str, list[str]] = {}
    for name in first.values():
        for reader in _differences(base, probe.inputs({name: torch.arange(rows[name])})):
            behind.setdefault(reader, []).append(name)
    links = []
    for names in products.readers.values():
        if names[0] in first.values() and names[0] in behind:
            link = _Search(probe, base, names, rows).find(behind[names[0]])
            if link is not None:
                links.append(link)
    return links


def _differences(base: dict[str, Tensor], now: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices whose input changed, and in which channels."""
    found = {}
    for name, x in now.items():
        if name in base and base[name].shape == x.shape:
            changed = (base[name] != x).any(0)
            if bool(changed.any()):
                found[name] = changed
    return found


class _Search:
    """The link in front of some matrices that are given the same tensor."""

    def __init__(
        self, probe: Probe, base: dict[str, Tensor], consumers: list[str], rows: dict[str, int]
    ) -> None:
        self.probe = probe
        self.base = base
        self.consumers = consumers
        self.rows = rows
        self.width = base[consumers[0]].shape[1]

    def find(self, behind: list[str]) -> Link | None:
        """behind are the matrices whose output the consumers' input depends on."""
        found: list[tuple[str, Tensor]] = []
        for name in behind:
            for parts in self._candidates(name):
                sources = [self._trace(name, part) for part in parts]
                if all(source is not None for source in sources):
                    found += [(name, source) for source in sources if source is not None]
                    break
        expert = _EXPERT.findall(self.consumers[0])
        if not found or any(_EXPERT.findall(name) != expert for name, _ in found):
            return None
        columns = _units(found[0][1])
        if columns is None:
            return None
        producers = []
        for name, source in found:
            rows = source[columns]
            if (rows != rows[:, :1]).any() or len(rows[:, 0].unique()) < len(rows):
                return None
            producers.append((name, rows[:, 0]))
        classes = self._classes(columns, producers)
        return Link(tuple(self.consumers), columns, tuple(producers), classes) if classes else None

    def _influence(self, name: str, rows: Tensor) -> Tensor:
        """Which channels change when some rows of a matrix give something else."""
        if not len(rows):
            return torch.zeros(self.width, dtype=torch.bool)
        changed = _differences(self.base, self.probe.inputs({name: rows}))
        none = torch.zeros(self.width, dtype=torch.bool)
        return changed.get(self.consumers[0], none).cpu()

    def _candidates(self, name: str) -> Iterator[list[Tensor]]:
        """Sets of rows of which each may be one for every channel: all of a matrix, the halves of
        a gate and what it gates, the values of fused queries, keys and values."""
        rows, width = self.rows[name], self.width
        every = torch.arange(rows)
        if width % rows == 0:
            yield [every]
        if rows == 2 * width:
            yield [every[:width], every[width:]]
            yield [every[::2], every[1::2]]
        if rows > 1:
            shared = int(self._influence(name, every[-1:]).sum())
            if shared and width % shared == 0 and width // shared < rows:
                values = width // shared
                yield [every[-values:]]
                head = int(self._influence(name, every[:1]).sum())
                heads = values // head if head and values % head == 0 else 0
                if heads and rows % heads == 0:
                    yield [every.view(heads, -1)[:, -head:].flatten()]

    def _trace(self, name: str, rows: Tensor) -> Tensor | None:
        """The one row of `rows` that each channel comes from; None where that is not one."""
        place = torch.arange(len(rows))
        found = torch.zeros(self.width, dtype=torch.long)
        for digit in range(max(1, (len(rows) - 1).bit_length())):
            is_one = (place >> digit) & 1 == 1
            ones = self._influence(name, rows[is_one])
            if not torch.equal(ones, ~self._influence(name, rows[~is_one])):
                return None
            found += ones.long() << digit
        return rows[found] if int(found.max()) < len(rows) else None

    def _classes(self, columns: Tensor, producers: list[tuple[str, Tensor]]) -> tuple[Tensor, ...]:
        """The units that the same becomes of when they are given the same, where there are more
        than one."""
        alike: dict[str, Tensor] = {}
        for name, rows in producers:
            alike[name] = torch.cat([alike[name], rows]) if name in alike else rows
        x = self.probe.inputs(alike=alike)[self.consumers[0]]
        allowed = ROUNDINGS * torch.finfo(x.dtype).eps * float(x.abs().max())
        answers = x.float().cpu()[:, columns].permute(1, 0, 2).flatten(1)
        left, found = torch.arange(len(columns)), list[Tensor]()
        while len(left) and len(found) < MOST_CLASSES:
            same = (answers[left] - answers[left[0]]).abs().amax(1) <= allowed
            found.append(left[same])
            left = left[~same]
        return tuple(units for units in found if len(units) > 1)


def _units(source: Tensor) -> Tensor | None:
    """The channels that come from the same row, `[rows, channels]`, in the order of the first ones;
    None where not all rows have as many."""
    order = source.argsort(stable=True)
    counts = source.unique(return_counts=True)[1]
    if (counts != counts[0]).any():
        return None
    units = order.view(len(counts), -1)
    return units[units[:, 0].argsort()]
