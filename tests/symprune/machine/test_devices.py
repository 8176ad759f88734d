"""What runs on the CPU runs on an accelerator and ends at the same figures. There is none here:
`pretend_device` stands in for one. Its numbers are the CPU's, so only what is summed in another
order may differ, and by no more than roundings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from pretend_device import DEVICE, OnDevice, PretendDevice
from transformers import AutoModelForCausalLM

import symprune
from symprune import MaskSet, Recipe, criteria, fed
from symprune.checkpoint import packed
from symprune.eval.perplexity import perplexity
from symprune.jobs import pruning

FAMILIES = ("llama", "gpt2", "mixtral")
ROUNDING = {"rtol": 1e-4, "atol": 1e-6}
DSNOT: dict[str, Any] = {"name": "dsnot", "layers": "all", "max_cycles": 4, "update_threshold": 0}
SWAP = {"name": "swap", "max_swaps": 8}
LSQ = {"name": "lsq", "iters": 6}
STEPS: dict[str, dict[str, Any]] = {
    "by layer": {"group": "layer"},
    "2:4": {"pattern": "2:4"},
    "dsnot": {"refine": DSNOT},
    "dsnot 2:4": {"refine": DSNOT, "pattern": "2:4"},
    "r2-dsnot": {"refine": {**DSNOT, "name": "r2-dsnot"}},
    "r2-dsnot 2:4": {"refine": {**DSNOT, "name": "r2-dsnot"}, "pattern": "2:4"},
    "swap": {"refine": SWAP},
    "swap 2:4": {"refine": SWAP, "pattern": "2:4"},
    "lsq": {"update": LSQ},
    "swap and lsq": {"refine": SWAP, "update": LSQ},
    "rounds": {"update": {**LSQ, "rounds": 2}},
    "rounds 2:4": {"update": {**LSQ, "rounds": 2}, "pattern": "2:4"},
    "sparsegpt": {"update": "sparsegpt"},
    "sparsegpt 2:4": {"update": "sparsegpt", "pattern": "2:4"},
    "sparsegpt under a mask": {"update": {"name": "sparsegpt", "select": False}},
    "admm": {"update": {"name": "admm", "iters": 5, "steps": 3}},
    "admm 2:4": {"update": {"name": "admm", "iters": 5, "steps": 3}, "pattern": "2:4"},
    "admm under a mask": {"update": {"name": "admm", "select": False}},
    "alps": {"update": {"name": "alps", "search_iters": 9}},
    "values": {"values": "int4"},
    "rounds and values": {"update": {**LSQ, "rounds": 2}, "values": "int3"},
    "values 2:4 by gptq": {"values": {"name": "int2", "solve": "gptq"}, "pattern": "2:4"},
    "values alone": {"values": "int8", "sparsity": 0, "values_head": "int8"},
    "owl": {"allocate": "owl"},
    "error": {"allocate": "error"},
    "lsa": {"allocate": "lsa"},
    "atp": {"allocate": "atp"},
    "search": {"allocate": {"name": "search", "windows": 2}},
    "token limit": {"token_limit": 2.0},
}
FROM_MASKS = (
    "dsnot", "r2-dsnot 2:4", "swap", "swap 2:4", "lsq", "sparsegpt under a mask",
    "admm under a mask",
)  # fmt: skip
pytestmark = pytest.mark.parametrize("family", FAMILIES)


def small(family: str, blocks: int = 1) -> Any:
    config = families.config(family)
    config.num_hidden_layers = blocks
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def assert_same(found: Any, expected: Any) -> None:
    """Two models' weights: one on the device, one on the CPU."""
    weights = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        assert isinstance(parameter, OnDevice), name
        torch.testing.assert_close(parameter.inner, weights[name].data, **ROUNDING)


