"""Whole experts dropped: by a score checked against plain loops, with what is left as the dense
model whose router may not pick the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from symprune import Recipe
from symprune.engine import forward, walk
from symprune.engine.experts.drop import drop_experts
from symprune.engine.experts.mixtures import find_mixtures, plan_drop
from symprune.errors import SympruneError
from symprune.experts import Drop, choose_kept
from symprune.fed.pruning.refusals import check_recipe
from tests.support import families

FAMILIES = ("mixtral", "qwen3-moe", "olmoe", "deepseek-v3", "gpt-oss")
QUARTER = Drop(0.25)


def lively(family: str, **changes: Any) -> Any:
    """A model whose routers and experts' outputs are far from alike."""
    if not changes:
        model = families.model(family)
    else:
        config = families.config(family)
        for name, value in changes.items():
            setattr(config, name, value)
        torch.manual_seed(0)
        model = type(families.model(family))(config).eval()
    generator = torch.Generator().manual_seed(7)
    for mixture in find_mixtures(model, changes.get("n_routed_experts", 4)):
        for parameter in mixture.router.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        for parameter in mixture.experts.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in mixture.router.named_buffers():
            assert name == "e_score_correction_bias"
            buffer.copy_(0.2 * torch.rand(buffer.shape, generator=generator))
    return model


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with forward.ready(model):
        found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


@contextmanager
def masked(model: Any, layers: list[dict[str, Any]], top_k: int) -> Iterator[None]:
    """The dense model, where the routers' logits of the dropped experts say that they never go."""
    linear = torch.nn.functional.linear
    routers = {mixture.name: mixture.router for mixture in find_mixtures(model, 4)}

    def masking(router: Any, dropped: list[int]) -> Any:
        route = router.forward

        def run(hidden: torch.Tensor) -> Any:
            def without(*args: Any) -> torch.Tensor:
                return linear(*args).index_fill(-1, torch.tensor(dropped), -torch.inf)

            torch.nn.functional.linear = without
            try:
                return route(hidden)
            finally:
                torch.nn.functional.linear = linear

        return run

    for layer in layers:
        router = routers[layer["name"]]
        router.top_k = top_k
        for _, bias in router.named_buffers():  # added to what the logits become
            bias[layer["dropped"]] = -torch.inf
        router.forward = masking(router, layer["dropped"])
    yield


