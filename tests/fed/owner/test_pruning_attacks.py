"""A server that asks a pruning client for more than its owner allows: refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest

from symprune.errors import SympruneError
from symprune.fed.owner.guard import Guard
from symprune.fed.owner.policy import Policy
from symprune.fed.pruning import Client, Privacy, Server, messages, remote
from symprune.fed.pruning.refusals import check_digest
from symprune.fed.remote.transport import Node
from symprune.recipe import Recipe

REFERENCE = families.tokens(3, 12, 9)


def guarded(folder: Path, name: str = "a", **entries: Any) -> Client:
    """A client with text of its own and this policy."""
    policy = Policy(ledger=str(folder / "ledger.jsonl"), **entries)
    own = Guard(policy, "my text")
    return Client(
        families.model(),
        families.tokens(4, 12),
        folder=folder / name,
        guard=own,
        allow_few_tokens=True,
    )


def server(clients: int = 2, privacy: Privacy | None = None, **options: Any) -> Server:
    reference = None if privacy is None else REFERENCE
    recipe = options.pop("recipe", Recipe())
    return Server(families.model(), recipe, clients, privacy=privacy, reference=reference,
                  **options)  # fmt: skip


def hello(of: Server, **changes: Any) -> bytes:
    return messages.write_settings(replace(of.settings, **changes))


def start(client: Client, of: Server) -> None:
    """Introduction and the first block, of two clients that are alike."""
    of.welcome(dict.fromkeys(range(2), client(of.hello()[0])))
    client(of.ask(0)[0])


def test_an_honest_private_run_is_answered_and_paid_for_once(tmp_path: Path) -> None:
    start(guarded(tmp_path), server(privacy=Privacy(4.0)))
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == 1 and '"steps": 2' in lines[0]


ATTACKS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plain sums": ({}, {}, "not protected, it asks for noise"),
    "no noise": ({"privacy": Privacy(4.0)}, {"noise": 0.0}, "not protected"),
    "little noise": ({"privacy": Privacy(4.0)}, {"noise": 0.1}, "multiplier of 0.1 is below 0.3"),
    "a wide clip": ({"privacy": Privacy(4.0)}, {"clip": 1e9}, r"clip of 1e\+09 is outside"),
    "a clip that underflows": ({"privacy": Privacy(4.0)}, {"clip": 1e-170}, "clip of 1e-170"),
    "a sum of few": ({"privacy": Privacy(4.0)}, {"clients": 1}, "1 clients are fewer than 2"),
    "votes that get no noise": (
        {"aggregate": "votes"},
        {"noise": 100.0, "clip": 1.0},
        "not protected, it asks for noise",
    ),
    "Gram matrices that get no noise": (
        {"recipe": Recipe(update="lsq")},
        {"noise": 100.0, "clip": 1.0},
        "not protected, it asks for noise",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_breaks_the_default_policy_is_refused(attack: str, tmp_path: Path) -> None:
    options, changes, sentence = ATTACKS[attack]
    with pytest.raises(SympruneError, match=sentence):
        guarded(tmp_path)(hello(server(**options), **changes))


@pytest.mark.parametrize("how", ["votes", "grams"])
def test_a_client_that_insists_on_noise_sends_nothing_that_gets_none(how: str) -> None:
    """Told of much noise, it would otherwise send ballots or Gram matrices as they are."""
    of = server(aggregate="votes") if how == "votes" else server(recipe=Recipe(update="lsq"))
    client = Client(families.model(), families.tokens(4, 12), Privacy(4.0))
    with pytest.raises(SympruneError, match="which neither ballots nor Gram matrices are given"):
        client(hello(of, noise=1e3, clip=1.0))


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"jobs": ("training",)}, "no pruning is allowed"),
        ({"algorithms": ("votes",)}, "statistics is not among"),
        ({"least_samples": 5}, "4 samples are fewer than 5"),
        ({"least_clients": 3}, "2 clients are fewer than 3"),
        ({"protection": "secure-sum"}, "not protected, it asks for secure-sum"),
    ],
)
def test_what_breaks_a_line_of_the_policy_is_refused(
    entries: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(SympruneError, match=sentence):
        guarded(tmp_path, **entries)(hello(server()))


def test_a_budget_is_not_renewed_by_another_folder_or_run(tmp_path: Path) -> None:
    start(guarded(tmp_path, "a", epsilon=4.0), server(privacy=Privacy(3.9)))
    with pytest.raises(SympruneError, match="budget is spent: pruning would bring epsilon to"):
        start(guarded(tmp_path, "b", epsilon=4.0), server(privacy=Privacy(3.9)))


def test_a_masked_sum_of_fewer_clients_than_the_owner_asks_for_is_refused(tmp_path: Path) -> None:
    guard = Guard(Policy(protection="secure-sum", least_clients=3), "my text")
    with pytest.raises(SympruneError, match="2 clients are fewer than 3"):
        guard.cohort(2)
    guard.cohort(3)


def test_the_digest_is_of_parameters_configuration_and_tokenizer(tiny_folder: Path) -> None:
    from symprune.checkpoint.load import load_with_tokenizer

    model, tokenizer = load_with_tokenizer(str(tiny_folder), device="cpu")
    words = messages.tokenizer_digest(tokenizer)
    known = bytes(messages.digest(model, {}, words).tolist()).hex()
    check_digest(known, messages.digest(model, {}, words))
    model.config.rms_norm_eps = 0.5
    with pytest.raises(SympruneError, match="model, configuration and tokenizer"):
        check_digest(known, messages.digest(model, {}, words))
    model.config.rms_norm_eps = 1e-6
    tokenizer.add_tokens(["another word"])
    with pytest.raises(SympruneError, match="digest"):
        check_digest(known, messages.digest(model, {}, messages.tokenizer_digest(tokenizer)))


def test_a_deployed_client_takes_the_policys_text_and_model_and_no_others(
    tiny_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("the lambda expression returns a function object " * 60)
    own = {"model": str(tiny_folder), "text": "wikitext2", "nsamples": 3, "seqlen": 32}
    Policy(protection="plain", data=str(text), model_digest="00").save(tmp_path / "policy.yaml")
    node = Node(0, tmp_path / "client", {**own, "policy": str(tmp_path / "policy.yaml")})
    with pytest.raises(SympruneError, match=r"have the digest .*, not 00"):
        remote.answer(messages.write_settings(server().settings), node)


def test_a_deployed_client_without_a_policy_sends_no_plain_sums_of_its_files(
    tiny_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("the lambda expression returns a function object " * 60)
    own = {"model": str(tiny_folder), "text": str(text), "nsamples": 3, "seqlen": 32}
    with pytest.raises(SympruneError, match="not protected, it asks for noise"):
        remote.answer(messages.write_settings(server().settings), Node(0, tmp_path / "c", own))


def test_claimed_drop_outs_do_not_make_a_sum_smaller_than_the_policy_allows(
    tmp_path: Path,
) -> None:
    """Two thirds are enough for the protocol, but not for these owners."""
    owners = {"protection": "secure-sum", "least_clients": 3}
    clients = [guarded(tmp_path, str(number), **owners) for number in range(3)]
    of = server(3, secure=True)
    of.welcome({n: clients[n](data) for n, data in of.hello().items()})
    of.take(0, {n: clients[n](data) for n, data in of.ask(0).items()})
    masked = {n: clients[n](data) for n, data in of.ask(0).items()}
    del masked[2]
    of.take(0, masked)
    with pytest.raises(SympruneError, match="2 clients are fewer than 3"):
        clients[0](of.ask(0)[0])


def test_a_run_of_more_clients_than_there_can_be_is_refused_before_it_has_begun(
    tmp_path: Path,
) -> None:
    """A client would make room for so many cards in the next message, whatever its length."""
    client, of = guarded(tmp_path, protection="secure-sum"), server(3, secure=True)
    with pytest.raises(SympruneError, match="1 to 16,384 clients"):
        client(hello(of, clients=100_000_000))
    with pytest.raises(SympruneError, match="was not told of"):
        client(messages.write(messages.head(messages.SHARE, 100_000_000)))
