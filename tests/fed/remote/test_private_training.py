"""Private training across machines: secure sums of clipped changes, with attempts to break it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import CLIENTS, PROBLEM, Network

from symprune.errors import SympruneError
from symprune.fed import simulate
from symprune.fed.mechanism import UNITS
from symprune.fed.owner.ledger import Ledger
from symprune.fed.owner.policy import Policy
from symprune.fed.private_users import UserPrivacy, private_users
from symprune.fed.remote.client import UNTOLD, answer
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.loop import Outcome
from symprune.fed.remote.private_client import load_session, save_session, session_file
from symprune.fed.remote.server import serve
from symprune.fed.remote.transport import Node
from symprune.fed.wire.envelope import Letter, unpack
from symprune.fed.wire.payload import decode_message, encode_message
from symprune.maskset import MaskSet

pytest.importorskip("cryptography")
pytest.importorskip("dp_accounting")

QUIET = {"clip": 50.0, "multiplier": 1e-7, "rate": 1.0, "honest": 1, "delta": 1e-5}
LOUD = {"clip": 1.0, "multiplier": 4.0, "rate": 1.0, "honest": 2, "delta": 1e-5}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {"p": 0.5},
    "fediht": {"p": 0.5, "sparsity": 0.5},
    "sparse-proxskip": {"p": 0.5, "sparsity": 0.5},
}


def job(name: str = "fedavg", rounds: int = 3, **private: Any) -> TrainingJob:
    promised = {**QUIET, **private}
    return TrainingJob(name, OPTIONS[name], PROBLEM, rounds, robust="none", private=promised)


def run(task: TrainingJob, folder: Path, **events: Any) -> Outcome:
    return serve(task, Network(folder / "clients", **events), folder / "server", pause=0)


def central(task: TrainingJob) -> torch.Tensor:
    """The same in one process, with noise of its own."""
    promised = UserPrivacy(**{k: v for k, v in QUIET.items() if k != "delta"})
    algorithm = private_users(replace(task, private={}).build_algorithm(), promised)
    return simulate(algorithm, task.whole_problem(), task.rounds).model


@pytest.mark.parametrize("name", OPTIONS)
def test_with_hardly_any_noise_it_is_the_simulation(name: str, tmp_path: Path) -> None:
    outcome = run(job(name), tmp_path)
    one = central(job(name))  # noise moves TopK's choice among weights that are nearly equal
    assert float((outcome.model - one).norm()) < 0.02 * float(one.norm())
    assert [record["replies"] for record in outcome.history[1:]] == [CLIENTS] * 3
    spent = [record["epsilon"] for record in outcome.history[1:]]
    assert spent == sorted(spent) and spent[0] > 0


def test_the_server_never_holds_a_clients_numbers_outside_of_their_masks(tmp_path: Path) -> None:
    """Nothing moves a client, and still all it sends is uniform over 64 bits."""
    seen: list[torch.Tensor] = []

    def after(number: int, client: int, reply: bytes) -> bytes:
        letter = unpack(reply)
        if letter.header.get("turn") is not None:
            seen.append(decode_message(letter.parts[0])["w"])
        return reply

    task = job(multiplier=1e-7)
    task = replace(task, options={"gamma": 1e-30, "p": 0.5}, rounds=2)
    run(task, tmp_path, after=after)
    assert len(seen) == 2 * CLIENTS
    for numbers in seen:
        assert float((numbers.double().abs() > 2.0**61).double().mean()) > 0.5
    apart = seen[0] - seen[CLIENTS]  # two rounds of one client: other masks
    assert float((apart.double().abs() > 2.0**60).double().mean()) > 0.5


def test_a_client_that_is_away_is_left_out_and_comes_back_in_a_new_session(tmp_path: Path) -> None:
    """Exchanges: describe, enter, share, and two a round."""
    gone = {2, 3, 4}

    class Wire(Network):
        def connected(self) -> set[int]:
            away = {1} if self.number in gone else set()
            return super().connected() - away

    network = Wire(tmp_path / "c", before=lambda number, client: client != 1 or number not in gone)
    outcome = serve(job("sparse-proxskip", 4), network, tmp_path / "server", pause=0)
    replies = [record["replies"] for record in outcome.history[1:]]
    assert replies[0] == CLIENTS - 1 and replies[-1] == CLIENTS
    known = load_session(session_file(tmp_path / "c" / "client-1", outcome.run))
    assert known is not None and known.session >= 2


def test_too_many_gone_and_the_round_is_lost_and_never_asked_for_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def before(number: int, client: int) -> bool:
        return number != 2 or client < 2

    class Wire(Network):
        def exchange(self, letters: Mapping[int, bytes]) -> dict[int, bytes]:
            header = unpack(next(iter(letters.values()))).header
            if header["kind"] == "sum":
                asked.append(header["turn"])
            return super().exchange(letters)

    network = Wire(tmp_path / "c", before=before)
    outcome = serve(job(rounds=3), network, tmp_path / "server", pause=0)
    assert asked == [0, 1, 2]
    assert [record["replies"] for record in outcome.history[1:]] == [0, CLIENTS, CLIENTS]


def test_a_killed_server_loses_the_round_that_was_under_way(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def after(number: int, client: int, reply: bytes) -> bytes:
        if number == 4 and client == 3:
            raise Killed
        return reply

    with pytest.raises(Killed):
        run(job(), tmp_path, after=after)
    outcome = run(job(), tmp_path)
    assert [record["replies"] for record in outcome.history[1:]] == [CLIENTS, CLIENTS]
    assert outcome.history[-1]["round"] == 3


def test_numbers_that_no_clipped_change_has_lose_the_round_and_nobody_is_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def after(number: int, client: int, reply: bytes) -> bytes:
        letter = unpack(reply)
        if client or letter.header["status"] != "done" or letter.header["turn"] != 1:
            return reply
        fields = decode_message(letter.parts[0])
        fields["w"] = fields["w"] + 10 * UNITS * CLIENTS
        return Letter(letter.header, (encode_message(fields),)).pack()

    outcome = run(job(rounds=3), tmp_path, after=after)
    assert [record["replies"] for record in outcome.history[1:]] == [CLIENTS, 0, CLIENTS]
    assert "it cannot be told who" in caplog.text


# An owner with data of its own, and a server that asks for more than it allows.


def rows(count: int, seed: int) -> str:
    """A file of rows with six features."""
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    values = (" ".join(f"{j + 1}:{v:.3f}" for j, v in enumerate(row)) for row in x)
    return "".join(f"{(-1) ** i} {row}\n" for i, row in enumerate(values))


class Owned(Network):
    """Every client has rows and a policy of its own; letters are kept, and may be changed."""

    def __init__(
        self,
        folder: Path,
        change: Callable[[Letter], Letter] = lambda letter: letter,
        **policy: Any,
    ) -> None:
        super().__init__(folder)
        self.letters: list[dict[int, bytes]] = []
        self.replies: list[dict[int, bytes]] = []
        self.change, self.config = change, dict[int, dict[str, str]]()
        for number in range(CLIENTS):
            place = folder / f"own-{number}"
            place.mkdir(parents=True)
            (place / "rows.txt").write_text(rows(20, number))
            rules = {"protection": "shared-noise", "ledger": str(place / "ledger.jsonl"), **policy}
            Policy(**rules).save(place / "policy.yaml")
            named = {"data": f"libsvm:{place / 'rows.txt'}", "policy": str(place / "policy.yaml")}
            self.config[number] = named

    def node(self, number: int) -> Node:
        return replace(super().node(number), config=self.config[number])

    def exchange(self, letters: Mapping[int, bytes]) -> dict[int, bytes]:
        sent = {i: self.change(unpack(data)).pack() for i, data in letters.items()}
        self.letters.append(sent)
        self.replies.append({i: answer(sent[i], self.node(i)) for i in sorted(sent)})
        return self.replies[-1]

    def said(self, number: int, letter: Letter) -> dict[str, Any]:
        return unpack(answer(letter.pack(), self.node(number))).header


def own_job(folder: Path, rounds: int = 2, **private: Any) -> TrainingJob:
    """Private training of what the server has other rows for, by which it knows the model."""
    (folder / "public.txt").write_text(rows(8, 99))
    problem = {"data": f"libsvm:{folder / 'public.txt'}", "model": "logistic", "clients": CLIENTS}
    promised = {**LOUD, **private}
    options = {"gamma": 0.1, "p": 0.5}
    return TrainingJob("fedavg", options, problem, rounds, robust="none", private=promised)


def test_every_release_is_in_the_owners_ledger_and_the_budget_ends_the_run(tmp_path: Path) -> None:
    wire = Owned(tmp_path / "c", epsilon=2.0)
    task = own_job(tmp_path, rounds=10)
    with pytest.raises(SympruneError, match="without enough clients"):
        serve(task, wire, tmp_path / "server", pause=0)
    file = tmp_path / "c" / "own-0" / "ledger.jsonl"
    spent = Ledger(file, 2.0, 1e-5).spent()
    assert 1.0 < spent <= 2.0
    assert len(file.read_text().splitlines()) < 10


def asks_for(**changes: Any) -> Callable[[Letter], Letter]:
    """A server that writes other promises into its letters than the job has."""
    return lambda letter: Letter(
        {**letter.header, "private": {**letter.header["private"], **changes}}, letter.parts
    )


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "little noise": ({"multiplier": 0.01}, {}, "multiplier of 0.01 is below"),
    "a wide clip": ({"clip": 1e9}, {}, "clip of 1e+09 is outside"),
    "many that are said to be honest": ({"honest": 4}, {}, "count on 4 honest ones"),
    "noise that others add to": ({}, {"protection": "noise"}, "noise that others add to"),
    "a sum of few": ({}, {"least_clients": 5}, "4 clients are fewer than 5"),
    "another algorithm": ({}, {"algorithms": ("gd",)}, "fedavg is not among its algorithms"),
    "no promise": ({"delta": 2.0}, {}, "delta must be between"),
    "a chance of zero": ({"rate": 0.0}, {}, "with a chance, not 0"),
    "few rows": ({}, {"least_samples": 21}, "its samples are fewer than 21"),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_what_breaks_an_owners_policy_is_refused_before_anything_is_sent(
    attack: str, tmp_path: Path
) -> None:
    changes, policy, sentence = REFUSED[attack]
    wire = Owned(tmp_path / "c", asks_for(**changes), **policy)
    with pytest.raises(SympruneError):
        serve(own_job(tmp_path), wire, tmp_path / "server", pause=0)
    reasons = {
        str(unpack(data).header.get("reason")) for said in wire.replies for data in said.values()
    }
    assert any(sentence.replace("\\", "") in reason for reason in reasons), reasons
    assert not any(
        unpack(d).header["status"] == "done" for said in wire.replies for d in said.values()
    )
    assert not list(tmp_path.rglob("ledger.jsonl"))


@pytest.mark.parametrize(
    ("part", "change"),
    [("private", {"multiplier": 1.0}), ("private", {"clip": 2.0}), ("options", {"gamma": 0.2})],
    ids=str,
)
def test_clients_that_are_promised_different_things_unmask_nothing(
    part: str, change: dict[str, float], tmp_path: Path
) -> None:
    """Client 0 would count on shares of noise that the others were told not to add."""

    def lie(letter: Letter) -> Letter:
        header = letter.header
        told = {**header[part], **change} if header["client"] else header[part]
        return Letter({**header, part: told}, letter.parts)

    wire = Owned(tmp_path / "c", lambda letter: lie(letter) if "run" in letter.header else letter)
    outcome = serve(own_job(tmp_path, rounds=1), wire, tmp_path / "server", pause=0)
    assert [record["replies"] for record in outcome.history[1:]] == [0]
    said = [unpack(data).header for data in wire.replies[-1].values()]
    assert all("has not agreed to who takes part" in header["reason"] for header in said)


@pytest.fixture
def after_a_round(tmp_path: Path) -> Owned:
    """A federation in which one round was summed, and the letters of it."""
    wire = Owned(tmp_path / "c")
    serve(own_job(tmp_path, rounds=1), wire, tmp_path / "server", pause=0)
    return wire


def the_round(wire: Owned, number: int = 0) -> Letter:
    sums = [sent for sent in wire.letters if unpack(sent[number]).header["kind"] == "sum"]
    return unpack(sums[-1][number])


def test_the_same_letter_gets_the_same_bytes_and_spends_nothing(after_a_round: Owned) -> None:
    asked = the_round(after_a_round).pack()
    before = after_a_round.replies[-2][0]
    assert answer(asked, after_a_round.node(0)) == before
    assert len((after_a_round.folder / "own-0" / "ledger.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [{"counted": 0}, {"index": 1}, {"count": 3}, {"turn": 0, "counted": 0}, {"seed": 1}],
    ids=str,
)
def test_a_round_is_not_masked_a_second_time(change: dict[str, Any], after_a_round: Owned) -> None:
    """Two vectors behind the same masks, or one in two sums, would tell what is behind them."""
    asked = the_round(after_a_round)
    said = after_a_round.said(0, Letter({**asked.header, **change}, asked.parts))
    assert said["status"] == "error" and "asked twice for round 0" in said["reason"]


def test_other_numbers_do_not_get_the_same_masks(after_a_round: Owned) -> None:
    """A next round over the sum that was, or a broadcast that was changed."""
    asked = the_round(after_a_round)
    said = after_a_round.said(0, Letter({**asked.header, "turn": 1}, asked.parts))
    assert "two stories about sum 0" in said["reason"]
    again = after_a_round.said(0, Letter({**asked.header, "turn": 2}, asked.parts))
    assert again["status"] == "error"


def test_a_new_session_does_not_make_a_client_forget_what_it_masked(after_a_round: Owned) -> None:
    asked = the_round(after_a_round)
    header = {**asked.header, "session": 7, "kind": "enter"}
    assert after_a_round.said(0, Letter(header))["status"] == "entered"
    said = after_a_round.said(0, Letter({**asked.header, "session": 7}, asked.parts))
    assert "asked twice for round 0" in said["reason"]
    old = after_a_round.said(0, Letter({**header, "session": 3}))
    assert "was in session 7 already" in old["reason"]
    assert "is not in session" in after_a_round.said(0, asked)["reason"]


def test_a_server_cannot_ask_for_plain_work_in_a_private_run(after_a_round: Owned) -> None:
    asked = the_round(after_a_round)
    header = {**asked.header, "kind": "turn", "work": True, "turn": 1}
    said = after_a_round.said(0, Letter(header, asked.parts[:1]))
    assert "no work outside of its sums" in said["reason"]
    del header["private"]
    plain = after_a_round.said(0, Letter(header, asked.parts[:1]))
    assert "not protected" in plain["reason"]
    kindless = {k: v for k, v in asked.header.items() if k != "private"}
    assert "promises nothing" in after_a_round.said(0, Letter(kindless, asked.parts))["reason"]


def test_nobody_is_told_how_many_rows_a_client_has(after_a_round: Owned) -> None:
    told = [unpack(data).header for data in after_a_round.replies[0].values()]
    assert {(said["rows"], said["L"], said["mu"]) for said in told} == {(1, None, None)}


def test_fewer_than_the_owner_asks_for_are_not_unmasked(tmp_path: Path) -> None:
    wire = Owned(tmp_path / "c", least_clients=4)
    serve(own_job(tmp_path, rounds=1), wire, tmp_path / "server", pause=0)
    asked = unpack(wire.letters[-1][0])
    fields = decode_message(asked.parts[0])
    fewer = {name: value[:3] for name, value in fields.items()}
    letter = Letter({**asked.header, "count": 3}, (encode_message(fewer),))
    assert "3 clients are fewer than 4" in wire.said(0, letter)["reason"]


def test_what_a_client_knows_of_its_sums_is_private_and_not_begun_anew_when_damaged(
    after_a_round: Owned,
) -> None:
    (file,) = (after_a_round.folder / "client-0").glob("*.sums.json")
    assert file.stat().st_mode & 0o077 == 0
    known = load_session(file)
    assert known is not None
    save_session(file, known)
    assert load_session(file) == known
    file.write_text(file.read_text()[:-20])
    asked = the_round(after_a_round)
    assert after_a_round.said(0, asked)["reason"] == UNTOLD
    log = (after_a_round.folder / "client-0" / "audit.jsonl").read_text()
    assert "is corrupt" in log and str(file.name) in log


def test_a_private_job_says_all_of_its_promise_and_nothing_else() -> None:
    for wrong in (
        {"clip": 1.0},
        {**LOUD, "seed": 1},
        {**LOUD, "honest": 2.5},
        {**LOUD, "clip": "1"},
    ):
        with pytest.raises(SympruneError, match="A private job has"):
            TrainingJob("fedavg", {}, PROBLEM, private=wrong, robust="none")
    with pytest.raises(SympruneError, match="hidden in a secure sum"):
        TrainingJob("fedavg", {}, PROBLEM, private=LOUD)
    with pytest.raises(SympruneError, match="does not go by the mean"):
        TrainingJob("ef21", {}, PROBLEM, private=LOUD, robust="none")


def test_pruned_weights_are_in_no_secure_sum(tmp_path: Path) -> None:
    keep = torch.rand(10, 65, generator=torch.Generator().manual_seed(3)) < 0.3
    masks = MaskSet()
    masks["weight"] = keep
    masks.save(tmp_path / "masks")
    task = job("fedavg", rounds=2)
    pruned = replace(task, problem={**task.problem, "masks": str(tmp_path / "masks")})
    outcome = run(pruned, tmp_path)
    model = outcome.model.view(10, 65)
    assert not model[~keep].any() and bool(model[keep].any())
    bits = 64 * int(keep.sum()) * CLIENTS * 2
    assert outcome.history[-1]["paper_bits_up"] * CLIENTS == bits
    here = central(pruned)
    assert float((model.flatten() - here).norm()) < 0.02 * float(here.norm())
