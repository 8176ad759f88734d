"""How much faster a stack of clients is than a Python loop over them.

500 clients of logistic regression (d = 300, 100 samples each), one round of Scaffnew with 10 local
steps. Against it: the loop most simulators are (one model, one optimiser and autograd per client),
and a loop over this project's own closed-form client step, one client at a time. Times are those of
the processor, summed over threads, so other work on the machine hardly matters.

    python scripts/bench_fed.py [--clients 500] [--dimension 300] [--samples 100] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from symprune.fed.algorithms import build
from symprune.fed.algorithms.proxskip.sparse_proxskip import ProxSkip
from symprune.fed.problems.losses import Logistic
from symprune.fed.problems.problem import Problem, Rows
from symprune.fed.protocol import Turn
from symprune.fed.threads import limited_threads

STEPS = 10
L2 = 0.1


def make(clients: int, samples: int, dimension: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, samples, dimension, generator=generator) / dimension**0.5
    y = torch.randn(clients, samples, generator=generator).sign()
    weights = torch.full((clients, samples), 1 / samples)
    return Problem(Logistic(dimension), Rows(x, y, weights), l2=L2)


def stacked(algorithm: ProxSkip, problem: Problem, at_once: int) -> Tensor:
    """One round of local work, clients in stacks of `at_once`; returns what they send."""
    everyone = Turn(0, 0, problem.clients, torch.arange(problem.clients))
    sent = []
    for begin in range(0, problem.clients, at_once):
        part = slice(begin, begin + at_once)
        own = problem.select(part)
        turn = everyone.about(everyone.clients[part])
        state = algorithm.client_init(own, turn)
        received = {"x": problem.initial().expand(own.clients, -1)}
        sent.append(algorithm.client_step(state, received, own, turn)[1]["what"].tensor)
    return torch.cat(sent)


def autograd_loop(problem: Problem, gamma: float) -> Tensor:
    """One model, one optimiser, one backward pass per client and step."""
    sent = []
    for x, y in zip(problem.rows.x, problem.rows.y, strict=True):
        model = torch.nn.Linear(x.shape[1], 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimiser = torch.optim.SGD(model.parameters(), lr=gamma, weight_decay=L2)
        for _ in range(STEPS):
            optimiser.zero_grad()
            torch.nn.functional.softplus(-y * model(x).squeeze(1)).mean().backward()
            optimiser.step()
        sent.append(model.weight.detach()[0])
    return torch.stack(sent)


def timed(work: Callable[[], Tensor], repeats: int) -> tuple[float, Tensor]:
    result = work()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return statistics.median(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("clients", 500), ("dimension", 300), ("samples", 100), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    problem = make(arguments.clients, arguments.samples, arguments.dimension)
    gamma = 1.0
    algorithm = build("proxskip", gamma=gamma, p=1 / STEPS, random_steps=False)
    assert isinstance(algorithm, ProxSkip)
    with limited_threads(arguments.threads):
        ways: dict[str, Callable[[], Tensor]] = {
            "stack of all clients": lambda: stacked(algorithm, problem, problem.clients),
            "stacks of 20": lambda: stacked(algorithm, problem, 20),
            "own step, one client at a time": lambda: stacked(algorithm, problem, 1),
            "autograd loop over clients": lambda: autograd_loop(problem, gamma),
        }
        seconds, results = {}, {}
        for name, work in ways.items():
            seconds[name], results[name] = timed(work, arguments.repeats)
    reference = results["autograd loop over clients"]
    best = min(seconds["stack of all clients"], seconds["stacks of 20"])
    print(f"{'':34}{'CPU ms':>9}{'slower':>9}{'largest difference':>21}")
    for name, value in seconds.items():
        difference = float((results[name] - reference).abs().max())
        print(f"{name:34}{1000 * value:9.1f}{value / best:8.1f}x{difference:21.1e}")
    print(json.dumps({name: round(value, 5) for name, value in seconds.items()}))


if __name__ == "__main__":
    main()
