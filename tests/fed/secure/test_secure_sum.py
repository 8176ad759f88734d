"""Secure sums and who tries to break them: drop-outs, two stories, false keys and shares."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.secure import graph, keys, letters, masking, shares
from symprune.fed.secure.collector import Collector, pack, unpack
from symprune.fed.secure.party import Party, Trust

ANYBODY = Trust()
WHAT = "the sums of block 0"


def numbers(client: int) -> dict[str, Tensor]:
    return {"a": torch.tensor([10**client, -client, 2**62]), "b": torch.ones(2, dtype=torch.int16)}


class Federation:
    """Parties and a server that does as the test says."""

    def __init__(self, size: int, trust: Trust = ANYBODY) -> None:
        self.parties = {n: Party.enter(n, trust) for n in range(size)}
        self.server = Collector({n: party.card for n, party in self.parties.items()})
        for n, party in self.parties.items():
            self.post(n, party.share(self.server.cards, trust).mail, party.next)
        self.server.open_mail()

    def post(self, number: int, mail: dict[int, bytes], slot: object) -> None:
        assert slot is not None
        rows = pack([mail[holder] for holder in sorted(mail)], letters.LETTER_BYTES)
        head = pack([slot.secrets.head], letters.HEAD_BYTES)[0]  # type: ignore[attr-defined]
        self.server.take_mail(number, head, rows, sorted(mail))

    def rows(self, number: int) -> dict[int, bytes]:
        told = zip(self.server.participants, unpack(self.server.rows_for(number)), strict=True)
        return dict(told)

    def mask(self, number: int, purpose: str = WHAT, what: bytes = b"") -> dict[str, Tensor]:
        index, party = self.server.index, self.parties[number]
        masked, signed = party.mask(index, self.rows(number), purpose, what, numbers(number))
        return {**masked, "agreed": pack([signed], 64)[0]}

    def unmask(self, number: int) -> dict[int, bytes]:
        asked = self.server.unmask_request()
        told = asked["survivors"].tolist()
        signed = dict(zip(told, unpack(asked["agreements"]), strict=True))
        given, slot = self.parties[number].unmask(self.server.index, told, signed)
        self.post(number, slot.mail, slot)
        rows = [given.get(n, bytes(shares.SHARE_BYTES)) for n in self.server.participants]
        return self.server.check_shares(number, pack(rows, shares.SHARE_BYTES))

    def sum(
        self, purpose: str, silent: Collection[int] = (), late: Collection[int] = ()
    ) -> dict[str, Tensor]:
        """One sum; silent ones send nothing, late ones their numbers but no shares."""
        there = [n for n in self.server.participants if n not in silent]
        self.server.take_masked({n: self.mask(n, purpose) for n in there})
        return self.server.unmask({n: self.unmask(n) for n in there if n not in late})


def expected(clients: Collection[int]) -> dict[str, Tensor]:
    return masking.total(numbers(n) for n in clients)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("silent", [(), (1,), (0, 4)])
@pytest.mark.parametrize("late", [(), (2,)])
def test_the_sum_is_that_of_all_who_sent_bit_for_bit(
    silent: tuple[int, ...], late: tuple[int, ...]
) -> None:
    federation = Federation(9)
    there = [n for n in range(9) if n not in silent]
    assert equal(federation.sum("first", silent, late), expected(there))
    left = [n for n in there if n not in late]
    if len(left) >= graph.threshold(9):
        assert equal(federation.sum("second"), expected(left))


def test_too_many_gone_and_nothing_is_learned() -> None:
    federation = Federation(6)
    with pytest.raises(SympruneError, match="asked to unmask 3 clients"):
        federation.sum(WHAT, silent=(0, 1, 2))
    federation = Federation(6)
    with pytest.raises(SympruneError, match="3 gave a share of client 0's secret, 4 are needed"):
        federation.sum(WHAT, late=(0, 1, 2))


def test_what_a_client_sends_is_noise_without_the_others_shares() -> None:
    """Neither the masked numbers nor those with all pair masks taken off say anything."""
    federation = Federation(3)
    sent = federation.mask(0)["a"]
    assert not bool((sent == numbers(0)["a"]).any())
    slot = federation.parties[0].now
    assert slot is not None
    opened = masking.shift({"a": sent}, slot.secrets.own, add=False)["a"]
    assert not bool((opened == numbers(0)["a"]).any())


def test_a_late_client_does_not_fall_out_of_two_sums() -> None:
    """The attack on sums that are repeated without whoever is late: {0,1,2} minus {0,1}."""
    federation = Federation(3)
    whole = federation.sum(WHAT)
    assert equal(whole, expected(range(3)))
    with pytest.raises(SympruneError, match="in a second sum, from which the statistics of whoe"):
        federation.mask(0, WHAT)


def test_a_sum_has_one_story_about_who_is_in_it() -> None:
    federation = Federation(4)
    server = federation.server
    server.take_masked({n: federation.mask(n) for n in range(4)})
    federation.unmask(0)
    del server.masked[3]
    with pytest.raises(SympruneError, match="told two stories about sum 0"):
        federation.unmask(0)


def test_masks_hide_one_vector_only() -> None:
    federation = Federation(4)
    federation.mask(0)
    with pytest.raises(SympruneError, match="told two stories about sum 0"):
        federation.mask(0, what=b"other lengths")
    del federation.server.mails[3]
    with pytest.raises(SympruneError, match="told two stories about sum 0"):
        federation.mask(0)


def test_masks_do_not_hide_two_vectors_under_two_names() -> None:
    """The difference of two vectors behind one stream would be theirs, without any mask."""
    federation = Federation(4)
    federation.mask(0)
    with pytest.raises(SympruneError, match="told two stories about sum 0"):
        federation.mask(0, "the sums of block 1")
    party, rows = federation.parties[1], federation.rows(1)
    party.mask(0, rows, WHAT, b"", numbers(1))
    with pytest.raises(SympruneError, match="has masked other numbers in sum 0"):
        party.mask(0, rows, WHAT, b"", numbers(2))
    again = Party.from_dict(party.to_dict())
    with pytest.raises(SympruneError, match="has masked other numbers in sum 0"):
        again.mask(0, rows, WHAT, b"", numbers(2))


def test_clients_that_were_told_of_different_sums_unmask_nothing() -> None:
    federation = Federation(4)
    server, everyone = federation.server, dict(federation.server.mails)
    got = {n: federation.mask(n) for n in (0, 1, 2)}
    del server.mails[2]
    got[3] = federation.mask(3)
    server.mails = everyone
    server.take_masked(got)
    with pytest.raises(SympruneError, match="Client 3 has not agreed to who takes part"):
        federation.unmask(0)


def test_nobody_unmasks_a_sum_it_is_not_in_or_before_it_was_masked() -> None:
    federation = Federation(4)
    with pytest.raises(SympruneError, match="two stories"):
        federation.parties[0].unmask(0, [0, 1, 2], {})
    federation.server.take_masked({n: federation.mask(n) for n in range(4)})
    del federation.server.masked[0]
    with pytest.raises(SympruneError, match="asked to unmask a sum without itself"):
        federation.unmask(0)


def test_a_false_share_is_attributed_to_its_holder() -> None:
    federation = Federation(4)
    server = federation.server
    server.take_masked({n: federation.mask(n) for n in range(4)})
    given = {n: federation.unmask(n) for n in range(4)}
    false = [bytes(shares.SHARE_BYTES)] * 4
    with pytest.raises(SympruneError, match="It gave a false share of client 0's secret"):
        server.check_shares(1, pack(false, shares.SHARE_BYTES))
    del given[1]
    assert equal(server.unmask(given), expected(range(4)))


def test_false_secrets_are_attributed_to_their_dealer() -> None:
    federation = Federation(4)
    mail = federation.server.mails[2]
    mail.head = mail.head[: keys.KEY_BYTES] + bytes(32)
    with pytest.raises(SympruneError, match="A letter was not signed by client 2"):
        federation.mask(0)

    federation = Federation(4)
    party = federation.parties[2]
    assert party.next is not None
    other = letters.Secrets(party.next.secrets.pair, keys.new_secret())
    cards = {n: keys.Card.unpack(card) for n, card in party.roster.items()}
    own = (party.signing, party.reading)
    false = letters.Secrets(other.pair, party.next.secrets.own)
    wrong, kept = letters.deal(2, 0, other, own, cards, 3)
    signed = {  # shares of another seed than the one its head commits to, properly signed
        n: letter[: -keys.SIGNATURE_BYTES]
        + keys.sign(
            party.signing,
            letters._signed(2, n, 0, false.head, letter[: -keys.SIGNATURE_BYTES]),
        )
        for n, letter in wrong.items()
    }
    party.next.kept = kept
    federation.server.mails[2].letters = signed
    with pytest.raises(SympruneError, match="Client 2 dealt out shares of something else"):
        federation.sum(WHAT)


def test_a_server_that_opens_or_swaps_letters_is_found_out() -> None:
    federation = Federation(3)
    mail = federation.server.mails[1]
    mail.letters[0], mail.letters[2] = mail.letters[2], mail.letters[0]
    with pytest.raises(SympruneError, match="not signed by client 1"):
        federation.mask(0)


def test_a_small_cohort_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(SympruneError, match="its owner insists on 5"):
        Federation(4, Trust(least_clients=5))
    federation = Federation(6, Trust(least_clients=6))
    with pytest.raises(SympruneError, match="asked to unmask 5 clients"):
        federation.sum(WHAT, silent=(1,))
    lonely = Party.enter(0, ANYBODY)
    with pytest.raises(SympruneError, match="a sum of 1 clients"):
        lonely.share({0: lonely.card}, ANYBODY)


def node_key(folder: Path, name: str) -> Path:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    (folder / f"{name}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    public = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(*public) + b"\n")
    return folder / f"{name}.key"


def test_a_server_cannot_put_clients_of_its_own_in(tmp_path: Path) -> None:
    trusts = [Trust(node_key(tmp_path, str(n)), tmp_path) for n in range(3)]
    parties = {n: Party.enter(n, trust) for n, trust in enumerate(trusts)}
    cards = {n: party.card for n, party in parties.items()}
    assert parties[0].share(cards, trusts[0])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    intruders = {
        "without a node key": Party.enter(2, ANYBODY).card,
        "with one nobody knows": Party.enter(2, Trust(node_key(elsewhere, "x"))).card,
        "twice": cards[2][: 2 * keys.KEY_BYTES] + cards[1][2 * keys.KEY_BYTES :],
    }
    for intruder in intruders.values():
        with pytest.raises(SympruneError, match="is not one of the nodes whose keys the owner"):
            parties[1].share({**cards, 2: intruder}, trusts[1])
    assert parties[1].share(cards, trusts[1])
    with pytest.raises(SympruneError, match="told of other clients than before"):
        parties[1].share({**cards, 2: intruders["twice"]}, trusts[1])


def test_two_thirds_of_the_owners_it_knows_must_be_there(tmp_path: Path) -> None:
    """A roster of a victim and a colluder is a sum of two, whoever else has a key."""
    trusts = [Trust(node_key(tmp_path, str(n)), tmp_path) for n in range(6)]
    parties = [Party.enter(n, trust) for n, trust in enumerate(trusts)]
    cards = {n: party.card for n, party in enumerate(parties)}
    for few in (2, 3):
        roster = {n: cards[n] for n in range(few)}
        with pytest.raises(SympruneError, match=f"sum of {few} clients: its owner insists on 4"):
            parties[0].share(roster, trusts[0])
    assert parties[0].share({n: cards[n] for n in range(5)}, trusts[0])
    assert parties[0].least == 4


def test_a_node_key_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("nonsense")
    with pytest.raises(SympruneError, match=r"node key .* cannot be used"):
        Party.enter(0, Trust(node_key=tmp_path / "a"))
    with pytest.raises(SympruneError, match="does not hold public node keys"):
        keys.read_peers(tmp_path / "a")


def test_a_party_goes_on_from_what_it_wrote_down() -> None:
    federation = Federation(4)

    def forget() -> None:
        for n, party in federation.parties.items():
            federation.parties[n] = Party.from_dict(json.loads(json.dumps(party.to_dict())))

    forget()
    federation.server.take_masked({n: federation.mask(n) for n in range(3)})
    forget()
    plain, tensors = Collector(federation.server.cards, federation.server.mails).state()
    again = Collector.from_state(json.loads(json.dumps(plain)), tensors)
    assert again.mails == federation.server.mails and again.cards == federation.server.cards
    given = {n: federation.unmask(n) for n in range(3)}
    assert equal(federation.server.unmask(given), expected(range(3)))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_no_stories_give_a_server_and_its_colluders_one_honest_client(size: int) -> None:
    """Every way to tell each honest client its own survivors, with as many colluders as promised:
    whose seed and pair secret the server then has shares enough for."""
    least, bad = graph.threshold(size), graph.colluders(size)
    honest = range(size - bad)
    stories = [
        set(story)
        for count in range(least, size + 1)
        for story in itertools.combinations(range(size), count)
    ]
    choices = [[story for story in stories if n in story] for n in honest]
    for told in itertools.product(*choices):
        opened = set()
        for victim in honest:
            own = bad + sum(victim in story for story in told)
            pair = bad + sum(victim not in story for story in told)
            assert min(own, pair) < least
            if pair < least:
                opened.add(victim)
        assert len(opened) >= 2


def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not() -> None:
    secret = keys.new_secret()
    dealt = shares.split(secret, range(5), 3)
    for some in itertools.combinations(range(5), 3):
        assert shares.combine({n: dealt[n] for n in some}, 3) == secret
    assert shares.combine({n: dealt[n] for n in (0, 1)}, 2) != secret
    with pytest.raises(SympruneError, match="2 shares are fewer than the 3"):
        shares.combine({n: dealt[n] for n in (0, 1)}, 3)


def test_the_field_of_the_shares_is_one() -> None:
    """Fermat's test to several bases."""
    assert all(pow(base, shares.PRIME - 1, shares.PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))


