"""Clients that prune alone: what a server makes of their votes and of their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from parties import central, run, same, shares
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed import pruning
from symprune.fed.pruning import Client, Server
from symprune.fed.pruning.aggregate import ballots
from symprune.fed.wire.payload import decode_message, encode_message
from symprune.models.layout import find_layout
from symprune.models.matrices import Matrix
from symprune.recipe import Recipe
from symprune.update.least_squares import LeastSquares, least_squares

WANDA = Recipe(method="wanda")
LSQ = Recipe(method="wanda", update="lsq")


def inputs_of(model: Any, matrices: list[Matrix], tokens: Tensor) -> dict[str, Tensor]:
    """What goes into each linear layer, `[tokens, channels]`, by hooks on the layers themselves."""
    seen: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    hooks = []
    for name in (matrix.name for matrix in matrices):

        def keep(_: nn.Module, given: Any, name: str = name) -> None:
            seen[name] = given[0].detach().flatten(0, -2)

        hooks.append(modules[name.removesuffix(".weight")].register_forward_pre_hook(keep))
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def most_wanted(votes: Tensor, size: Tensor | None) -> Tensor:
    """Half of every row: the most votes, then the larger size, then the higher index."""
    keep = torch.zeros(votes.shape, dtype=torch.bool)
    for row in range(votes.shape[0]):
        order = sorted(
            range(votes.shape[1]),
            key=lambda c, r=row: (int(votes[r, c]), 0.0 if size is None else float(size[r, c]), c),
        )
        keep[row, order[votes.shape[1] // 2 :]] = True
    return keep


def by_hand(aggregate: str, recipe: Recipe) -> Any:
    """The layers one block after the other, with nothing of federated pruning in it."""
    model = families.model()
    for block in range(2):
        matrices = find_layout(model).matrices(block)
        seen = [inputs_of(model, matrices, part) for part in shares()]
        for matrix in matrices:
            votes, summed = torch.zeros(matrix.weight.shape), torch.zeros(matrix.weight.shape)
            for inputs in seen:
                x = inputs[matrix.name]
                score = matrix.weight.abs() * x.square().sum(0).sqrt()
                rank = score.argsort(dim=1, stable=True).argsort(dim=1)
                keep = rank >= matrix.weight.shape[1] // 2
                weight = matrix.weight * keep
                if recipe.update is not None:
                    shrink = LeastSquares().shrink * x.shape[1] / x.shape[0]
                    weight = least_squares(matrix.weight, keep, x.T @ x, shrink=shrink)
                votes, summed = votes + keep, summed + weight
            mean = summed / votes.clamp(min=1)
            keep = most_wanted(votes, mean.abs() if aggregate == "average" else None)
            matrix.weight.copy_(mean * keep if recipe.update is not None else matrix.weight * keep)
    return model


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    ("aggregate", "recipe"), [("votes", WANDA), ("average", WANDA), ("average", LSQ)]
)
def test_what_most_clients_kept_stays(aggregate: str, recipe: Recipe, secure: bool) -> None:
    model, result = run(recipe, aggregate=aggregate, secure=secure)
    expected = by_hand(aggregate, recipe)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    for found, wanted in pairs:
        assert torch.equal(found != 0, wanted != 0)
        # A weight is fitted to a relative residual of 1e-3; Gram matrices agree to fp32.
        assert torch.allclose(found, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())
    assert result.report.sparsity == 0.5 and result.aggregate == aggregate


def test_one_client_alone_decides_alone() -> None:
    sparsegpt = {"name": "sparsegpt", "block": 20}  # its blocks end inside a row
    for recipe in (
        WANDA,
        LSQ,
        Recipe(pattern="2:4", refine="swap"),
        Recipe(sparsity=0.3, update=sparsegpt),
    ):
        model = families.model()
        pruning.prune(model, shares()[1:2], recipe, aggregate="average")
        assert same(model, central(recipe, shares()[1]))


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(method="ria", pattern="2:4", refine="dsnot"),
        Recipe(method="symwanda", sparsity=0.3, group="layer"),
        Recipe(method="magnitude", sparsity=0.7),
    ],
)
def test_votes_keep_as_many_as_the_recipe_says(recipe: Recipe) -> None:
    _, result = run(recipe, aggregate="votes")
    expected = central(recipe, torch.cat(shares()))
    for name, keep in result.report.masks.items():
        zeros = int((expected.get_parameter(name) == 0).sum())
        assert keep.numel() - int(keep.sum()) == zeros
        if recipe.pattern is not None:
            assert (keep.view(-1, 4).sum(1) == 2).all()


def test_an_expert_is_voted_on_by_those_who_saw_it() -> None:
    """And stays as it is where nobody did."""
    recipe = Recipe(method="wanda")
    model, dense = families.model("qwen3-moe"), families.model("qwen3-moe")
    few = [torch.tensor([[7]]), torch.tensor([[7], [9]])]
    result = pruning.prune(model, few, recipe, aggregate="votes")
    unseen = [layer for layer in result.report.layers if layer.dense]
    assert unseen and all(layer.removed == 0 and layer.tokens == 0 for layer in unseen)
    seen = [layer for layer in result.report.layers if not layer.dense]
    assert all(layer.sparsity == 0.5 and layer.tokens > 0 for layer in seen)
    assert not same(model, dense)


def test_a_mask_that_keeps_too_much_is_named_and_does_not_count() -> None:
    def greedy(client: int, message: int, reply: bytes) -> bytes:
        if client != 1 or message != 1:
            return reply
        fields = decode_message(reply)
        return encode_message({**fields, "mask0": torch.ones_like(fields["mask0"])})

    _, result = run(WANDA, greedy, aggregate="votes")
    assert result.clients_left == [0, 2]
    assert "It keeps 1024 weights of" in result.report.notes[0]


def test_false_votes_behind_masks_stop_the_run() -> None:
    def false(client: int, message: int, reply: bytes) -> bytes:
        if client != 1 or message != 2:
            return reply
        fields = decode_message(reply)
        return encode_message({**fields, "mask0": fields["mask0"] + 50})

    with pytest.raises(SympruneError, match="secure sum is not one"):
        run(WANDA, false, aggregate="votes", secure=True)


class Killed(Exception):
    """Stands for the server's end."""


