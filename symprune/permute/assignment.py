"""Who gets what, so that the total is largest: the linear sum assignment problem, exactly.

Shortest augmenting paths with potentials (Jonker and Volgenant, Computing 1987): rows are served
one after the other, and each may have others move aside.
"""

from __future__ import annotations

import numpy as np


def assign(gain: np.ndarray) -> np.ndarray:
    """The column of each row of a square matrix that makes the sum of the gains largest."""
    cost = gain.max(initial=0.0) - gain.astype(np.float64)
    of_column = cost.min(0)
    of_row = (cost - of_column).min(1)
    owner, held = np.full(len(cost), -1), np.full(len(cost), -1)
    for row, costs in enumerate(cost):
        free = np.flatnonzero((costs - of_column <= of_row[row]) & (owner < 0))
        if len(free):
            column = int(free[0])
            owner[column], held[row] = row, column
    for row in np.flatnonzero(held < 0).tolist():
        _serve(row, cost, of_row, of_column, owner, held)
    return held


def _serve(
    row: int,
    cost: np.ndarray,
    of_row: np.ndarray,
    of_column: np.ndarray,
    owner: np.ndarray,
    held: np.ndarray,
) -> None:
    """Find the cheapest way to a free column and move everybody on it by one. Potentials, owners
    of columns and columns held are changed in place; no pair is cheaper than its potentials."""
    length = cost[row] - of_row[row] - of_column
    before = np.full(len(cost), row)
    ahead = np.zeros(len(cost))  # infinite where the way has been
    while True:
        column = int((length + ahead).argmin())
        holder = owner[column]
        if holder < 0:
            break
        ahead[column] = np.inf
        onward = cost[holder] - (of_row[holder] - length[column]) - of_column
        shorter = onward + ahead < length
        length[shorter] = onward[shorter]
        before[shorter] = holder
    passed = np.flatnonzero(ahead)
    slack = length[column] - length[passed]
    of_row[row] += length[column]
    of_row[owner[passed]] += slack
    of_column[passed] -= slack
    holder = -1
    while holder != row:
        holder = before[column]
        owner[column] = holder
        column, held[holder] = held[holder], column
