"""Problems: gradients are those of autograd, constants bound what they say, batches are fair."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed.problems.losses import Linear, Logistic, Loss, Module, Softmax, squared_error
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.problems.quadratic import normal_equations
from symprune.fed.randomness import Stream

SIZES = (7, 4, 9)


def ragged(loss: Loss, labels: Callable[[Tensor], Tensor], weighting: str = "mean") -> Problem:
    """Three clients of different sizes in five dimensions."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for m in SIZES:
        x = torch.randn(m, 5, generator=generator, dtype=torch.float64)
        noise = torch.randn(m, generator=generator, dtype=torch.float64)
        parts.append((x, labels(x[:, 0] + noise)))
    return Problem(loss, stack_rows(parts, weighting), l2=0.1, nonconvex=0.05)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def regression_network() -> nn.Module:
    return nn.Linear(5, 1).double()


PROBLEMS = {
    "logistic": lambda: ragged(Logistic(5), lambda z: torch.where(z > 0, 1.0, -1.0).double()),
    "softmax": lambda: ragged(Softmax(5, 3), lambda z: (z > 0).double() + (z > 1)),
    "linear": lambda: ragged(Linear(5), lambda z: z),
    "network": lambda: ragged(Module(network), lambda z: (z > 0).double() + (z > 1)),
    "regression network": lambda: ragged(
        Module(regression_network, squared_error, "regression"), lambda z: z
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_those_of_autograd(name: str) -> None:
    problem = PROBLEMS[name]()
    w = torch.randn(3, problem.dimension, generator=torch.Generator().manual_seed(1)).double()
    for i in range(3):
        own = problem.select(slice(i, i + 1))
        rows, point = own.rows, w[i].clone().requires_grad_()
        if isinstance(own.loss, Module):
            value = own.loss._one(point, rows.x[0], rows.y[0], rows.weights[0])
        else:
            z = rows.x[0] @ point.view(-1, 5).T
            y, weight = rows.y[0], rows.weights[0]
            if name == "logistic":
                value = (weight * nn.functional.softplus(-y * z[:, 0])).sum()
            elif name == "softmax":
                value = (weight * nn.functional.cross_entropy(z, y.long(), reduction="none")).sum()
            else:
                value = (weight * (z[:, 0] - y).square()).sum() / 2
        square = point.square()
        value = value + 0.05 * square.sum() + 0.05 * (square / (1 + square)).sum()
        value.backward()
        assert torch.allclose(own.gradient(w[i : i + 1])[0], point.grad, atol=1e-12)  # type: ignore[arg-type]
        assert float(own.value(w[i : i + 1])) == pytest.approx(float(value.detach()))


@pytest.mark.parametrize("name", ["logistic", "softmax", "linear"])
def test_smoothness_bounds_every_pair_of_gradients_and_is_not_far_off(name: str) -> None:
    problem = PROBLEMS[name]()
    constants = problem.constants()
    generator = torch.Generator().manual_seed(2)
    ratios = []
    for _ in range(200):
        a = torch.randn(problem.dimension, generator=generator, dtype=torch.float64)
        step = torch.randn(problem.dimension, generator=generator, dtype=torch.float64) * 0.01
        change = problem.gradient(a + step) - problem.gradient(a)
        ratios.append(change.norm(dim=1) / step.norm())
        assert problem.mean_gradient(a + step).sub(problem.mean_gradient(a)).norm() <= (
            constants.L_f * step.norm() * (1 + 1e-9)
        )
    assert (torch.stack(ratios).max(0).values <= torch.tensor(constants.L) + 1e-9).all()


def test_padding_changes_nothing() -> None:
    problem = PROBLEMS["logistic"]()
    w = torch.randn(5, dtype=torch.float64)
    for i, m in enumerate(SIZES):
        x, y = problem.rows.x[i, :m], problem.rows.y[i, :m]
        alone = Problem(problem.loss, stack_rows([(x, y)]), l2=0.1, nonconvex=0.05)
        assert torch.allclose(alone.gradient(w)[0], problem.gradient(w)[i], atol=1e-14)


def test_size_weighting_is_the_mean_over_all_rows() -> None:
    sized = ragged(Linear(5), lambda z: z, "size")
    x = torch.cat([sized.rows.x[i, :m] for i, m in enumerate(SIZES)])
    y = torch.cat([sized.rows.y[i, :m] for i, m in enumerate(SIZES)])
    together = Problem(Linear(5), stack_rows([(x, y)]), l2=0.1, nonconvex=0.05)
    w = torch.randn(5, dtype=torch.float64)
    assert sized.mean_value(w) == pytest.approx(together.mean_value(w))


def test_a_batch_gives_an_unbiased_gradient() -> None:
    problem = PROBLEMS["linear"]()
    w = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = torch.zeros(3, 5, dtype=torch.float64)
    for t in range(4000):
        stream = Stream.of(0, t, "batch", torch.arange(3))
        total += problem.gradient(w, problem.batch(stream, 2))
    full = problem.gradient(w)
    assert (total / 4000 - full).norm() < 0.05 * full.norm()


def test_an_epoch_visits_every_row_once() -> None:
    problem = PROBLEMS["linear"]()
    seen: list[list[float]] = [[], [], []]
    for batch, active in problem.epoch(Stream.of(0, 0, "epoch", torch.arange(3)), 3):
        for i in range(3):
            valid = batch.weights[i] > 0
            assert bool(valid.any()) == bool(active[i])
            seen[i] += batch.y[i][valid].tolist()
            assert float(batch.weights[i].sum()) == pytest.approx(1.0 if active[i] else 0.0)
    for i, m in enumerate(SIZES):
        assert sorted(seen[i]) == sorted(problem.rows.y[i, :m].tolist())


def test_normal_equations_are_the_same_problem_and_solve_it() -> None:
    summed = ragged(Linear(5), lambda z: z, "sum")
    parts = [(summed.rows.x[i, :m], summed.rows.y[i, :m]) for i, m in enumerate(SIZES)]
    problem = normal_equations(parts, l2=0.1)
    plain = Problem(Linear(5), summed.rows, l2=0.1)
    w = torch.randn(5, dtype=torch.float64)
    assert torch.allclose(problem.gradient(w), plain.gradient(w))
    assert torch.allclose(problem.value(w), plain.value(w))
    assert float(problem.mean_gradient(minimise(problem)).norm()) < 1e-12
    assert problem.constants().sizes == SIZES
    with pytest.raises(SympruneError, match="full gradients only"):
        problem.batch(Stream.of(0, 0, "batch", torch.arange(3)), 3)


def test_a_network_with_running_statistics_is_refused() -> None:
    with pytest.raises(SympruneError, match="running statistics"):
        Module(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def test_a_network_starts_where_its_seed_says() -> None:
    problem = make_problem("digits", model="mlp", clients=3)
    assert torch.equal(problem.initial(1), problem.initial(1))
    assert not torch.equal(problem.initial(1), problem.initial(2))
    assert problem.layout.names == ("1.weight", "1.bias", "3.weight", "3.bias")
    parts = problem.layout.split(problem.initial(0))
    assert torch.equal(problem.layout.join(parts), problem.initial(0))


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"data": "imagenet"}, "imagenet"),
        ({"model": "transformer"}, "transformer"),
        ({"model": "logistic"}, "two classes"),
        ({"split": "random"}, "random"),
        ({"split": "dirichlet:x"}, "dirichlet:x"),
        ({"split": "iid:3"}, "no argument"),
        ({"split": "user"}, "which user"),
        ({"clients": 2000}, "2000 clients"),
        ({"clients": 0}, "0 clients"),
        ({"dtype": "int8"}, "int8"),
        ({"data": "libsvm:nowhere.txt"}, "nowhere.txt"),
        ({"data": "mnist:nowhere"}, "nowhere"),
        ({"weighting": "rank"}, "rank"),
    ],
)
def test_bad_choices_are_named(options: dict[str, object], culprit: str) -> None:
    with pytest.raises(SympruneError, match=culprit):
        make_problem(**options)  # type: ignore[arg-type]
