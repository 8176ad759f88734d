"""What a block's statistics are measured on: the dense model, or the pruned blocks before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from pretend_device import DEVICE, PretendDevice

import symprune
from symprune import Recipe, SympruneError, fed
from symprune.checkpoint import resume
from symprune.checkpoint.load import load_model
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.engine import decide, forward, walk
from symprune.engine.collect import collect
from symprune.engine.forward import Activations
from symprune.engine.visit import shared_work
from symprune.jobs import pruning
from symprune.models import hub
from symprune.models.layout import find_layout

LSQ = {"name": "lsq", "rounds": 2, "iters": 4}
TRAINED = {"name": "block", "epochs": 1}
DENSE = Recipe(method="wanda", update=LSQ, inputs="dense")
WAYS = {
    "dense inputs": {"inputs": "dense"},
    "dense inputs, trained on dense ones": {
        "inputs": "dense",
        "reconstruct": {**TRAINED, "inputs": "dense"},
    },
    "dense inputs, trained on pruned ones": {"inputs": "dense", "reconstruct": TRAINED},
}
HELD_OUT = families.tokens(2, seed=9)


class Killed(BaseException):
    """Stands for a process that ends here, without a chance to tidy up."""


def prune(model: Any, recipe: Recipe, **options: Any) -> Any:
    return symprune.prune(model, families.tokens(6), recipe, held_out=HELD_OUT, **options)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def assert_same(model: Any, other: Any) -> None:
    found = weights_of(other)
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, found[name]), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma4"])
def test_with_dense_inputs_every_matrix_becomes_what_the_dense_model_says(family: str) -> None:
    """No block of the second model is ever pruned."""
    report = prune(families.model(family), DENSE)
    dense = families.model(family)
    layout = find_layout(dense)
    with forward.ready(dense):
        activations = forward.embed(layout, families.tokens(6))
        for index, block in enumerate(layout.blocks):
            found, needs = layout.matrices(index), decide.needs(DENSE)
            settings = (activations, index, block, found, needs)
            measured = collect(*settings, take=activations.replace)
            for matrix in found:
                if matrix.name not in measured.inputs:
                    continue
                about = (matrix.name, matrix.part, matrix.weight, measured.inputs[matrix.name])
                keep = decide.decide(*about, None, DENSE).keep
                assert torch.equal(matrix.slice_of(report.masks[matrix.parameter_name]), keep)


def test_the_first_block_does_not_care_and_later_ones_do() -> None:
    one, other = families.model(), families.model()
    pruned = prune(one, DENSE.with_changes(inputs="pruned")).masks
    dense = prune(other, DENSE).masks
    same = {name: torch.equal(pruned[name], dense[name]) for name in dense}
    assert all(equal for name, equal in same.items() if ".layers.0." in name)
    assert not all(equal for name, equal in same.items() if ".layers.1." in name)


@pytest.mark.parametrize(
    ("recipe", "passes"),
    [
        (DENSE, 1), (DENSE.with_changes(inputs="pruned"), 2),
        (DENSE.with_changes(reconstruct={**TRAINED, "inputs": "dense"}), 1),
    ],
    ids=["dense", "pruned", "reconstructed"],
)  # fmt: skip
def test_dense_inputs_take_one_forward_of_a_block_where_pruned_ones_take_two(
    recipe: Recipe, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[int, int] = {}
    run = Activations.run

    def counted(
        self: Activations, index: int, block: Any, samples: range, weights: Any = None
    ) -> Any:
        if weights is None:
            ran[index] = ran.get(index, 0) + len(samples)
        return run(self, index, block, samples, weights)

    monkeypatch.setattr(Activations, "run", counted)
    prune(families.model(), recipe)
    looks = 1  # at the first block, how much memory its Gram matrices take
    assert ran[0] == 8 * passes + looks
    assert ran[len(ran) - 1] == 8


def test_magnitudes_are_the_same_whatever_the_inputs() -> None:
    one, other = families.model(), families.model()
    symprune.prune(one, families.tokens(), Recipe(method="magnitude", inputs="dense"))
    symprune.prune(other, families.tokens(), Recipe(method="magnitude"))
    assert_same(one, other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk, of three blocks, in bfloat16."""
    config = families.config("llama")
    config.num_hidden_layers = 3
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("dense")
    families.hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made)
    families.tokenizer().save_pretrained(made)
    return made


