"""KL divergence and agreement from the logits of two models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from symprune.eval import divergence
from symprune.eval.divergence import compare, parts, summary


def test_the_divergence_is_torchs() -> None:
    torch.manual_seed(0)
    dense, pruned = torch.randn(7, 50), torch.randn(7, 50)
    kl, same = compare(dense, pruned)
    p, q = dense.double().log_softmax(-1), pruned.double().log_softmax(-1)
    assert math.isclose(kl, float(F.kl_div(q, p, log_target=True, reduction="sum")), rel_tol=1e-5)
    assert same == int((dense.argmax(-1) == pruned.argmax(-1)).sum())


def test_the_same_model_is_no_way_off() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 40)
    found = summary([compare(logits, logits)], 6)
    assert (found.kl, found.agreement) == (0.0, 1.0)


def test_what_the_dense_model_excludes_costs_nothing() -> None:
    dense, pruned = torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([[0.0, 0.0, 0.0]])
    assert math.isclose(compare(dense, pruned)[0], math.log(3) - math.log(2), rel_tol=1e-6)
    assert compare(pruned, dense)[0] == math.inf


def test_every_position_that_predicts_is_looked_at_once() -> None:
    vocabulary = divergence.AT_ONCE // 3
    found = list(parts(9, vocabulary))
    assert [part for chunk in found for part in chunk] == list(range(8))
    assert max(map(len, found)) == 3
    assert list(parts(3, 10 * divergence.AT_ONCE)) == [range(0, 1), range(1, 2)]


def test_windows_count_alike() -> None:
    found = summary([(3.0, 2), (1.0, 4)], 5)
    assert (found.kl, found.agreement, found.windows) == (0.5, 0.75, 2)
