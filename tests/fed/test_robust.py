"""A reply that is finite and far from all others: left out, or outvoted, and nothing else moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import CLIENTS, Network, job, states
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed import snapshot
from symprune.fed.algorithms import ALGORITHMS, build
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Turn
from symprune.fed.remote.loop import Outcome
from symprune.fed.remote.server import serve
from symprune.fed.robust import DEPLOYED, Usual, geometric_median, read_defence, trimmed_mean
from symprune.fed.simulate import Result, simulate
from symprune.fed.wire.envelope import Letter, unpack
from symprune.fed.wire.payload import decode_message, encode_message

HOSTILE = 2
AVERAGING = sorted(name for name, cls in ALGORITHMS.items() if cls.averages)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem("digits", split="dirichlet:1", clients=7, l2=0.1)


def enormous(reply: bytes) -> bytes:
    """The reply with every number replaced by a finite 1e30."""
    letter = unpack(reply)
    fields = {
        name: torch.full_like(tensor, 1e30) if tensor.is_floating_point() else tensor
        for name, tensor in decode_message(letter.parts[0]).items()
    }
    return Letter(letter.header, (encode_message(fields),)).pack()


def attacked(name: str, folder: Path, robust: str, rounds: int = 3) -> Outcome:
    """A run in which one client always sends 1e30."""

    def after(number: int, client: int, reply: bytes) -> bytes:
        return enormous(reply) if number >= 0 and client == HOSTILE else reply

    network = Network(folder / "clients", after=after)
    return serve(replace(job(name, rounds), robust=robust), network, folder / "server", pause=0)


def without(name: str, folder: Path, rounds: int = 3) -> Outcome:
    """The same run, in which that client never replies."""

    def after(number: int, client: int, reply: bytes) -> bytes | None:
        return None if number >= 0 and client == HOSTILE else reply

    network = Network(folder / "clients", after=after)
    return serve(job(name, rounds), network, folder / "server", pause=0)


@pytest.mark.parametrize("name", ["fedavg", "gd", "scaffold", "proxskip", "ef-bv", "fedopt"])
def test_by_default_a_server_leaves_out_a_finite_1e30(name: str, tmp_path: Path) -> None:
    hostile = attacked(name, tmp_path / "hostile", DEPLOYED)
    honest = without(name, tmp_path / "honest")
    assert torch.equal(hostile.model, honest.model)
    assert int(hostile.counted[HOSTILE]) == -1


def test_without_a_defence_the_same_reply_wins(tmp_path: Path) -> None:
    assert float(attacked("fedavg", tmp_path, "none", 1).model.abs().max()) > 1e28


@pytest.mark.parametrize("name", ["proxskip", "i-scaffnew"])
def test_the_control_variates_still_add_up_to_zero_when_a_reply_is_left_out(
    name: str, tmp_path: Path
) -> None:
    outcome = attacked(name, tmp_path, DEPLOYED, rounds=4)
    kept = states(tmp_path, outcome)
    algorithm = outcome.algorithm
    everyone = Turn(0, 0, CLIENTS, torch.arange(CLIENTS))
    received = {"x": outcome.server["x"].expand(CLIENTS, -1)}
    h = algorithm.listen(kept, received, everyone)["h"].double()
    assert float(h.norm()) > 0 and int(outcome.counted[HOSTILE]) == -1
    size = CLIENTS * 4 * torch.finfo(torch.float32).eps * float(h.abs().sum())
    assert float(h.sum(0).norm()) <= size


def test_the_servers_variate_stays_the_mean_of_the_clients_when_scaffold_leaves_one_out(
    tmp_path: Path,
) -> None:
    outcome = attacked("scaffold", tmp_path, DEPLOYED, rounds=4)
    mean = outcome.memory["c"].double().mean(0)
    size = 16 * torch.finfo(torch.float32).eps * float(outcome.memory["c"].abs().max())
    assert torch.allclose(outcome.server["c"].double(), mean, atol=size, rtol=0)
    assert bool((outcome.memory["c"][HOSTILE] == 0).all())


@pytest.mark.parametrize("rule", ["trimmed:0.2", "geometric-median"])
@pytest.mark.parametrize("name", ["proxskip", "scafflix", "scaffold", "ef-bv", "fedsparse"])
def test_what_takes_the_place_of_the_mean_is_refused_where_a_state_is_measured_by_it(
    name: str, rule: str, problem: Problem
) -> None:
    with pytest.raises(SympruneError, match=rf"{name} .* use norm:K or krum:f"):
        simulate(build(name), problem, 1, robust=rule)
    with pytest.raises(SympruneError, match="use norm:K or krum:f"):
        replace(job(name), robust=rule)


@pytest.mark.parametrize("name", AVERAGING)
def test_an_algorithm_that_averages_goes_by_the_mean_of_its_replies_alone(
    name: str, problem: Problem
) -> None:
    algorithm = build(name).prepare(problem.constants())
    everyone = Turn(0, 0, problem.clients, torch.arange(problem.clients))
    server = algorithm.server_init(problem.initial(0), everyone)
    assert not algorithm.memory(server, everyone)
    generator = torch.Generator().manual_seed(5)
    replies = {
        field: torch.randn(problem.clients, *like.shape, generator=generator)
        for field, like in algorithm.reply_like(server, everyone).items()
    }
    means = {field: rows.mean(0).expand_as(rows) for field, rows in replies.items()}
    one, other = (algorithm.server_step(server, r, everyone) for r in (replies, means))
    assert all(torch.allclose(one[field], other[field], atol=1e-4) for field in one)


@pytest.mark.parametrize("rule", ["norm:50", "krum:1", "trimmed:0.15", "geometric-median"])
def test_every_rule_still_trains_when_a_seventh_of_the_replies_is_hostile(
    rule: str, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = ALGORITHMS["fedavg"]
    reply = cls.reply

    def hostile(self: object, w: Tensor, x: Tensor, turn: Turn) -> dict[str, Tensor]:
        honest = reply(self, w, x, turn)["w"]
        return {"w": torch.where((turn.clients == HOSTILE).unsqueeze(1), -1e30, honest)}

    honest = simulate(build("fedavg"), problem, 6)
    monkeypatch.setattr(cls, "reply", hostile)
    run = simulate(build("fedavg"), problem, 6, robust=rule)
    assert run.history[-1]["loss"] < 1.1 * honest.history[-1]["loss"]


def outlier(reply: Any, distances: float) -> Any:
    """FedAvg's replies, of which the hostile one is so many median distances from their median."""

    def lie(self: object, w: Tensor, x: Tensor, turn: Turn) -> dict[str, Tensor]:
        rows = reply(self, w, x, turn)["w"]
        centre = rows.median(0).values
        away = rows[HOSTILE] - centre
        far = distances * (rows - centre).norm(dim=1).median() / away.norm()
        rows[HOSTILE] = centre + far * away
        return {"w": rows}

    return lie


