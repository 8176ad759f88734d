"""FedP3's learned attention: what it starts from, and whom it stops listening to."""

from __future__ import annotations

from dataclasses import replace

import torch

from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedp3.learned_attention import learn_attention
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import Result, simulate

OPTIONS = {"layers": "opu2", "steps": 5, "batch": 20, "lr": 0.2}


def clients() -> Problem:
    return make_problem("digits", "he-mlp:16-16", clients=6, l2=0.0)


def run(problem: Problem, **options: object) -> Result:
    algorithm = build("fedp3", **{**OPTIONS, **options})
    return simulate(algorithm, problem, 25, evaluate_every=25)


def test_a_rate_of_zero_is_the_simple_mean_bit_for_bit() -> None:
    problem = clients()
    still = run(problem, aggregation="learned", attention_lr=0.0)
    assert torch.equal(still.model, run(problem, aggregation="simple").model)
    assert not still.server["theta"].any()


def test_the_server_listens_least_to_a_client_with_wrong_labels() -> None:
    problem = clients()
    y = problem.rows.y.clone()
    y[2] = (y[2] + 1 + torch.arange(y.shape[1]) % 9) % 10
    spoilt = replace(problem, rows=replace(problem.rows, y=y))
    learned = run(spoilt, aggregation="learned", layers="full")
    trust = learned.server["theta"].mean(1)
    assert int(trust.argmin()) == 2 and float(trust[2]) < float(trust.median()) - 2


def test_a_step_is_the_cosine_with_where_the_loss_falls_layer_by_layer() -> None:
    layout = FlatLayout(("a", "b"), ((1, 2), (2, 1)))
    theta, sent = (
        torch.zeros(2, 2, dtype=torch.float64),
        torch.tensor([[True, True], [True, False]]),
    )
    last = torch.tensor([[1.0, 0.0, 3.0, 4.0], [0.0, 1.0, 0.0, 0.0]])
    fall = torch.tensor([[1.0, 0.0, 1.0, 1.0]] * 2)
    after = learn_attention(theta, last, sent, fall, 2.0, layout)
    # Layer a: +-(0.5, -0.5) against (1, 0). Layer b has one sender, who is the mean.
    root = 2 * 0.5**0.5
    torch.testing.assert_close(after, torch.tensor([[root, 0.0], [-root, 0.0]]).double())