def test_with_many_clients_everybody_has_as_many_neighbours_and_sums_are_right() -> None:
    cards = {n: n.to_bytes(4, "big") for n in range(400)}
    near = graph.neighbours(cards)
    degree = graph.choose_degree(400)
    assert {len(found) for found in near.values()} == {degree} and degree < 399
    assert all(n in near[other] for n, found in near.items() for other in found)
    assert near != graph.neighbours({**cards, 7: b"another key"})


def test_a_sparse_sum_survives_drop_outs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "choose_degree", lambda clients: 4)
    federation = Federation(9)
    assert equal(federation.sum(WHAT, silent=(3,)), expected([n for n in range(9) if n != 3]))


def test_a_client_counts_on_no_more_honest_ones_than_every_sum_has() -> None:
    for size in range(2, 300):
        gone_or_hostile = size - graph.assured(size)
        assert graph.assured(size) >= 1 and gone_or_hostile >= size - graph.threshold(size)
        assert graph.assured_after_losses(size) <= graph.assured(graph.threshold(size))
    assert [graph.assured_after_losses(n) for n in (2, 4, 5, 7, 10, 100)] == [1, 1, 2, 2, 3, 23]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 9])
def test_the_noise_is_enough_against_another_client_of_the_sum(size: int) -> None:
    """It knows its own share, so of what is counted on none may be its."""
    others = graph.threshold(size) - 1
    assert graph.assured(size) <= max(1, others)
