"""Clients made of Gaussian classes, for experiments on label skew that need no data set."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.losses import Module, Softmax
from symprune.fed.problems.networks import he_mlp
from symprune.fed.problems.problem import Problem, stack_rows


def gaussian_classes(
    skew: float | None = 0.2,
    clients: int = 20,
    classes: int = 20,
    dimension: int = 30,
    spread: float = 0.55,
    rows: int = 60,
    test_rows: int = 50,
    widths: tuple[int, ...] = (100, 50),
    l2: float = 5e-4,
    seed: int = 0,
) -> Problem:
    """Class means `N(0, spread^2 I)`, unit noise. A client draws its labels from a prior of its
    own, `Dirichlet(skew)`, or uniformly if `skew` is None, and its test rows alike."""
    if skew is not None and skew <= 0:
        raise SympruneError(f"The label skew {skew} must be positive.")
    generator = np.random.default_rng(seed)
    means = generator.normal(0, spread, (classes, dimension))
    train: list[tuple[Tensor, Tensor]] = []
    test: list[tuple[Tensor, Tensor]] = []
    for _ in range(clients):
        prior = np.full(classes, 1 / classes)
        if skew is not None:
            prior = generator.dirichlet(np.full(classes, skew))
        for part, size in ((train, rows), (test, test_rows)):
            y = generator.choice(classes, size, p=prior)
            x = means[y] + generator.normal(size=(size, dimension))
            part.append((_tensor(x), _tensor(y)))
    name = f"gaussian classes ({'iid' if skew is None else skew}, {clients} clients, seed {seed})"
    loss = Module(partial(he_mlp, (dimension,), classes, *widths, gain=0.7))
    return Problem(loss, stack_rows(train), l2, client_test=stack_rows(test), name=name)


def _tensor(a: np.ndarray) -> Tensor:
    return torch.from_numpy(a).float()


def hidden_clusters(seed: int = 0) -> Problem:
    """8 Gaussian classes; 24 clients in 4 hidden clusters with label priors Dirichlet(0.3); 20
    training and 200 test rows each."""
    generator = np.random.default_rng(seed)
    means = 0.6 * generator.standard_normal((8, 8))
    priors = generator.dirichlet(np.full(8, 0.3), 4)

    def draw(count: int, prior: np.ndarray) -> tuple[Tensor, Tensor]:
        y = generator.choice(8, count, p=prior)
        x = np.c_[means[y] + generator.standard_normal((count, 8)), np.ones(count)]
        return torch.from_numpy(x), torch.from_numpy(y.astype(float))

    train = [draw(20, priors[client % 4]) for client in range(24)]
    test = stack_rows([draw(200, priors[client % 4]) for client in range(24)])
    return Problem(Softmax(9, 8), stack_rows(train), 1e-3, client_test=test, name="labels")
