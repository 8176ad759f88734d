"""Rounds of federated averaging a processor second: `simulate`, a plain torch loop, and pfl.

Every contender trains the same model on the same rows with the same step size, ten local steps a
client and round, and after every round evaluates it: the loss on all training rows and the accuracy
on the test rows. They take turns; a figure is the median over all rounds of a contender, in time of
the processor, so that other work on the machine hardly matters. `uneven` has clients of 10 to
several thousand rows, `many` has 10,000 clients. pfl takes part if it is installed.

    python scripts/bench_fed.py [--only logistic,mlp,cnn,uneven,many] [--clients 100] [--turns 3]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from symprune.fed.algorithms import build
from symprune.fed.problems.losses import Logistic, Loss, Module
from symprune.fed.problems.networks import mlp
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.simulate import simulate
from symprune.fed.threads import limited_threads

STEPS = 10
TEST_ROWS = 1000
Clock = Callable[[], None]


def small_cnn() -> nn.Module:
    """Two convolutions of 5x5 on 28x28 images, 8 and 16 channels, and one linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


@dataclass(frozen=True)
class Work:
    """A problem and how it is trained."""

    loss: Loss
    shape: tuple[int, ...]
    rows: Callable[[int], int]  # of the client with this number
    clients: int
    batch: int | None
    gamma: float
    rounds: int

    def problem(self) -> Problem:
        generator = torch.Generator().manual_seed(0)
        truth = torch.randn(self.shape, generator=generator).flatten()

        def make(count: int) -> tuple[Tensor, Tensor]:
            x = torch.randn(count, *self.shape, generator=generator)
            score = x.flatten(1) @ truth / truth.norm()
            if isinstance(self.loss, Logistic):
                return x / len(truth) ** 0.5, torch.where(score >= 0, 1.0, -1.0)
            return x, (score * 2.5 + 5).clamp(0, 9).floor()

        parts = [make(self.rows(client)) for client in range(self.clients)]
        return Problem(self.loss, stack_rows(parts), test=stack_rows([make(TEST_ROWS)]))


def works(clients: int) -> dict[str, Work]:
    blocks = [10 + int(5000 * 0.5 ** (client / 3)) for client in range(clients)]
    return {
        "logistic": Work(Logistic(300), (300,), lambda i: 100, clients, None, 1.0, 8),
        "mlp": Work(
            Module(partial(mlp, (784,), 10)), (784,), lambda i: 320, clients, 32, 0.05, 3
        ),
        "cnn": Work(Module(small_cnn), (1, 28, 28), lambda i: 320, clients, 32, 0.05, 2),
        "uneven": Work(Logistic(22), (22,), lambda i: blocks[i], clients, None, 1.0, 8),
        "many": Work(Logistic(22), (22,), lambda i: 5, 100 * clients, None, 1.0, 4),
    }  # fmt: skip


def ours(work: Work, problem: Problem, lap: Clock) -> float:
    algorithm = build("fedavg", gamma=work.gamma, p=1 / STEPS, random_steps=False, batch=work.batch)

    def stop(record: dict[str, Any]) -> bool:
        lap()
        return False

    result = simulate(algorithm, problem, work.rounds, stop=stop)
    return float(result.history[-1]["loss"])