@pytest.mark.parametrize("share", [0.25, 0.75])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_is_the_dense_model_without_the_dropped_experts_logits(
    family: str, share: float
) -> None:
    if family == "deepseek-v3" and share == 0.75:
        share = 0.5  # its router looks at two experts of a group at least
    tokens = families.tokens()
    dense, fewer = lively(family), lively(family)
    found, notes = drop_experts(fewer, tokens, Drop(share))
    left = round(4 * (1 - share))
    assert found["left"] == left and notes[0].startswith(f"{4 - left} of the 4 experts")
    assert ("instead of 2" in " ".join(notes)) == (left < 2)
    with masked(dense, found["layers"], min(2, left)):
        expected = logits(dense, tokens)
    torch.testing.assert_close(logits(fewer, tokens), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, logits(lively(family), tokens), atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_experts_score_is_the_mean_of_gate_times_norm_over_its_tokens(family: str) -> None:
    model, tokens = lively(family), families.tokens(2)
    seen: dict[str, list[Any]] = {}
    mixtures = find_mixtures(model, 4)
    for mixture in mixtures:
        keep = seen.setdefault(mixture.name, [])
        mixture.experts.register_forward_pre_hook(lambda _, args, keep=keep: keep.append(args))
    logits(model, tokens)
    found, _ = drop_experts(lively(family), tokens, QUARTER)
    assert [layer["name"] for layer in found["layers"]] == [mixture.name for mixture in mixtures]
    for mixture, layer in zip(mixtures, found["layers"], strict=True):
        said: list[list[float]] = [[] for _ in range(4)]
        for hidden, picked, gates in seen[mixture.name]:
            for state, row, weights in zip(hidden, picked, gates, strict=True):
                for number, gate in zip(row.tolist(), weights, strict=True):
                    output = _by_hand(family, mixture.experts, number, state)
                    said[number].append(float(gate * output.norm()))
        assert layer["tokens"] == [len(each) for each in said]
        means = [sum(each) / len(each) if each else 0.0 for each in said]
        assert layer["scores"] == pytest.approx(means, rel=1e-4)
        assert layer["dropped"] == [means.index(min(means))]


def _by_hand(family: str, experts: Any, number: int, state: torch.Tensor) -> torch.Tensor:
    into, back = experts.gate_up_proj[number], experts.down_proj[number]
    if family != "gpt-oss":
        gate, up = (into @ state).chunk(2)
        return (back @ (torch.nn.functional.silu(gate) * up)).detach()
    both = state @ into + experts.gate_up_proj_bias[number]
    gate, up = both[::2].clamp(max=experts.limit), both[1::2].clamp(-experts.limit, experts.limit)
    inner = (up + 1) * gate * torch.sigmoid(gate * experts.alpha)
    return (inner @ back + experts.down_proj_bias[number]).detach()


def test_every_group_of_a_router_loses_as_many() -> None:
    groups = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}
    model, tokens = lively("deepseek-v3", **groups), families.tokens()
    found, notes = drop_experts(model, tokens, Drop(0.5))
    for layer in found["layers"]:
        assert sorted(number // 4 for number in layer["dropped"]) == [0, 0, 1, 1]
    assert (found["left"], found["top_k"]) == (4, 2)
    assert "given to 2 experts instead of 4" in notes[1]
    assert logits(model, tokens).isfinite().all()


def test_of_equal_scores_the_expert_with_fewer_tokens_goes_then_the_later_one() -> None:
    assert choose_kept([1.0, 1.0, 1.0, 2.0], [5, 4, 5, 1], 1) == [0, 2, 3]
    assert choose_kept([1.0, 1.0, 1.0, 2.0], [5, 4, 5, 1], 2) == [0, 3]
    assert choose_kept([3.0, 4.0, 1.0, 2.0], [1, 1, 1, 1], 2, groups=2) == [1, 3]


def test_a_recipe_drops_experts_before_weights_of_those_that_stay() -> None:
    model, tokens = lively("mixtral"), families.tokens()
    report = walk.prune(model, tokens, Recipe("magnitude", sparsity=0.5, experts="drop:25%"))
    other = lively("mixtral")
    drop_experts(other, tokens, QUARTER)
    alone = walk.prune(other, tokens, Recipe("magnitude", sparsity=0.5))
    assert torch.equal(logits(model, tokens), logits(other, tokens))
    assert report.removed == alone.removed and report.parameters == alone.parameters
    assert report.experts is not None and report.to_dict()["experts"]["left"] == 3
    assert model.config.num_local_experts == 3
    assert "experts drop:25%" in report.recipe.describe()


@pytest.mark.parametrize("family", ["llama", "jetmoe", "dbrx"])
def test_a_structure_that_is_not_known_is_refused(family: str) -> None:
    model = families.model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SympruneError, match=f"structure of {family} is not one of them"):
        walk.prune(model, families.tokens(), Recipe(experts="drop:25%"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        ("drop:0%", "above 0"),
        ("drop:100%", "below 100"),
        ("25%", "drop:P%"),
        (0.25, "drop:P%"),
        ("drop:nan%", "drop:P%"),
    ],
)
def test_a_share_that_is_none_is_refused(experts: Any, says: str) -> None:
    with pytest.raises(SympruneError, match=says):
        Recipe(experts=experts)


def test_too_little_and_too_much_are_refused() -> None:
    with pytest.raises(SympruneError, match="less than one of the 4"):
        plan_drop(families.config("mixtral"), Drop(0.1))
    with pytest.raises(SympruneError, match="leaves 0 of the 4"):
        plan_drop(families.config("mixtral"), Drop(0.9))
    with pytest.raises(SympruneError, match=r"leaves 1 of the 4 .* 2 must be left"):
        plan_drop(families.config("deepseek-v3"), Drop(0.75))


def test_text_that_the_model_writes_and_masks_made_earlier_are_refused() -> None:
    with pytest.raises(SympruneError, match="leave out calibration self"):
        Recipe(experts="drop:25%", calibration="builtin + self")
    with pytest.raises(SympruneError, match="Masks made with --experts"):
        Recipe(experts="drop:25%").check_takes_masks()
    with pytest.raises(SympruneError, match="text in one place says"):
        check_recipe(Recipe(experts="drop:25%"))
