"""A block's statistics as one flat vector: what a client measured <-> what is added up.

Matrices that are given the same input (q/k/v, gate/up) share one part of the vector, so the sums of
a channel travel once. Both sides derive the same layout from the model and the groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.models.matrices import Matrix
from symprune.stats import GRAM, SQUARE, ChannelStats, Needs, two_sum

OWN_TOKENS = 8


@dataclass(frozen=True)
class Part:
    """The statistics of one input that `names` share, or of one matrix's output."""

    side: str
    names: tuple[str, ...]
    channels: int
    collect: frozenset[str]

    @property
    def gram(self) -> bool:
        """Whether the input's Gram matrix is summed as well, which is no part of the vector."""
        return GRAM in self.collect

    @property
    def sums(self) -> tuple[str, ...]:
        return tuple(ChannelStats(0, self.collect - {GRAM}).sums)

    @property
    def size(self) -> int:
        return self.channels * len(self.sums)


@dataclass
class Packed:
    """Samples and tokens of every part `[parts, 2]`; all sums `[d]`, and what rounding lost."""

    counts: Tensor
    values: Tensor
    rests: Tensor

    def add(self, other: Packed) -> None:
        """Exactly, so the order of adding does not show."""
        self.counts = self.counts + other.counts
        for extra in (other.values, other.rests):
            self.values, lost = two_sum(self.values, extra)
            self.rests = self.rests + lost


def own_tokens(model: nn.Module) -> Tensor:
    """A server's own few tokens, `[1, tokens]`, which show what inputs matrices share and how long
    channels are: from all over the vocabulary, whose first ones may be of no use."""
    table = getattr(model, "get_input_embeddings", lambda: None)()
    size = int(getattr(table, "num_embeddings", OWN_TOKENS))
    return ((torch.arange(OWN_TOKENS) * 2 + 1) * size // (2 * OWN_TOKENS)).unsqueeze(0)


def sharing(matrices: Sequence[Matrix], inputs: Mapping[str, ChannelStats]) -> Tensor:
    """For every matrix the number of its group: those that were measured by one object."""
    seen: dict[int | str, int] = {}
    keys = [id(inputs[m.name]) if m.name in inputs else m.name for m in matrices]
    return torch.tensor([seen.setdefault(key, len(seen)) for key in keys], dtype=torch.int64)


def layout(matrices: Sequence[Matrix], groups: Tensor, needs: Needs) -> list[Part]:
    """The parts of a block's vector: inputs by group, then outputs by matrix."""
    numbers = groups.tolist()
    members: dict[int, list[Matrix]] = {}
    for matrix, number in zip(matrices, numbers, strict=True):
        members.setdefault(number, []).append(matrix)
    parts = []
    for group in members.values() if needs.inputs else ():
        widths = {matrix.weight.shape[1] for matrix in group}
        if len(widths) > 1:
            raise SympruneError(f"{group[0].name} and {group[1].name} cannot share an input.")
        names = tuple(matrix.name for matrix in group)
        parts.append(Part("inputs", names, widths.pop(), needs.inputs))
    for matrix in matrices if needs.outputs else ():
        parts.append(Part("outputs", (matrix.name,), matrix.weight.shape[0], needs.outputs))
    return parts


def length(parts: Sequence[Part]) -> int:
    return sum(part.size for part in parts)


def empty(parts: Sequence[Part]) -> Packed:
    d = length(parts)
    zeros = torch.zeros(d, dtype=torch.float64)
    return Packed(torch.zeros(len(parts), 2, dtype=torch.int64), zeros, zeros.clone())


def pack(
    parts: Sequence[Part], inputs: Mapping[str, ChannelStats], outputs: Mapping[str, ChannelStats]
) -> Packed:
    """What was measured, as a vector; a part no token reached (an idle expert) is zero."""
    packed, at = empty(parts), 0
    for number, part in enumerate(parts):
        where = inputs if part.side == "inputs" else outputs
        measured = {id(where[name]): where[name] for name in part.names if name in where}
        if len(measured) > 1:
            raise SympruneError(f"{part.names[0]} does not share its input with {part.names[1]}.")
        for stats in measured.values():
            packed.counts[number] = torch.tensor([stats.samples, stats.tokens])
            values, rests = (
                torch.cat([packed.values[:0], *(group[name].cpu() for name in part.sums)])
                for group in (stats.sums, stats.rests)
            )
            packed.values[at : at + part.size] = values
            packed.rests[at : at + part.size] = rests
        at += part.size
    return packed


def lengths(parts: Sequence[Part], packed: Packed) -> Tensor:
    """The root of every input channel's sum of squares, of the inputs with Gram matrices."""
    found, at = [packed.values[:0]], 0
    for part in parts:
        if part.gram:
            where = at + part.sums.index(SQUARE) * part.channels
            here = slice(where, where + part.channels)
            found.append((packed.values[here] + packed.rests[here]).clamp(min=0).sqrt())
        at += part.size
    return torch.cat(found)


def unpack(
    parts: Sequence[Part], packed: Packed, device: torch.device
) -> tuple[dict[str, ChannelStats], dict[str, ChannelStats]]:
    """Input and output statistics by the matrix's name, where the matrices are; parts no token
    reached are left out."""
    sides: dict[str, dict[str, ChannelStats]] = {"inputs": {}, "outputs": {}}
    at = 0
    for part, counts in zip(parts, packed.counts, strict=True):
        state = {"counts": counts}
        for name in part.sums:
            state[name] = packed.values[at : at + part.channels]
            state[f"{name}_rest"] = packed.rests[at : at + part.channels]
            at += part.channels
        if counts[0] > 0:
            stats = ChannelStats(part.channels, part.collect, device=device)
            stats.load({**stats.state(), **state})
            sides[part.side] |= dict.fromkeys(part.names, stats)
    return sides["inputs"], sides["outputs"]
