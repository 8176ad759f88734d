"""User-level privacy: a client moves the sum by a clipping length, the noise is as promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed import build, make_problem, simulate
from symprune.fed.mechanism import UNITS
from symprune.fed.private_users import UserPrivacy, private_users
from symprune.fed.problems.losses import Logistic
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Turn
from symprune.fed.secure import masking

QUIET = {"clip": 5.0, "multiplier": 1e-6, "noise_seed": 0}


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedht", "gd"])
def test_without_clipping_and_hardly_any_noise_it_is_the_algorithm_itself(name: str) -> None:
    problem = make_problem("digits", clients=4)
    plain = simulate(build(name), problem, rounds=2)
    private = simulate(private_users(build(name), UserPrivacy(**QUIET)), problem, rounds=2)
    assert torch.allclose(plain.model, private.model, atol=1e-4)


def test_a_hostile_client_moves_the_sum_by_no_more_than_the_clipping_length() -> None:
    problem = make_problem("digits", clients=3)
    tight = UserPrivacy(clip=1e-3, multiplier=1.0, noise_seed=0)
    wrapped = private_users(build("fedavg", gamma=1e6, p=0.5), tight)
    turn = Turn(0, 0, 3, torch.arange(3))
    received = {"x": torch.zeros(3, problem.dimension)}
    _, message = wrapped.client_step({}, received, problem, turn)
    lengths = message["w"].double().norm(dim=1)  # type: ignore[union-attr]
    assert bool((lengths <= UNITS).all()) and bool((lengths > 0.99 * UNITS).all())


def test_the_noise_of_the_mean_is_that_of_one_clients_clipping_length() -> None:
    problem = make_problem("digits", clients=4)
    wrapped = private_users(build("fedavg"), UserPrivacy(clip=2.0, multiplier=3.0, noise_seed=1))
    rows = {"w": torch.zeros(4, problem.dimension, dtype=torch.int64)}
    turn = Turn(0, 0, 4, torch.arange(4))
    after = wrapped.server_step({"x": torch.zeros(problem.dimension)}, rows, turn)["x"]
    expected = 3.0 * 2.0 / 4
    assert float(after.std()) == pytest.approx(expected, rel=5 / problem.dimension**0.5)


def test_who_is_not_drawn_sends_nothing_and_everyone_is_drawn_by_the_rate() -> None:
    drawn = UserPrivacy(clip=1.0, multiplier=1.0, rate=0.3, noise_seed=7)
    wrapped = private_users(build("fedavg"), drawn)
    sizes = [len(wrapped.cohort({}, Turn(t, 0, 50, torch.arange(50)))) for t in range(40)]
    assert sum(sizes) / 2000 == pytest.approx(0.3, abs=0.05) and len(set(sizes)) > 5
    hardly = UserPrivacy(clip=1.0, multiplier=1.0, rate=1e-9)
    seldom = private_users(build("fedavg", gamma=0.1), hardly)
    problem = make_problem("digits", clients=2)
    turn = Turn(0, 0, 2, seldom.cohort({}, Turn(0, 0, 2, torch.arange(2))))
    received = {"x": torch.zeros(1, problem.dimension)}
    _, message = seldom.client_step({}, received, problem.select(turn.clients), turn)
    assert not bool(message["w"].any())  # type: ignore[union-attr]


def test_who_is_drawn_follows_from_nothing_that_others_know() -> None:
    """The seed of the run and the number of the round are public; each server draws its own lots,
    and says the same whenever it is asked within a round."""
    promised = UserPrivacy(clip=1.0, multiplier=1.0, rate=0.5)
    turn = Turn(3, 0, 200, torch.arange(200))
    one, other = (private_users(build("fedavg"), promised) for _ in range(2))
    again = one.prepare(make_problem("digits", clients=4).constants())
    assert torch.equal(one.cohort({}, turn), again.cohort({}, turn))
    assert not torch.equal(one.cohort({}, turn), other.cohort({}, turn))
    assert not torch.equal(one.cohort({}, turn), one.cohort({}, replace(turn, number=4)))
    assert one.lots not in one.settings().values() and str(one.lots) not in repr(one)


def test_sampling_makes_the_same_noise_worth_more() -> None:
    pytest.importorskip("dp_accounting")
    always, seldom = (UserPrivacy(1.0, 2.0, rate).epsilon(20, 1e-5) for rate in (1.0, 0.1))
    assert seldom < always / 3


def test_what_does_not_average_or_leaves_the_simulation_is_refused() -> None:
    with pytest.raises(SympruneError, match="does not go by the mean of its replies"):
        private_users(build("ef21"), UserPrivacy(1.0, 1.0))
    with pytest.raises(SympruneError, match="clients add the noise themselves"):
        private_users(build("fedavg"), UserPrivacy(1.0, 1.0)).check_across_machines()
    with pytest.raises(SympruneError, match="must be above 0"):
        UserPrivacy(0.0, 1.0)


def test_shares_of_the_honest_clients_alone_are_the_promised_noise() -> None:
    """Seven clients of which three add none, whatever their reason; four were counted on."""
    problem = make_problem("digits", clients=7)
    promised = UserPrivacy(clip=1.0, multiplier=2.0, honest=4, noise_seed=3)
    wrapped = private_users(build("fedavg", gamma=0.0), promised)
    turn = Turn(0, 0, 7, torch.arange(7))
    received = {"x": torch.zeros(7, problem.dimension)}
    _, message = wrapped.client_step({}, received, problem, turn)
    rows = message["w"]
    assert isinstance(rows, torch.Tensor) and rows.dtype == torch.int64
    honest = rows[:4].sum(0).double() / UNITS
    assert float(honest.std()) == pytest.approx(2.0, rel=5 / problem.dimension**0.5)
    assert float(rows[:3].sum(0).double().std()) / UNITS < 1.9
    other = wrapped.server_step({"x": torch.zeros(problem.dimension)}, {"w": rows}, turn)["x"]
    assert torch.allclose(other.double(), rows.sum(0).double() / UNITS / 7, rtol=1e-5, atol=1e-6)


def test_behind_a_secure_sum_the_server_sees_the_noisy_sum_alone() -> None:
    """The whole numbers are what secure sums add up, drop-outs included."""
    pytest.importorskip("cryptography")
    problem = make_problem("digits", clients=4)
    wrapped = private_users(build("fedavg", gamma=0.1), UserPrivacy(1.0, 1.0, honest=2))
    turn = Turn(0, 0, 4, torch.arange(4))
    received = {"x": torch.zeros(4, problem.dimension)}
    rows = wrapped.client_step({}, received, problem, turn)[1]["w"]
    assert isinstance(rows, torch.Tensor)
    seeds = [bytes([n]) * 32 for n in range(4)]
    masked = [masking.shift({"w": rows[n]}, seeds[n], add=True) for n in range(3)]
    summed = masking.total(masked)
    for seed in seeds[:3]:
        summed = masking.shift(summed, seed, add=False)
    assert torch.equal(summed["w"], rows[:3].sum(0))


def test_who_adds_its_share_of_the_noise_throws_its_coin_itself() -> None:
    """All are in the sum, so nobody else knows whose data are; the others send noise alone."""
    problem = make_problem("digits", clients=40)
    promised = UserPrivacy(clip=1.0, multiplier=1e-6, rate=0.25, honest=40, noise_seed=5)
    wrapped = private_users(build("fedavg", gamma=0.1), promised)
    received = {"x": torch.zeros(40, problem.dimension)}
    shares = []
    for number in range(10):
        turn = Turn(number, 0, 40, torch.arange(40))
        assert len(wrapped.cohort({}, turn)) == 40
        rows = wrapped.client_step({}, received, problem, turn)[1]["w"]
        assert isinstance(rows, torch.Tensor)
        shares.append(float((rows.double().norm(dim=1) > UNITS / 1000).double().mean()))
    assert sum(shares) / 10 == pytest.approx(0.25, abs=0.1) and len(set(shares)) > 3


@pytest.mark.parametrize("name", ["proxskip", "sparse-proxskip", "accelerated-server-pruning"])
def test_control_variates_are_measured_against_what_is_counted(name: str) -> None:
    """With hardly any noise their sum stays zero, however much is clipped."""
    problem = make_problem("digits", clients=6, l2=0.1)
    tight = UserPrivacy(clip=0.05, multiplier=1e-6, noise_seed=0)
    for honest in (None, 6):
        promised = replace(tight, honest=honest)
        run = simulate(private_users(build(name, p=0.5), promised), problem, rounds=6)
        before = run.series("h_sum")
        if name != "accelerated-server-pruning":
            assert max(before) < 0.02
        else:
            assert max(before) > 0.02  # as without privacy


def test_private_rounds_without_clipping_are_the_sparse_methods_own() -> None:
    problem = make_problem("digits", clients=4, l2=0.1)
    chosen = build("sparse-proxskip", p=0.5, sparsity=0.5)
    plain = simulate(chosen, problem, rounds=4)
    private = simulate(private_users(chosen, UserPrivacy(**QUIET)), problem, rounds=4)
    assert torch.allclose(plain.model, private.model, atol=1e-3)
    with pytest.raises(SympruneError, match="does not go by the mean of its replies"):
        private_users(build("sparse-proxskip-modified"), UserPrivacy(1.0, 1.0))
    with pytest.raises(SympruneError, match="control variates need everyone in every round"):
        private_users(chosen, UserPrivacy(1.0, 1.0, rate=0.5))


def test_a_server_optimiser_is_given_as_many_replies_as_there_were() -> None:
    problem = make_problem("digits", clients=4)
    chosen = build("fedopt", server_optimizer="sgd", lr=0.01)
    plain = simulate(chosen, problem, rounds=1)
    private = simulate(private_users(chosen, UserPrivacy(**QUIET)), problem, rounds=1)
    assert torch.allclose(plain.model, private.model, atol=1e-4)


def test_pruned_coordinates_are_neither_clipped_noised_nor_counted() -> None:
    """The clip is a length of what is kept alone, and noise falls on nothing else: with masks a
    private run is that of the smaller problem, whatever is in the columns that are pruned."""
    problem = make_problem("breast-cancer", clients=4, l2=0.1, dtype="float64")
    keep = torch.arange(problem.dimension) % 3 > 0
    masks = {problem.layout.names[0]: keep}
    rows = replace(problem.rows, x=problem.rows.x[..., keep])
    smaller = Problem(Logistic(int(keep.sum())), rows, problem.l2)
    promised = UserPrivacy(clip=0.05, multiplier=0.5, noise_seed=7)
    private = private_users(build("fedavg", gamma=0.5, p=0.5, random_steps=False), promised)
    pruned = simulate(private, problem, 3, masks=masks)
    alone = simulate(private, smaller, 3)
    assert not pruned.model[~keep].any()
    assert torch.allclose(pruned.model[keep], alone.model, rtol=0, atol=1e-9)
    for way in ("bytes_up", "paper_bits_up"):
        assert pruned.history[-1][way] == alone.history[-1][way]
    loud = replace(problem, rows=replace(problem.rows, x=problem.rows.x * (1 + 99.0 * ~keep)))
    assert torch.equal(simulate(private, loud, 3, masks=masks).model, pruned.model)
    still = replace(promised, multiplier=1e-9)
    quiet = simulate(private_users(private.inner, still), problem, 1, masks=masks).model
    assert float(quiet.norm()) == pytest.approx(0.05, rel=0.5)  # the clip is what bounds it
    assert float((pruned.model - quiet)[keep].abs().min()) > 0  # noise is on all that is kept
