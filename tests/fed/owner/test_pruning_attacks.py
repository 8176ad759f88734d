"""A server that asks a pruning client for more than its owner allows: refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest

from symprune.errors import SympruneError
from symprune.fed.owner.guard import Guard, guard_of_text
from symprune.fed.owner.policy import Policy
from symprune.fed.privacy import Release
from symprune.fed.problems.models.fingerprint import digest, tokenizer_digest
from symprune.fed.pruning import Client, Privacy, Server, messages, remote
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
        ({"least_samples": 5}, "its samples are fewer than 5"),
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
    words = tokenizer_digest(tokenizer)
    policy = Policy(model_digest=bytes(digest(model, {}, words).tolist()).hex())
    policy.check_model(digest(model, {}, words))
    model.config.rms_norm_eps = 0.5
    with pytest.raises(SympruneError, match="model, configuration and tokenizer"):
        policy.check_model(digest(model, {}, words))
    model.config.rms_norm_eps = 1e-6
    tokenizer.add_tokens(["another word"])
    with pytest.raises(SympruneError, match="digest"):
        policy.check_model(digest(model, {}, tokenizer_digest(tokenizer)))


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


PRIVATE_TEXTS = ("{a}", "{a} + {b}", "{a}*0.7 + builtin*0.3", "{j}:answer", "hf:me/notes")


@pytest.mark.parametrize("text", PRIVATE_TEXTS)
@pytest.mark.parametrize("named", [True, False])
def test_a_text_is_its_owners_however_it_is_written(
    text: str, named: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    """A mixture, a column or a data set of the hub is no file's name, and private all the same."""
    for name in ("a.txt", "b.txt", "j.jsonl"):
        (tmp_path / name).write_text("{}")
    Policy(least_clients=2).save(tmp_path / "policy.yaml")
    text = text.format(**{name[0]: tmp_path / name for name in ("a.txt", "b.txt", "j.jsonl")})
    own = {"model": str(tiny_folder), "text": text}
    own |= {"policy": str(tmp_path / "policy.yaml")} if named else {}
    guard = guard_of_text(own, text)
    assert guard.data == text and not guard.public
    with pytest.raises(SympruneError, match="not protected, it asks for noise"):
        guard.sums(False, 0.0, 0.0)


def test_a_mixture_of_private_files_is_not_answered_plainly(
    tiny_folder: Path, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text("the lambda expression returns a function object " * 60)
    own = {"model": str(tiny_folder), "text": f"{files[0]} + {files[1]}", "nsamples": 4}
    own |= {"seqlen": 32, "allow_few_tokens": True}
    with pytest.raises(SympruneError, match="not protected, it asks for noise"):
        remote.answer(messages.write_settings(server().settings), Node(0, tmp_path / "c", own))


def test_a_policy_holds_for_published_text_too_and_no_budget_is_spent_on_it(
    tmp_path: Path,
) -> None:
    Policy(epsilon=1.0).save(tmp_path / "policy.yaml")
    guard = guard_of_text({"policy": str(tmp_path / "policy.yaml")}, "builtin + wikitext2")
    with pytest.raises(SympruneError, match="it asks for noise"):
        guard.sums(True, 0.0, 0.0)
    guard.spend(Release(1.0, 0.01), "pruning", "a")
    assert not Policy().ledger_file.exists()
    assert guard_of_text({}, "builtin").data is None


def test_who_is_killed_between_spending_and_answering_has_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered is never more than what the ledger has."""

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    of, client = server(privacy=Privacy(3.9)), guarded(tmp_path, epsilon=4.0)
    of.welcome(dict.fromkeys(range(2), client(of.hello()[0])))
    asked = of.ask(0)[0]
    with monkeypatch.context() as patched:
        patched.setattr(Client, "_answer", die)
        with pytest.raises(Killed):
            client(asked)
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 1
    again = guarded(tmp_path, epsilon=4.0)
    with pytest.raises(SympruneError, match="budget is spent"):
        again(asked)


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
