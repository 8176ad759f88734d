"""`symprune.fed` alone is enough for a user's own problem and a user's own algorithm."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from symprune import fed


def test_a_problem_and_an_algorithm_of_ones_own_need_no_other_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("symprune.fed.registry.ALGORITHMS", dict(fed.ALGORITHMS))

    @fed.register
    @dataclass(frozen=True)
    class SignDescent(fed.SampledClients):
        name, paper, sends = "sign-descent", "none", "up: signs; down: model"
        replies = ("sign",)
        gamma: float = 0.01

        def prepare(self, constants: fed.Constants) -> fed.Algorithm:
            fed.check(self.gamma > 0, "sign-descent: gamma must be positive.")
            return self

        def client_step(
            self, client: fed.State, received: fed.Received, problem: fed.Problem, turn: fed.Turn
        ) -> tuple[fed.State, fed.Message]:
            sign = problem.gradient(received["x"]).sign()
            return client, {"sign": fed.Sent(sign, bits=sign.shape[1])}

        def server_step(
            self, server: fed.State, replies: fed.Received, turn: fed.Turn
        ) -> fed.State:
            return {"x": server["x"] - self.gamma * replies["sign"].mean(0).sign()}

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 4, generator=generator)
    rows = fed.stack_rows([(own, (own[:, 0] > 0).float()) for own in x])
    problem = fed.Problem(fed.Module(lambda: nn.Linear(4, 2)), rows)
    run = fed.simulate(fed.build("sign-descent", gamma=0.05), problem, 20)
    assert isinstance(run, fed.Result)
    assert run.history[-1]["loss"] < run.history[0]["loss"] / 2
    assert run.history[-1]["paper_bits_up"] == 20 * problem.dimension


def test_every_name_the_package_lists_is_there() -> None:
    assert set(fed.__all__) <= set(dir(fed))
    assert all(getattr(fed, name) is not None for name in fed.__all__)