TEXT = {"calibration": __file__, "nsamples": 4, "seqlen": 16}


def job(folder: Path, output: Path, **changes: Any) -> pruning.Job:
    recipe = Recipe(method="wanda", update=LSQ, **TEXT, **changes)
    return pruning.Job(str(folder), recipe, output, evaluate=False, compute_dtype="float32")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("way", list(WAYS))
def test_streamed_weights_are_those_of_a_model_in_memory(
    way: str, folder: Path, tmp_path: Path
) -> None:
    pruning.prune(job(folder, tmp_path / "out", **WAYS[way]))
    written = load_model(hub.resolve(str(tmp_path / "out")))
    model = load_model(hub.resolve(str(folder))).float()
    tokenizer = hub.load_tokenizer(hub.resolve(str(folder)))
    blocks = walk.Blocks(find_layout(model), stored=torch.bfloat16)
    recipe = Recipe(method="wanda", update=LSQ, **TEXT, **WAYS[way])  # type: ignore[arg-type]
    symprune.prune(model, tokenizer, recipe, blocks=blocks)
    assert_same(model.to(torch.bfloat16), written)


@pytest.mark.parametrize("states_kept", [True, False])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_killed_run_goes_on_to_the_same_bytes(
    way: str, states_kept: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruning.prune(job(folder, tmp_path / "whole", **WAYS[way]))
    monkeypatch.setattr(resume.HiddenStates, "due", lambda _: states_kept)
    finish = StreamedBlocks.finish
    for block in (0, 1):
        with monkeypatch.context() as patch:

            def then_die(self: StreamedBlocks, index: int, *rest: Any, last: int = block) -> None:
                finish(self, index, *rest)
                if index == last:
                    raise Killed

            patch.setattr(StreamedBlocks, "finish", then_die)
            with pytest.raises(Killed):
                pruning.prune(job(folder, tmp_path / "out", **WAYS[way]))
    pruning.prune(job(folder, tmp_path / "out", **WAYS[way]))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("way", ["dense inputs"])
def test_a_device_gives_what_main_memory_does(way: str, family: str) -> None:
    recipe = Recipe(method="wanda", update=LSQ, **WAYS[way])  # type: ignore[arg-type]
    model, tokens = families.model(family), families.tokens(2)
    with PretendDevice() as device:
        there = device.take(model)
        symprune.prune(there, tokens.to(DEVICE), recipe, held_out=HELD_OUT[:1], batch_size=1)
        found = {name: p.detach().cpu() for name, p in there.named_parameters()}
    symprune.prune(model, tokens, recipe, held_out=HELD_OUT[:1], batch_size=1)
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6, msg=name)


def test_work_is_divided_so_that_nobody_waits_long() -> None:
    assert shared_work.divide([5, 1, 1, 3, 4], 2) == [0, 1, 0, 1, 1]
    assert shared_work.divide([1, 1, 1], 5) == [0, 1, 2]
    assert shared_work.divide([], 2) == []


def test_what_is_measured_on_is_in_the_recipe_and_its_description(tmp_path: Path) -> None:
    DENSE.save(tmp_path / "recipe.yaml")
    assert Recipe.load(tmp_path / "recipe.yaml") == DENSE
    assert DENSE.describe().endswith("50 % per row, measured on the dense model")
    with pytest.raises(SympruneError, match="inputs"):
        Recipe(inputs="sparse")


def test_federated_pruning_says_that_it_measures_behind_pruned_blocks() -> None:
    recipe = Recipe(method="wanda", inputs="dense")
    with pytest.raises(SympruneError, match="--inputs dense measures the dense model"):
        fed.prune(families.model(), [families.tokens(), families.tokens(seed=1)], recipe)