def assert_same_masks(found: MaskSet, expected: MaskSet) -> None:
    assert list(found) == list(expected) != []
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def assert_same_on_the_device(family: str, recipe: Recipe, **options: Any) -> None:
    """Pruning a model there ends where pruning it on the CPU ends."""
    tokens, model = families.tokens(3, 8), small(family)
    if "regional_gradient" in recipe.criterion.needs:
        model.set_attn_implementation("eager")  # no gradient passes the fused one there
    with PretendDevice() as device:
        copy = device.take(model)
        found = symprune.prune(copy, tokens, recipe, **options)
    expected = symprune.prune(model, tokens, recipe, **options)
    assert_same(copy, model)
    assert_same_masks(found.masks, expected.masks)
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        assert replace(mine, figures={}) == replace(theirs, figures={})
        assert mine.figures == pytest.approx(theirs.figures, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("method", list(criteria.available()))
def test_every_method_prunes_what_it_prunes_on_the_cpu(method: str, family: str) -> None:
    assert_same_on_the_device(family, Recipe(method=method))


@pytest.mark.parametrize("step", list(STEPS))
def test_every_step_does_what_it_does_on_the_cpu(step: str, family: str) -> None:
    assert_same_on_the_device(family, Recipe(method="wanda", **STEPS[step]))


@pytest.mark.parametrize("gram_device", ["auto", "cpu", "disk"])
def test_gram_matrices_may_be_kept_elsewhere(gram_device: str, family: str) -> None:
    recipe = Recipe(method="wanda", refine=SWAP, update=LSQ)
    options: dict[str, Any] = {"held_out": families.tokens(2, 8, seed=1), "report_error": True}
    assert_same_on_the_device(family, recipe, gram_device=gram_device, **options)


@pytest.mark.parametrize("step", FROM_MASKS)
def test_masks_from_a_file_are_refined(step: str, family: str, tmp_path: Path) -> None:
    made = Recipe(method="magnitude", pattern=STEPS[step].get("pattern"))
    symprune.prune(small(family), families.tokens(), made).masks.save(tmp_path)
    recipe = Recipe(method="magnitude", **STEPS[step])
    base = MaskSet.load(tmp_path)
    assert_same_on_the_device(family, recipe, base=base, report_error=True)


def test_perplexity_is_that_on_the_cpu(family: str) -> None:
    model, ids = small(family), families.tokens(1, 64)[0]
    with PretendDevice() as device:
        found = perplexity(device.take(model), ids, 16)
    assert found.nll == pytest.approx(perplexity(model, ids, 16).nll, rel=1e-5)


def test_masks_are_applied_to_a_model_on_the_device(family: str) -> None:
    masks = symprune.prune(small(family), families.tokens(), Recipe(method="magnitude")).masks
    model = small(family)
    with PretendDevice() as device:
        copy = device.take(model)
        masks.apply(copy)
        assert_same_masks(MaskSet.of(copy), masks)
    masks.apply(model)
    assert_same(copy, model)


def test_a_packed_model_is_unpacked_to_the_device(family: str, tmp_path: Path) -> None:
    model = small(family)
    symprune.prune(model, families.tokens(), Recipe(method="wanda", pattern="2:4"))
    model.save_pretrained(tmp_path / "pruned")
    packed.pack(tmp_path / "pruned", tmp_path / "packed")
    with PretendDevice():
        loaded = symprune.load(tmp_path / "packed", device=str(DEVICE), dequantize=True)
    assert_same(loaded, model)


@pytest.mark.parametrize("gram_device", ["auto", "disk"])
def test_a_streamed_model_is_pruned_into_the_same_files(
    gram_device: str, family: str, tmp_path: Path
) -> None:
    small(family, blocks=2).save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    recipe = Recipe(method="ria", refine=SWAP, calibration=__file__, nsamples=2, seqlen=16)

    def prune(device: str, folder: str) -> dict[str, Any]:
        job = pruning.Job(str(tmp_path / "dense"), recipe, tmp_path / folder, device=device)
        job = replace(job, eval_data=__file__, eval_windows=2, gram_device=gram_device)
        return pruning.prune(replace(job, report_error=True))

    with PretendDevice():
        found = prune(str(DEVICE), "found")
    expected = prune("cpu", "expected")
    for name in ("model.safetensors", "masks.safetensors"):
        assert (tmp_path / "found" / name).read_bytes() == (
            tmp_path / "expected" / name
        ).read_bytes()
    for mine, theirs in zip(found["perplexity"], expected["perplexity"], strict=True):
        assert mine["pruned"] == pytest.approx(theirs["pruned"], rel=1e-5)


@pytest.mark.parametrize("way", ["plain", "secure", "private", "grams", "votes", "average"])
def test_federated_pruning_decides_what_it_decides_on_the_cpu(way: str, family: str) -> None:
    options: dict[str, Any] = {"secure": way in ("secure", "average"), "noise_seed": 0}
    if way == "private":
        options |= {"privacy": fed.Privacy(8.0), "reference": families.tokens(2, 8, seed=2)}
    recipe = Recipe(method="symwanda", refine=DSNOT)
    if way in ("grams", "average"):
        recipe = Recipe(method="wanda", update="lsq")
    if way in ("votes", "average"):
        options["aggregate"] = way
    clients, model = list(families.tokens(4, 8).split(2)), small(family, blocks=2)
    with PretendDevice() as device:
        copy = device.take(model)
        found = fed.prune(copy, clients, recipe, **options)
    expected = fed.prune(model, clients, recipe, **options)
    assert_same(copy, model)
    assert_same_masks(found.report.masks, expected.report.masks)
