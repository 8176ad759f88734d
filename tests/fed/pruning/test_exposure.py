"""What plain sums give away: the attack finds a short text's words, and a client refuses it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import families
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from symprune import calibration
from symprune.errors import SympruneError
from symprune.fed import pruning
from symprune.fed.pruning import Client, Privacy, Server, exposure, messages
from symprune.fed.wire.payload import decode_message
from symprune.recipe import Recipe

VOCABULARY = 2000
WIDTH = 64


@pytest.fixture(scope="module")
def attack() -> ModuleType:
    """The script, as it is shipped."""
    file = Path(__file__).parents[3] / "scripts" / "fed" / "attack_tokens.py"
    spec = importlib.util.spec_from_file_location("attack_tokens", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    small = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, **small)
    return LlamaForCausalLM(config).eval()


def words(samples: int, length: int) -> torch.Tensor:
    """Words as often as in a language: the k-th with probability 1/k."""
    chance = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))
    drawn = torch.Generator().manual_seed(1)
    picked = torch.multinomial(chance, samples * length, replacement=True, generator=drawn)
    return order[picked].view(samples, length)


def test_the_words_of_a_short_text_fall_out_of_what_its_owner_sends(
    attack: ModuleType, model: LlamaForCausalLM
) -> None:
    tokens = words(2, 4)
    counts = torch.bincount(tokens.flatten(), minlength=VOCABULARY)
    inputs = attack.first_inputs(model, VOCABULARY)
    assert torch.equal(attack.attack(inputs, attack.sent_sums(model, tokens)), counts)


def test_with_as_many_tokens_as_a_client_insists_on_the_attack_is_no_better_than_a_guess(
    attack: ModuleType, model: LlamaForCausalLM
) -> None:
    tokens = words(exposure.TOKENS_PER_NUMBER, WIDTH)
    counts = torch.bincount(tokens.flatten(), minlength=VOCABULARY)
    inputs = attack.first_inputs(model, VOCABULARY)
    found = attack.attack(inputs, attack.sent_sums(model, tokens))
    public = torch.bincount(words(500, 100)[50:].flatten(), minlength=VOCABULARY)
    guessed = attack.Recovered.compare(counts, attack.guess(public, tokens.numel()))
    assert attack.Recovered.compare(counts, found).words_found < guessed.words_found
    assert attack.Recovered.compare(counts, found).words_found < 0.25


def test_a_gram_matrix_tells_every_count_however_long_the_text_is(
    attack: ModuleType, model: LlamaForCausalLM
) -> None:
    """It has more numbers than there are words."""
    tokens = words(50, 40)
    counts = torch.bincount(tokens.flatten(), minlength=VOCABULARY)
    inputs = attack.first_inputs(model, VOCABULARY).double()
    gram = (inputs * counts.unsqueeze(1)).T @ inputs
    row, column = torch.triu_indices(WIDTH, WIDTH)
    assert len(row) > VOCABULARY
    every = inputs[:, row] * inputs[:, column]
    found = torch.linalg.lstsq(every.T, gram[row, column].unsqueeze(1)).solution.squeeze(1)
    assert torch.equal(found.round().long(), counts)


def test_a_client_refuses_plain_sums_of_few_tokens_unless_its_owner_allows_them() -> None:
    model, tokens = families.model(), families.tokens(3, 10)
    hello = Server(model, Recipe(), 1).hello()[0]
    with pytest.raises(
        SympruneError, match=r"21 tokens at different places, too few .* 1,024 tokens, 32 of"
    ):
        Client(model, tokens)(hello)
    assert Client(model, tokens, allow_few_tokens=True)(hello)
    assert Client(model, families.tokens(40, 32))(hello)


SHORT: dict[str, tuple[int, int, str]] = {  # tokens of the text, of a window, and what is said
    "nine tokens, drawn over and over": (9, 4, "5 tokens at different places"),
    "twenty in long windows": (20, 12, "16 tokens at different places"),
}


@pytest.mark.parametrize("text", SHORT)
def test_a_short_text_is_short_however_often_it_is_drawn(
    text: str, model: LlamaForCausalLM
) -> None:
    """Windows overlap: what was drawn says nothing of how much there is."""
    length, window, sentence = SHORT[text]
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(3))
    count = 2 * exposure.TOKENS_PER_NUMBER * WIDTH // window
    tokens = calibration.windows(ids, count, window, 0)
    with pytest.raises(SympruneError, match=sentence):
        Client(model, tokens)(Server(model, Recipe(), 1).hello()[0])


def test_a_long_text_of_few_words_gives_them_away_and_is_refused(
    attack: ModuleType, model: LlamaForCausalLM
) -> None:
    drawn = torch.Generator().manual_seed(3)
    few = torch.randint(0, VOCABULARY, (8,), generator=drawn)
    tokens = few[torch.randint(0, 8, (80, WIDTH), generator=drawn)]
    counts = torch.bincount(tokens.flatten(), minlength=VOCABULARY)
    found = attack.attack(attack.first_inputs(model, VOCABULARY), attack.sent_sums(model, tokens))
    assert attack.Recovered.compare(counts, found).words_found == 1
    assert exposure.Text.of(tokens).places > exposure.TOKENS_PER_NUMBER * WIDTH
    with pytest.raises(SympruneError, match="8 different tokens, too few"):
        Client(model, tokens)(Server(model, Recipe(), 1).hello()[0])


def test_places_are_never_more_than_the_text_has() -> None:
    ids = families.tokens(1, 300).flatten()
    for window in (1, 2, 3, 7, 40):
        tokens = calibration.windows(ids, 200, window, 0)
        assert exposure.Text.of(tokens).places <= 300


def test_a_client_takes_no_weights_that_no_step_of_a_recipe_makes() -> None:
    """A server that sends weights of its own gets other equations from every block."""
    server = Server(families.model(), Recipe(), 2, secure=True)
    hello = messages.write_settings(replace(server.settings, weights=True))
    with pytest.raises(SympruneError, match="takes no weights from a server"):
        Client(families.model(), families.tokens(3, 10), secure=True)(hello)


@pytest.mark.parametrize("how", ["secure", "noise", "votes", "no data"])
def test_what_hides_the_sums_needs_no_allowance(how: str) -> None:
    model, tokens = families.model(), families.tokens(3, 10)
    private = {"privacy": Privacy(1.0), "reference": families.tokens(2, 10)}
    options = {"secure": {"secure": True}, "noise": private, "votes": {"aggregate": "votes"}}
    recipe = Recipe(method="magnitude" if how == "no data" else "wanda")
    server = Server(model, recipe, 2, **options.get(how, {}))
    assert Client(model, tokens)(server.hello()[0])


def test_more_numbers_of_the_first_block_ask_for_more_tokens() -> None:
    model = families.model()
    matrices = Server(model, Recipe(), 1).layout.matrices(0)
    least = {
        method: exposure.least_tokens(Server(model, Recipe(method=method), 1).settings, matrices)
        for method in ("wanda", "symwanda")
    }
    assert least["symwanda"] > least["wanda"] == exposure.TOKENS_PER_NUMBER * 32


def test_a_plain_run_says_what_it_risks_and_a_secure_one_has_nothing_to_say() -> None:
    parts = list(families.tokens(4, 10).split(2))
    for secure in (False, True):
        told: list[str] = []
        result = pruning.prune(families.model(), parts, Recipe(), secure, tell=told.append)
        assert any("tell which words a short text has" in line for line in told) is not secure
        assert ("risk" in result.to_dict()["federated"]) is not secure


def test_the_sums_are_those_that_cross_the_wire(
    attack: ModuleType, model: LlamaForCausalLM
) -> None:
    tokens = words(1, 8)
    client = Client(model, tokens, allow_few_tokens=True)
    server = Server(model, Recipe(), 1)
    server.welcome({0: client(server.hello()[0])})
    sent = decode_message(client(server.ask(0)[0]))["values"]
    assert torch.equal(sent[:WIDTH], attack.sent_sums(model, tokens))
