"""A message between server and clients: its fields, to bytes and back, and what every row weighs
without making bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symprune.errors import Diverged, SympruneError
from symprune.fed.wire.grid import Grid, merge_grids
from symprune.fed.wire.payload import (
    MAX_VALUES,
    decode_message,
    encode_message,
    encoded_sizes,
    is_finite,
    message_overhead,
)

Received = dict[str, Any]  # name -> stacked rows [C, ...], or a list of C tensors if sent ragged


@dataclass(frozen=True)
class Sent:
    """A field of a message with more to say than its tensor.

    `each`: in a broadcast, row i is for recipient i (replies are always by row). `bits`: what the
    paper counts per message (a number or one per row; default 32 a float, 1 a bool). `table`: the
    values are quantised; `grid`: they are on this one. A list of tensors is sent ragged, one of any
    length per client."""

    tensor: Tensor | list[Tensor]
    bits: int | Tensor | None = None
    table: bool = False
    each: bool = False
    grid: Grid | None = None


Message = dict[str, "Tensor | Sent"]


class Parcel:
    """A message to, or from, `count` clients: row i belongs to the i-th of them."""

    def __init__(self, message: Message, count: int, reply: bool) -> None:
        self.count = count
        self.fields = {k: v if isinstance(v, Sent) else Sent(v) for k, v in message.items()}
        self.by_row = {
            k: reply or v.each or isinstance(v.tensor, list) for k, v in self.fields.items()
        }
        for name, field in self.fields.items():
            if self.by_row[name] and len(field.tensor) != count:
                raise SympruneError(
                    f"Field {name!r} has {len(field.tensor)} rows for {count} clients."
                )

    def check_finite(self, what: str) -> None:
        """Refuse NaN and infinity, which only a run that diverges comes to."""
        for name, field in self.fields.items():
            tensors = field.tensor if isinstance(field.tensor, list) else [field.tensor]
            if not all(is_finite(tensor) for tensor in tensors):
                raise Diverged(f"{what}, field {name!r}, holds values that are not finite")

    def sizes(self) -> Tensor:
        """Encoded bytes of every client's message, `[count]`."""
        total = torch.full((self.count,), message_overhead(list(self.fields)), device="cpu")
        for name, field in self.fields.items():
            if isinstance(field.tensor, list):
                each = [encoded_sizes(t.unsqueeze(0), field.table)[0] for t in field.tensor]
                total += torch.stack(each)
            elif self.by_row[name]:
                total += encoded_sizes(field.tensor, field.table, field.grid)
            else:
                total += encoded_sizes(field.tensor.unsqueeze(0), field.table, field.grid)
        return total

    def bits(self) -> Tensor:
        """What the papers count for every client's message, `[count]`."""
        total = torch.zeros(self.count, dtype=torch.int64, device="cpu")
        for name, field in self.fields.items():
            if field.bits is not None:
                total += torch.as_tensor(field.bits, dtype=torch.int64).cpu()
            elif isinstance(field.tensor, list):
                total += torch.tensor([t.numel() * _bits(t) for t in field.tensor], device="cpu")
            else:
                numbers = field.tensor.numel() // (self.count if self.by_row[name] else 1)
                total += numbers * _bits(field.tensor)
        return total

    def encode(self, row: int) -> bytes:
        """The message of one client as bytes."""
        chosen = {
            name: field.tensor[row] if self.by_row[name] else field.tensor
            for name, field in self.fields.items()
        }
        quantised = frozenset(name for name, field in self.fields.items() if field.table)
        grids = {
            name: field.grid.row(row if self.by_row[name] else 0)
            for name, field in self.fields.items()
            if field.grid is not None
        }
        return encode_message(chosen, quantised, grids)  # type: ignore[arg-type]

    def received(self) -> Received:
        """What the other side sees: every field by row."""
        out: Received = {}
        for name, field in self.fields.items():
            tensor = field.tensor
            if not self.by_row[name]:
                assert isinstance(tensor, Tensor)
                tensor = tensor.expand(self.count, *tensor.shape)
            out[name] = tensor
        return out


def collect(messages: list[bytes], max_values: int = MAX_VALUES) -> Received:
    """Encoded messages of several clients, in their order, as received fields. Tensors of equal
    shape are stacked, others stay a list."""
    rows = [decode_message(data, max_values) for data in messages]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise SympruneError("Messages of one turn have different fields.")
    out: Received = {}
    for name in rows[0] if rows else ():
        tensors = [row[name] for row in rows]
        alike = len({(t.shape, t.dtype) for t in tensors}) == 1
        out[name] = torch.stack(tensors) if alike else tensors
    return out


def merge(parts: list[Message]) -> Message:
    """Replies of several stacks of clients as one message, in order."""
    if len(parts) == 1:
        return parts[0]
    out: Message = {}
    for name in parts[0]:
        pieces = [field if isinstance(field, Sent) else Sent(field) for field in _each(parts, name)]
        first = pieces[0]
        tensors: Any = [piece.tensor for piece in pieces]
        whole = isinstance(first.tensor, Tensor)
        joined: Any = torch.cat(tensors) if whole else [row for part in tensors for row in part]
        bits: Any = first.bits
        if isinstance(bits, Tensor):
            bits = torch.cat([torch.as_tensor(piece.bits) for piece in pieces])
        grids = [piece.grid for piece in pieces if piece.grid is not None]
        grid = merge_grids(grids, joined[0].numel()) if grids else None
        out[name] = Sent(joined, bits, first.table, grid=grid)
    return out


def _each(parts: list[Message], name: str) -> list[Tensor | Sent]:
    return [part[name] for part in parts]


def _bits(tensor: Tensor) -> int:
    if tensor.is_floating_point():
        return 32
    return 1 if tensor.dtype == torch.bool else 8 * tensor.element_size()
