"""What is wrong with a problem, in one sentence, before anything is trained on it."""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.losses import Logistic, Loss, Module, Softmax, cross_entropy
from symprune.fed.problems.masked import KeptWeights
from symprune.fed.problems.problem import Problem, Rows
from symprune.validation import check_not_negative


def check_problem(problem: Problem) -> None:
    """Refuse numbers that are not finite, labels that the loss cannot mean, and penalties that
    reward."""
    check_not_negative(l2=problem.l2, nonconvex=problem.nonconvex)
    loss = problem.loss.loss if isinstance(problem.loss, KeptWeights) else problem.loss
    numbers = problem.numbers.tolist()
    _check_rows(problem.rows, loss, [f"client {i}" for i in numbers])
    if problem.test is not None:
        _check_rows(problem.test, loss, ["the test set"])
    if problem.client_test is not None:
        _check_rows(problem.client_test, loss, [f"the test rows of client {i}" for i in numbers])


def _check_rows(rows: Rows, loss: Loss, owners: list[str]) -> None:
    for what, values in (("rows", rows.x), ("targets", rows.y), ("weights", rows.weights)):
        whole = torch.isfinite(values.flatten(1)).all(1)
        if not bool(whole.all()):
            raise SympruneError(
                f"The {what} of {owners[int((~whole).nonzero()[0])]} hold NaN or infinity."
            )
    if isinstance(loss, Logistic):
        _check_labels(rows, owners, "-1 and +1", rows.y.abs() == 1)
    classes = _classes(loss, rows)
    if classes is not None:
        fits = (rows.y >= 0) & (rows.y < classes) & (rows.y == rows.y.round())
        _check_labels(rows, owners, f"0, 1, ... {classes - 1}", fits)


def _classes(loss: Loss, rows: Rows) -> int | None:
    """How many classes the labels are numbers of, where they are."""
    if isinstance(loss, Softmax):
        return loss.classes
    if isinstance(loss, Module) and loss.row_loss is cross_entropy:
        with torch.no_grad():
            flat = loss.own_start().to(rows.weights.dtype).unsqueeze(0)
            return loss.scores(flat, rows.x[:1, :1]).shape[-1]
    return None


def _check_labels(rows: Rows, owners: list[str], meant: str, fits: Tensor) -> None:
    """Padding has no label."""
    wrong = ~fits & (rows.weights != 0)
    if not bool(wrong.any()):
        return
    client = int(wrong.any(1).nonzero()[0])
    label = float(rows.y[client][wrong[client]][0])
    sentence = f"The label {label:g} of {owners[client]} is none of {meant}."
    if label == 0 and meant == "-1 and +1":
        sentence = f"The labels of {owners[client]} are 0 and 1; logistic regression means {meant}."
    raise SympruneError(sentence)
