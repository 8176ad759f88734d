"""Hard EM with Laplace and mixture priors, and the identity behind EM's gradient step."""

from __future__ import annotations

import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedsparse.fedmedian import median
from symprune.fed.algorithms.fedsparse.fedmixture import mixture_pull, responsibilities
from symprune.fed.problems.losses import Linear
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.simulate import simulate


@pytest.fixture(scope="module")
def digits() -> Problem:
    return make_problem("digits", split="dirichlet:0.5", clients=6, l2=0.0)


@pytest.mark.parametrize("count", [5, 6])
def test_the_median_maximises_the_laplace_prior(count: int) -> None:
    w = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    best = median(w)
    distance = lambda x: float((w - x).abs().sum())  # noqa: E731
    for seed in range(50):
        push = 0.3 * torch.randn(4, generator=torch.Generator().manual_seed(seed + 1))
        assert distance(best) <= distance(best + push) + 1e-6


def test_the_median_of_an_even_number_is_between_the_two_in_the_middle() -> None:
    rows = torch.tensor([[4.0, -1.0], [1.0, 5.0], [2.0, 0.0], [9.0, 2.0]])
    assert median(rows).tolist() == [3.0, 1.0]
    assert median(rows[:3]).tolist() == [2.0, 0.0]


def test_the_mixtures_pull_and_server_direction_are_gradients_of_the_prior() -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(5, 3, generator=g).double().requires_grad_()
    models = torch.randn(2, 3, generator=g).double().requires_grad_()
    gap = (w.unsqueeze(1) - models).square().sum(2)
    prior = torch.logsumexp(-0.7 / 2 * gap, 1).sum()
    for_w, for_models = torch.autograd.grad(prior, (w, models))
    plain, spread = w.detach(), models.detach().expand(5, -1, -1)
    assert torch.allclose(-mixture_pull(plain, spread, 0.7), for_w)
    r = responsibilities(plain, spread, 0.7)
    by_hand = 0.7 * (r.unsqueeze(2) * (plain.unsqueeze(1) - spread)).sum(0)
    assert torch.allclose(by_hand, for_models)


def test_one_component_is_fedprox(digits: Problem) -> None:
    one = simulate(build("fedmixture", components=1, pull=0.3), digits, 3)
    prox = simulate(build("fedopt", server_optimizer="sgd", pull=0.3), digits, 3)
    assert torch.allclose(one.model, prox.model, atol=1e-6)


def test_a_laplace_prior_leaves_most_weights_alone_and_sends_less(digits: Problem) -> None:
    free = simulate(build("fedmedian", pull=0.0), digits, 5, evaluate_every=5)
    held = simulate(build("fedmedian", pull=0.02), digits, 5, evaluate_every=5)
    assert held.history[-1]["bytes_up"] < 0.8 * free.history[-1]["bytes_up"]
    assert held.history[-1]["accuracy"] > free.history[-1]["accuracy"] - 0.1


def test_two_components_find_two_kinds_of_clients() -> None:
    """Regressions whose coefficients are +t for half of the clients and -t for the others."""
    truth, parts = torch.tensor([1.0, -2.0, 1.5]).double(), []
    for n in range(6):
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(n)).double()
        parts.append((x, x @ truth * (-1) ** n))
    problem = Problem(Linear(3), stack_rows(parts), name="two kinds")
    options = {"pull": 3.0, "lr": 0.1, "epochs": 5, "spread": 1.0}
    one = simulate(build("fedmixture", components=1, **options), problem, 20)
    two = simulate(build("fedmixture", components=2, **options), problem, 20)
    found = two.server["models"]
    assert float((found[0] + found[1]).norm()) < 0.3 < float(found[0].norm())
    assert min(float((m - truth).norm()) for m in found) < 0.5
    assert float(one.model.norm()) < 0.5


def test_one_gradient_step_of_em_is_a_gradient_step_on_the_marginal_likelihood() -> None:
    """`y | phi ~ N(phi, s2)`, `phi ~ N(w, 1/lam)`: with a client that reaches the mode, a server
    step of size lam goes along `(y - w) / (s2 + 1/lam)`."""
    y, w, s2, lam = 1.7, 0.4, 0.5, 2.0
    row = torch.tensor([[s2**-0.5]], dtype=torch.float64), torch.tensor([y * s2**-0.5]).double()
    options = {"pull": lam, "lr": 0.2, "epochs": 40, "batch": 1}
    algorithm = build("fedopt", **options, server_optimizer="sgd", server_lr=lam)
    problem = Problem(Linear(1), stack_rows([row]), name="one observation")
    result = simulate(algorithm, problem, 1, x0=torch.tensor([w]).double())
    assert float(result.model) - w == pytest.approx((y - w) / (s2 + 1 / lam))


def test_wrong_options_are_named(digits: Problem) -> None:
    with pytest.raises(SympruneError, match="components"):
        simulate(build("fedmixture", components=0), digits, 1)
    with pytest.raises(SympruneError, match="pull"):
        simulate(build("fedmedian", pull=-1.0), digits, 1)
