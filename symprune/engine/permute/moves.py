"""A parameter whose rows or columns are put into another order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from symprune.models.matrices import Matrix


@dataclass(frozen=True)
class Move:
    """What stands at `order[i]` of a parameter's axis goes to i.

    Where a parameter is stacked of equal pieces, shape is that of the one that is ordered; the axis
    is one of the piece's.
    """

    parameter_name: str
    axis: int
    order: Tensor
    shape: tuple[int, ...] = ()
    piece: int | None = None

    def apply(self, whole: Tensor) -> None:
        """Order a tensor laid out like the parameter, in place."""
        part = whole if self.piece is None else whole.view(-1, *self.shape)[self.piece]
        part.copy_(part.index_select(self.axis, self.order.to(whole.device)))


def move_rows(matrix: Matrix, order: Tensor) -> Move:
    """A matrix's output channels in another order."""
    return _move(matrix, 0, order)


def move_columns(matrix: Matrix, order: Tensor) -> Move:
    """A matrix's input channels in another order."""
    return _move(matrix, 1, order)


def _move(matrix: Matrix, axis: int, order: Tensor) -> Move:
    rows, columns = matrix.weight.shape
    shape = (columns, rows) if matrix.transposed else (rows, columns)
    turned = 1 - axis if matrix.transposed else axis
    return Move(matrix.parameter_name, turned, order, shape, matrix.piece)


def apply_moves(moves: Iterable[Move], name: str, whole: Tensor) -> Tensor:
    """A tensor laid out like the parameter `name`, ordered by those that are for it: in place,
    unless its numbers lie in another order than their places."""
    whole = whole.contiguous()
    for move in moves:
        if move.parameter_name == name:
            move.apply(whole)
    return whole


def apply_all(parameters: Mapping[str, Tensor], moves: Iterable[Move]) -> None:
    """Order parameters in place."""
    for move in moves:
        move.apply(parameters[move.parameter_name].data)


def take_back(parameters: Mapping[str, Tensor], moves: Iterable[Move]) -> None:
    """Undo `apply_all`."""
    for move in reversed(list(moves)):
        replace(move, order=move.order.argsort()).apply(parameters[move.parameter_name].data)