@pytest.mark.parametrize("secure", [False, True])
def test_a_vote_goes_on_after_the_servers_end(tmp_path: Path, secure: bool) -> None:
    def attempt(folder: Path, lives: int) -> nn.Module:
        model, sent = families.model(), 0

        def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
            nonlocal sent
            clients = {
                n: Client(
                    families.model(), shares()[n], folder=folder / str(n), allow_few_tokens=True
                )
                for n in outgoing
            }
            replies = {n: clients[n](data) for n, data in outgoing.items()}
            if sent == lives:
                raise Killed
            sent += 1
            return replies

        server = Server(model, LSQ, 3, secure, aggregate="average")
        pruning.run(server, send, checkpoint=folder / "run.safetensors")
        return model

    with pytest.raises(Killed):
        attempt(tmp_path / "one", 2)
    assert same(attempt(tmp_path / "one", 99), attempt(tmp_path / "other", 99))


def test_masked_weights_come_back_as_they_were() -> None:
    dense = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    parts = [dense * factor for factor in (1.0, -0.3, 2.5)]
    whole = [ballots.to_whole(part, dense, 3) for part in parts]
    summed = ballots.from_whole(sum(whole[1:], whole[0]), dense)
    exact = sum((part.double() for part in parts[1:]), parts[0].double())
    unit = 2.0 ** (math.frexp(float(dense.abs().max()))[1] - 45)
    assert (summed - exact).abs().max() <= 1.5 * unit
    with pytest.raises(SympruneError, match="too large for masked summation"):
        ballots.to_whole(dense * 2.0**20, dense, 3)
