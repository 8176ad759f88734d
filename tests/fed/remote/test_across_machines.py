"""Clients on machines of their own: the bits of the in-process engine, whatever happens to them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machines import CLIENTS, OPTIONS, job, run, same, states

from symprune.errors import SympruneError
from symprune.fed.algorithms import ALGORITHMS, build
from symprune.fed.algorithms.shared.control_variates import control_variates
from symprune.fed.owner.policy import Policy
from symprune.fed.remote.client import answer
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.records import record_file
from symprune.fed.remote.server import serve
from symprune.fed.remote.transport import LocalTransport, Node
from symprune.fed.simulate import simulate

FOLLOWED = ("sparse-proxskip", "ef21", "fedspa", "sub-fedavg", "fedsparse-scaffold")  # to the bit


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_letters_give_the_bits_and_the_bytes_of_the_in_process_run(
    name: str, tmp_path: Path
) -> None:
    task = job(name)
    there = run(task, tmp_path)
    here = simulate(task.build_algorithm(), task.whole_problem(), task.rounds, clients_at_once=1)
    assert same(there.server, here.server)
    assert same(there.ledger.state(), here.ledger.state())
    assert [r["loss"] for r in there.history] == [r["loss"] for r in here.history]
    asked = (there.counted >= 0).all()  # a client that was never asked has no file
    assert not asked or same(states(tmp_path, there), here.client)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_round_finishes_without_a_client_that_is_silent(name: str, tmp_path: Path) -> None:
    silent = lambda number, client: (number, client) != (1, 2)  # noqa: E731
    outcome = run(job(name), tmp_path, before=silent)
    assert [record["round"] for record in outcome.history] == [0, 1, 2]
    assert bool(torch.isfinite(outcome.model).all())
    assert outcome.history[2]["replies"] < CLIENTS


@pytest.mark.parametrize("delivered", [True, False])
def test_control_variates_sum_to_zero_when_a_reply_is_lost(tmp_path: Path, delivered: bool) -> None:
    gone = lambda number, client: client == 1 and number in (2, 3)  # noqa: E731
    outcome = run(
        job("sparse-proxskip", 7, p=0.3),
        tmp_path,
        before=lambda number, client: delivered or not gone(number, client),
        after=lambda number, client, reply: None if gone(number, client) else reply,
    )
    client = states(tmp_path, outcome)
    h = control_variates(outcome.algorithm, outcome.server, client)  # type: ignore[arg-type]
    assert float(h.sum(0).norm()) < 1e-5 * float(h.norm(dim=1).mean())
    replies = [record["replies"] for record in outcome.history[1:]]
    assert replies == [4, 4, 3, 3, 3, 4, 4]  # absent twice, then it catches up


def test_the_servers_control_variate_stays_the_mean_of_the_clients(tmp_path: Path) -> None:
    lost = lambda number, client, reply: None if (number, client) == (2, 3) else reply  # noqa: E731
    outcome = run(job("ef21", 5), tmp_path, after=lost)
    mean = states(tmp_path, outcome)["h"].mean(0)
    assert torch.allclose(outcome.server["h"], mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [*FOLLOWED, "scafflix"])
@pytest.mark.parametrize("damage", ["deleted", "overwritten"])
def test_a_client_that_lost_its_disk_goes_on_with_its_state(
    name: str, damage: str, tmp_path: Path
) -> None:
    def accident(number: int, client: int) -> bool:
        folder = tmp_path / "clients" / "client-1"
        if (number, client) == (2, 1) and damage == "deleted":
            shutil.rmtree(folder)
        elif (number, client) == (2, 1):
            next(folder.iterdir()).write_bytes(b"nonsense")
        return True

    task = job(name, 5)
    outcome = run(task, tmp_path, before=accident)
    here = simulate(task.build_algorithm(), task.whole_problem(), 5, clients_at_once=1)
    if name in FOLLOWED:
        assert same(outcome.server, here.server)
        assert same(states(tmp_path, outcome), here.client)
    else:  # the server knows xhat up to the rounding of its scale
        metrics = outcome.algorithm.metrics(outcome.server, states(tmp_path, outcome))
        assert metrics["alpha_h_sum"] < 1e-4
        assert torch.allclose(outcome.server["x"], here.server["x"], atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "sparse-proxskip", "ef21", "fedspa"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_server_goes_on_and_ends_where_an_undisturbed_run_ends(
    name: str, moment: str, tmp_path: Path
) -> None:
    def killed(number: int, client: int, *reply: bytes) -> Any:
        if (number, client) == (2, 2):
            raise KeyboardInterrupt
        return reply[0] if reply else True

    task = job(name, 4)
    with pytest.raises(KeyboardInterrupt):
        run(task, tmp_path, **{moment: killed})
    outcome = run(task, tmp_path)
    here = simulate(task.build_algorithm(), task.whole_problem(), 4, clients_at_once=1)
    assert same(outcome.server, here.server)
    assert same(states(tmp_path, outcome), here.client)
    assert [record["round"] for record in outcome.history] == list(range(5))


def test_a_turn_that_is_asked_for_again_is_answered_with_the_same_bytes(tmp_path: Path) -> None:
    """Or noise that hides a record would be drawn twice."""
    seen: dict[tuple[int, int], list[bytes]] = {}
    options = {"private_randomness": True, "iterations": 3}

    def note(number: int, client: int, reply: bytes) -> bytes | None:
        if number >= 0 and client == 0:
            seen.setdefault((0, 0), []).append(reply)
        return None if number == 0 else reply

    run(job("ldp-fedp3", 1, **options, epsilon=8.0), tmp_path, after=note)
    first, again = seen[0, 0]
    assert first == again


def test_noise_from_a_seed_the_server_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match="private_randomness"):
        run(job("ldp-fedp3", epsilon=8.0), tmp_path)


def test_a_folder_with_another_run_is_refused_and_more_rounds_are_not(tmp_path: Path) -> None:
    run(job("gd", 1), tmp_path)
    assert [record["round"] for record in run(job("gd", 2), tmp_path).history] == [0, 1, 2]
    with pytest.raises(SympruneError, match="another run: gd"):
        run(job("fedavg"), tmp_path)


def test_a_client_that_never_says_what_it_holds_is_named(tmp_path: Path) -> None:
    def confused(number: int, client: int, reply: bytes) -> bytes:
        return b"?" if client == 3 else reply

    with pytest.raises(SympruneError, match="Clients 3 did not say"):
        run(job("gd"), tmp_path, after=confused)


def test_a_round_without_any_reply_ends_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match="Round 0 was tried"):
        run(job("gd"), tmp_path, before=lambda number, client: number < 0)


def test_a_clients_state_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    outcome = run(job("ef21", 1), tmp_path)
    file = record_file(tmp_path / "clients" / "client-0", outcome.run)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SympruneError, match="no name for a run"):
        record_file(tmp_path, "../../elsewhere")


def test_rows_that_only_a_client_has_stay_there_and_are_used(tmp_path: Path) -> None:
    """Two clients with their own files do what two clients of a shared set with these rows do."""
    rows = np.random.default_rng(0).normal(size=(40, 3))
    y = np.where(rows @ [1.0, -2.0, 0.5] > 0, 1, -1)
    for i in range(2):
        lines = [
            f"{label} " + " ".join(f"{j + 1}:{value:.4f}" for j, value in enumerate(row))
            for label, row in zip(y[i::2], rows[i::2], strict=True)
        ]
        (tmp_path / f"{i}.txt").write_text("\n".join(lines) + "\n")

    class Own(LocalTransport):
        def node(self, number: int) -> Node:
            data = f"libsvm:{tmp_path / f'{number}.txt'}"
            own = {"data": data, "policy": str(tmp_path / "policy.yaml")}
            return Node(number, tmp_path / f"client-{number}", own)

    problem = {"data": f"libsvm:{tmp_path / '0.txt'}", "clients": 2, "l2": 0.1}
    task = TrainingJob("proxskip", {}, problem, rounds=30)
    Policy(protection="plain").save(tmp_path / "policy.yaml")
    outcome = serve(task, Own(answer, 2, tmp_path), tmp_path / "server", pause=0)
    assert "loss" not in outcome.history[-1]  # the server cannot know it
    own = [task.client_problem(i, f"libsvm:{tmp_path / f'{i}.txt'}") for i in range(2)]
    gradient = sum(p.gradient(outcome.model.unsqueeze(0))[0] for p in own)
    assert isinstance(gradient, torch.Tensor) and float(gradient.norm()) < 1e-2


def test_an_algorithms_expectation_is_about_one_client(tmp_path: Path) -> None:
    """`reply_like` is what the validation stands on: no algorithm may leave it out by accident."""
    for name in sorted(ALGORITHMS):
        cls = type(build(name, **OPTIONS.get(name, {})))
        declared = bool(cls.replies) or any("reply_like" in vars(c) for c in cls.__mro__[:-2])
        assert declared or name == "local", name