def test_one_of_seven_at_nine_hundred_median_distances_is_as_if_it_had_not_replied(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = ALGORITHMS["fedavg"]
    monkeypatch.setattr(cls, "reply", outlier(cls.reply, 900))
    defended = simulate(build("fedavg"), problem, 4, robust=DEPLOYED)
    assert defended.history[-1]["loss"] < 1.1 * simulate(
        build("fedavg"), problem, 4, robust="krum:1"
    ).history[-1]["loss"]  # fmt: skip
    wrecked = simulate(build("fedavg"), problem, 4, robust="norm:1000")
    assert wrecked.history[-1]["loss"] > 1000 * defended.history[-1]["loss"]


@pytest.mark.parametrize("name", ["fedavg", "proxskip", "scaffold"])
@pytest.mark.parametrize("split", ["class:2", "quantity:0.3"])
def test_the_default_leaves_no_honest_client_out_however_its_data_differ(
    name: str, split: str
) -> None:
    uneven = make_problem("digits", split=split, clients=10, l2=0.1)
    plain, defended = (
        simulate(build(name), uneven, 15, robust=rule, evaluate_every=0)
        for rule in ("none", DEPLOYED)
    )
    assert same(plain, defended)


def test_what_is_usual_is_what_it_was_when_replies_differed_most() -> None:
    rule, usual = read_defence("norm:5"), Usual()
    apart = torch.tensor([[-1.0], [0.0], [1.0], [2.0]])
    assert rule.keeps({"w": apart}, usual).all() and usual == {"w": 1.0}
    late = torch.tensor([[0.0], [1e-3], [0.0], [4.0]])  # who is behind is no liar
    assert rule.keeps({"w": late}, usual).tolist() == [True] * 4
    late[3] = 6.0
    assert rule.keeps({"w": late}, usual).tolist() == [True, True, True, False]
    assert rule.keeps({"w": late}, Usual()).tolist() == [True, False, True, False]


def test_lists_of_other_lengths_are_compared_by_how_long_vectors_they_are() -> None:
    rows = [torch.ones(4), torch.ones(4), torch.ones(5), 19.0 * torch.ones(4)]
    assert read_defence("norm:20").keeps({"g": list(rows)}).all()
    assert read_defence("norm:15").keeps({"g": list(rows)}).tolist() == [True] * 3 + [False]


def test_a_run_that_goes_on_knows_what_was_usual_before(problem: Problem, tmp_path: Path) -> None:
    whole = simulate(build("proxskip"), problem, 6, robust="norm:3")
    file = tmp_path / "state.safetensors"
    simulate(build("proxskip"), problem, 3, robust="norm:3", checkpoint=file)
    assert snapshot.load(file).usual.keys() == {"what"}
    assert same(whole, simulate(build("proxskip"), problem, 6, robust="norm:3", checkpoint=file))


def same(a: Result, b: Result) -> bool:
    return torch.equal(a.model, b.model)


def test_a_loose_bound_changes_no_bit_of_an_honest_run(problem: Problem) -> None:
    plain = simulate(build("proxskip"), problem, 4)
    assert same(plain, simulate(build("proxskip"), problem, 4, robust="norm:1000"))
    assert not same(plain, simulate(build("proxskip"), problem, 4, robust="krum:1"))


def test_krum_says_how_many_replies_it_needs(problem: Problem) -> None:
    with pytest.raises(SympruneError, match="krum:3 needs 9 replies in a round; 7 came"):
        simulate(build("gd"), problem, 1, robust="krum:3")


@pytest.mark.parametrize("text", ["norm", "norm:1", "krum:0", "krum:1.5", "trimmed:0.5", "mean"])
def test_what_is_no_defence_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(SympruneError, match=text):
        read_defence(text)


def test_a_trimmed_mean_and_a_geometric_median_stay_among_the_honest_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 30, generator=generator)
    honest = rows[2:].clone()
    rows[:2] = torch.tensor([1e30, -3e38]).unsqueeze(1)
    assert float((trimmed_mean(rows, 0.25) - honest.mean(0)).abs().max()) < 2
    assert float((geometric_median(rows) - honest.mean(0)).norm()) < float(honest[0].norm())
