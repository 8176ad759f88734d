"""The server of a private run: every round is one secure sum, and the sum is all that it sees.

Two exchanges a round: masked numbers, then shares that take the masks off. Whoever was away comes
back in a new session, with new keys. A round whose sum fails is lost, never asked for again: its
clients have spent their budget on it, and two sums of one round would tell who is missing.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune.errors import Diverged, SympruneError
from symprune.fed.mechanism import UNITS, deviation
from symprune.fed.private_users import PrivateUsers
from symprune.fed.protocol import Algorithm, Turn, check
from symprune.fed.remote.loop import PATIENCE, Loop, status_of
from symprune.fed.remote.replies import FIELD_BYTES, HEADER_BYTES, MAX_BITS
from symprune.fed.secure import collector, graph, keys
from symprune.fed.secure.collector import Collector
from symprune.fed.simulate import Record
from symprune.fed.wire.envelope import unpack
from symprune.fed.wire.payload import Expected, decode_as, encode_message
from symprune.machine import durable
from symprune.machine.patience import stretched
from symprune.validation import has_kinds, parse_json

log = logging.getLogger("symprune.fed")
FILE = "private.json"  # beside the checkpoint: the session, and the round that has begun
LOST = 3  # rounds in a row whose sums may fail
DEVIATIONS = 12  # no noise is so far out

Fields = dict[str, Tensor]
Parts = Mapping[int, tuple[bytes, ...]]


class PrivateLoop(Loop):
    """The rounds of a private run. `sums` are those of the session, None before the next one."""

    algorithm: PrivateUsers

    def begin(self, file: Path) -> None:
        super().begin(file)
        inner = type(self.algorithm.inner)
        self.catches_up = inner.listen is not Algorithm.listen
        self.sums: Collector | None = None
        self.refused: set[int] = set()
        self.session, self.lost, self.file = 0, 0, file.with_name(FILE)
        if self.file.exists():
            kept = parse_json(self.file.read_text())
            whole = has_kinds(kept, {"session": int, "begun": int})
            check(whole, f"{self.file} cannot be read, and which rounds were begun is not known.")
            self.session = kept["session"]
            if kept["begun"] == self.turn:
                log.warning("Round %s was under way and is lost.", self.turn)
                self.turn += 1

    def one_round(self) -> None:
        """Gather, broadcast, sum, step."""
        turn = Turn(self.turn, self.job.seed, self.job.clients, torch.arange(self.job.clients))
        self._catch_up(turn)
        self._gather()
        self._note(begun=turn.number)
        try:
            totals, summed = self._sum(turn)
        except SympruneError as error:
            self.sums, self.lost, self.turn = None, self.lost + 1, self.turn + 1
            log.warning("Round %s is lost: %s", turn.number, error)
            check(self.lost < LOST, f"{self.lost} rounds in a row were lost, the last so: {error}")
            return
        self.lost = 0
        about = turn.about(torch.tensor(summed))
        expected = self.algorithm.promised.rate * len(summed)
        server = self.algorithm.sum_step(self.server, totals, expected, about)
        if not bool(torch.isfinite(self.algorithm.model(server)).all()):
            raise Diverged(f"{self.algorithm.inner.name} diverged in round {turn.number}")
        self.server = server
        self.counted[about.clients] = turn.number
        self.turn += 1

    def measure(self, own: bool) -> Record:
        """With what the rounds so far have spent, lost ones included."""
        super().measure(own)
        promised = self.algorithm.promised
        spent = promised.epsilon(self.turn, self.job.delta) if self.turn else 0.0
        self.history[-1]["epsilon"] = spent
        return self.history[-1]

    def _catch_up(self, turn: Turn) -> None:
        """Broadcasts that were missed, to those whose control variates wait for them."""
        here = self.transport.connected()
        letters = {i: (*owed, False) for i, owed in self.owed.items() if i in here}
        if not letters:
            return
        replies = self._send(letters)
        heard = {i for i, data in replies.items() if status_of(data) in ("heard", "lost")}
        self.owed = {i: owed for i, owed in self.owed.items() if i not in heard}

    def _gather(self) -> None:
        """A session of everybody who is there: the one that is, if nobody is missing from it."""
        for attempt in range(PATIENCE):
            if attempt:
                time.sleep(stretched(self.pause))
            here = self.transport.connected() - self.refused
            if self.sums is not None and here <= set(self.sums.participants):
                return
            try:
                self._open_session(here)
                return
            except SympruneError as error:
                log.warning("No secure sum can be made: %s", error)
                self.sums = None
        raise SympruneError(f"Round {self.turn} was begun {PATIENCE} times without enough clients.")

    def _open_session(self, here: Iterable[int]) -> None:
        """New keys from all, and shares for the first sum."""
        self.session += 1
        self._note(begun=-1)
        sums = Collector()
        asked = self._ask("enter", dict.fromkeys(here, ()))
        card = {"card": (torch.uint8, (keys.CARD_BYTES,))}
        for i, fields in self._open(asked, "entered", lambda _: card).items():
            sums.cards[i] = bytes(fields["card"].tolist())
        self.refused |= {i for i, data in asked.items() if status_of(data) == "error"}
        self._check_enough(sums.cards)
        roster = sorted(sums.cards)
        cards = collector.pack([sums.cards[i] for i in roster], keys.CARD_BYTES)
        body = encode_message({"roster": torch.tensor(roster), "cards": cards})
        dealt = self._ask("share", dict.fromkeys(roster, (body,)), count=len(roster))
        for i, fields in self._open(dealt, "shared", lambda i: _mail(sums, i, roster)).items():
            sums.take_mail(i, fields["head_of_sum"], fields["letters"], roster)
        sums.open_mail()
        self._check_enough(sums.mails)
        self.sums = sums

    def _check_enough(self, members: Mapping[int, Any]) -> None:
        promised, n = self.algorithm.promised, self.job.clients
        least = graph.threshold(n)
        check(len(members) >= least, f"{len(members)} of {n} clients are there, {least} are needed")
        honest = promised.honest or 1
        sure = graph.assured(len(members))
        check(honest <= sure, f"of {len(members)} clients {sure} are honest for sure, not {honest}")

    def _sum(self, turn: Turn) -> tuple[Fields, list[int]]:
        """The sum of a round, and whose numbers are in it."""
        sums = self.sums
        assert sums is not None
        everyone = sums.participants
        bodies = self._broadcast(torch.tensor(everyone), turn, self.transport.connected())
        asked: dict[int, tuple[bytes, ...]] = {}
        who = torch.tensor(everyone)
        for i in everyone:
            fields = {"participants": who, "letters": sums.rows_for(i)}
            asked[i] = (bodies[i], encode_message(fields))
        numbers = {"turn": turn.number, "index": sums.index, "count": len(everyone)}
        replies = self._ask("sum", asked, **numbers)
        self._owe(replies, bodies, turn)
        like = self.algorithm.inner.reply_like(self.server, turn)
        ((name, expected),) = like.items()
        fields_of: Expected = {
            name: (torch.int64, expected.shape or ()),
            "agreed": (torch.uint8, (keys.SIGNATURE_BYTES,)),
        }
        self.refused |= {i for i, data in replies.items() if status_of(data) == "error"}
        got = self._open(replies, "done", lambda _: fields_of, turn.number)
        self._check_sum(got)
        sums.take_masked(got)
        self._bill(replies, sums.survivors)
        total = self._unmask(sums)
        self._check_plausible(total[name], len(got))
        return total, sorted(got)

    def _check_sum(self, got: Mapping[int, Any]) -> None:
        assert self.sums is not None
        least = max(self.sums.least, graph.threshold(self.job.clients))
        check(len(got) >= least, f"{len(got)} clients sent numbers, {least} are needed")

    def _unmask(self, sums: Collector) -> Fields:
        """Shares from those who are in the sum; with them come letters for the next one."""
        among = sums.survivors
        body = encode_message(sums.unmask_request())
        numbers = {"index": sums.index, "count": len(among)}
        replies = self._ask("unmask", dict.fromkeys(among, (body,)), **numbers)
        people = len(sums.participants)

        def expected(i: int) -> Expected:
            return collector.unmasked_fields(people, len(sums.holders(i, among)))

        given: dict[int, dict[int, bytes]] = {}
        for i, fields in self._open(replies, "unmasked", expected).items():
            try:
                given[i] = sums.check_shares(i, fields["shares"])
            except SympruneError as error:
                log.warning("Client %s is left out of the next sum: %s", i, error)
                continue
            sums.take_mail(i, fields["head_of_sum"], fields["letters"], among)
        return sums.unmask(given)

    def _check_plausible(self, total: Tensor, count: int) -> None:
        """Clipped numbers and noise add up to no more than this, wherever the model is."""
        share = deviation(self.algorithm.promised.share)
        most = count * UNITS + DEVIATIONS * share * math.sqrt(count)
        sensible = bool((total.double().abs() <= most).all())
        check(
            sensible,
            "somebody added numbers that no clipped change has; behind masks it cannot be told who",
        )

    def _ask(self, kind: str, parts: Parts, **numbers: int) -> dict[int, bytes]:
        letters = {}
        for i, bodies in parts.items():
            number = {"turn": self.turn, "counted": int(self.counted[i]), **numbers}
            about = {"kind": kind, "session": self.session, **number}
            letters[i] = self._letter_of(i, about, *bodies)
        return self.transport.exchange(letters)

    def _open(
        self,
        replies: Mapping[int, bytes],
        status: str,
        expected: Callable[[int], Expected],
        turn: int | None = None,
    ) -> dict[int, Fields]:
        """The replies that are what was asked for; the others are named."""
        got = {}
        for i, data in sorted(replies.items()):
            try:
                got[i] = _read(data, status, expected(i), turn)
            except Exception as error:  # whatever a stranger's bytes can provoke
                reason = str(error).rstrip(".") or type(error).__name__
                log.warning("Client %s, round %s: refused, %s.", i, self.turn, reason)
        return got

    def _owe(self, replies: Mapping[int, bytes], bodies: dict[int, bytes], turn: Turn) -> None:
        """Who has not heard a broadcast and waits for it gets it later."""
        heard = {i for i, data in replies.items() if status_of(data) == "done"}
        if self.catches_up:
            waits = {i for i in range(turn.n) if int(self.counted[i]) == turn.number - 1}
            missed = waits - heard
            body = next(iter(bodies.values()))
            self.owed |= dict.fromkeys(missed, (turn.number, body))

    def _bill(self, replies: Mapping[int, bytes], clients: list[int]) -> None:
        bodies = [unpack(replies[i]).parts[0] for i in clients]
        sizes = torch.tensor([len(body) for body in bodies])
        bits = torch.full_like(sizes, 64 * len(self.algorithm.model(self.server)))
        self.ledger.up(torch.tensor(clients), sizes, bits)

    def _note(self, begun: int) -> None:
        """Which round has begun and in which session, before anybody is asked."""
        kept = {"session": self.session, "begun": begun}
        durable.write_text(self.file, json.dumps(kept))


def _mail(sums: Collector, number: int, among: list[int]) -> Expected:
    return collector.mail_fields(len(sums.holders(number, among)))


def _read(data: bytes, status: str, expected: Expected, turn: int | None) -> Fields:
    size = 0
    for kind, shape in expected.values():
        assert not callable(shape)
        size += math.prod(shape) * kind.itemsize + FIELD_BYTES
    letter = unpack(data, HEADER_BYTES + size)
    if letter.header.get("status") == "error":
        raise SympruneError(f"it says: {str(letter.header.get('reason'))[:500]}")
    check(letter.header.get("status") == status and len(letter.parts) == 1, "it is no such reply")
    check(turn is None or letter.header.get("turn") == turn, "it is for another round")
    bits = letter.header.get("bits", 0)
    check(type(bits) is int and 0 <= bits <= MAX_BITS, "its count of bits is no number")
    return decode_as(letter.parts[0], expected)