class Client(nn.Module):
    """A model as a user of torch writes it, and the two functions pfl asks for."""

    def __init__(self, loss: Loss, start: Tensor) -> None:
        super().__init__()
        self.binary = isinstance(loss, Logistic)
        self.net = nn.Linear(loss.features, 1, bias=False) if self.binary else loss.make()  # type: ignore[attr-defined]
        nn.utils.vector_to_parameters(start.clone(), self.net.parameters())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(x)
        if self.binary:
            return nn.functional.softplus(-y * out.squeeze(1)).mean()
        return nn.functional.cross_entropy(out, y.long())

    @torch.no_grad()
    def measure(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Sum of the losses, and how many rows are right."""
        out = self.net(x)
        right = out.squeeze(1) * y >= 0 if self.binary else out.argmax(1) == y
        return float(self.loss(x, y)) * len(y), float(right.sum())

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        loss, right = self.measure(x, y)
        return {"loss": Weighted(loss, len(y)), "accuracy": Weighted(right, len(y))}


def client_rows(problem: Problem) -> list[tuple[Tensor, Tensor]]:
    rows, counts = problem.rows, problem.counts.tolist()
    return [(rows.x[i, :m], rows.y[i, :m]) for i, m in enumerate(counts)]


def batches(x: Tensor, y: Tensor, size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """STEPS batches, in order and from the start again when the rows are used up."""
    size = size or len(y)
    places = [i * size % max(len(y) - size + 1, 1) for i in range(STEPS)]
    return ((x[at : at + size], y[at : at + size]) for at in places)


def loop(work: Work, problem: Problem, lap: Clock) -> float:
    """One model, one optimiser and autograd, client after client."""
    parts, test = client_rows(problem), problem.test
    assert test is not None
    server = problem.initial(0)
    model = Client(problem.loss, server)
    loss = 0.0
    for _ in range(work.rounds):
        total = torch.zeros_like(server)
        for x, y in parts:
            nn.utils.vector_to_parameters(server.clone(), model.parameters())
            optimiser = torch.optim.SGD(model.parameters(), lr=work.gamma)
            for rows in batches(x, y, work.batch):
                optimiser.zero_grad()
                model.loss(*rows).backward()
                optimiser.step()
            total += nn.utils.parameters_to_vector(model.parameters()).detach()
        server = total / len(parts)
        nn.utils.vector_to_parameters(server.clone(), model.parameters())
        loss = sum(model.measure(x, y)[0] / len(y) for x, y in parts) / len(parts)
        model.measure(test.x[0], test.y[0])
        lap()
    return loss


def in_pfl(work: Work, problem: Problem, lap: Clock) -> float:
    """pfl's own federated averaging and central evaluation."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, StringMetricName
    from pfl.model.pytorch import PyTorchModel

    parts = client_rows(problem)
    test = problem.test
    assert test is not None
    module = Client(problem.loss, problem.initial(0))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    users = FederatedDataset(
        lambda number: Dataset(raw_data=list(parts[number]), user_id=str(number)),
        get_user_sampler("minimize_reuse", list(range(len(parts)))),
    )
    train = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    evaluation = NNEvalHyperParams(local_batch_size=TEST_ROWS)
    losses: list[float] = []

    class Lap(TrainingProcessCallback):
        def after_central_iteration(
            self, metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            lap()
            losses.append(metrics[StringMetricName("train | loss")].overall_value)
            return False, Metrics()

    def central(rows: Any, name: str) -> CentralEvaluationCallback:
        named = lambda metric: StringMetricName(f"{name} | {metric}")  # noqa: E731
        return CentralEvaluationCallback(Dataset(list(rows)), evaluation, format_fn=named)

    FederatedAveraging().run(
        NNAlgorithmParams(work.rounds, 10**9, len(parts), None),
        SimulatedBackend(users, users, []),
        model,
        NNTrainHyperParams(
            local_num_epochs=STEPS if work.batch is None else 1,
            local_learning_rate=work.gamma,
            local_batch_size=work.batch,
        ),
        evaluation,
        callbacks=[
            central(train, "train"),
            central((test.x[0], test.y[0]), "test"),
            Lap(),
        ],
        send_metrics_to_platform=False,
    )
    return losses[-1]


def measure(work: Work, turns: int, skip_loops: bool) -> dict[str, dict[str, float]]:
    """Median seconds a round of every contender, and the loss that it ends with."""
    problem = work.problem()
    ways: dict[str, Callable[[Work, Problem, Clock], float]] = {"simulate": ours}
    if not skip_loops:
        ways["loop"] = loop
        if importlib.util.find_spec("pfl") is not None:
            ways["pfl"] = in_pfl
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for _ in range(turns):
        for name, way in ways.items():
            times: list[float] = []
            losses[name] = way(work, problem, lambda times=times: times.append(time.process_time()))  # type: ignore[misc]
            seconds[name] += [b - a for a, b in pairwise(times)]
    return {
        name: {"seconds": statistics.median(seconds[name]), "loss": losses[name]} for name in ways
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="logistic,mlp,cnn,uneven,many")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    found = {}
    print(f"{'':10}{'':10}{'rounds/s':>10}{'times':>8}{'loss':>10}")
    with limited_threads(arguments.threads):
        for name in arguments.only.split(","):
            work = works(arguments.clients)[name]
            found[name] = measure(work, arguments.turns, skip_loops=name == "many")
            ours_alone = found[name]["simulate"]["seconds"]
            for way, result in found[name].items():
                each = result["seconds"]
                print(
                    f"{name:10}{way:10}{1 / each:10.2f}{each / ours_alone:8.2f}"
                    f"{result['loss']:10.4f}",
                    flush=True,
                )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:.0f} MB")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
