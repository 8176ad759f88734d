"""A federated algorithm of your own: a frozen dataclass of hyper-parameters and two pure functions.

Sign descent: clients send only the signs of their gradients, and the server steps in the
direction most of them agree on. It is found by name from `@register` on and runs wherever the
others do: in process, and across machines.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from symprune import fed


@fed.register
@dataclass(frozen=True)
class SignDescent(fed.Algorithm):
    """Steps along the sign most clients agree on: x <- x - gamma * sign(sum sign(grad f_i(x)))."""

    name = "sign-descent"
    paper = "Bernstein et al.: signSGD with majority vote"
    sends = "up: a sign per weight; down: x"
    replies = ("sign",)  # a vector like the model
    gamma: float = 0.01

    def client_step(
        self, client: fed.State, received: fed.Received, problem: fed.Problem, turn: fed.Turn
    ) -> tuple[fed.State, fed.Message]:
        gradient = problem.gradient(received["x"])  # one row per client
        return client, {"sign": fed.Sent(gradient.sign(), bits=problem.dimension, table=True)}

    def server_step(self, server: fed.State, replies: fed.Received, turn: fed.Turn) -> fed.State:
        return {"x": server["x"] - self.gamma * replies["sign"].sum(0).sign()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Run an algorithm of your own.")
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds

    problem = fed.make_problem("digits", split="iid", clients=10)
    for name in ("sign-descent", "gd"):
        result = fed.simulate(fed.build(name), problem, rounds=rounds, evaluate_every=rounds)
        last = result.history[-1]
        sent = last["bytes_up"] / 1e3
        print(f"{name:13} accuracy {last['accuracy']:.1%}, {sent:,.0f} kB sent to the server")


if __name__ == "__main__":
    main()
