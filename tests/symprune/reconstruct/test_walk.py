"""Models whose blocks are reconstructed: in memory, streamed, on a device, killed and gone on."""

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
from symprune.engine import walk
from symprune.engine.reconstruct import AFTER, BEFORE
from symprune.jobs import pruning
from symprune.jobs.sweep import Grid, Sweep
from symprune.machine import distributed, memory
from symprune.models import hub
from symprune.models.layout import find_layout

FITTED = Recipe(method="wanda", reconstruct={"name": "block", "epochs": 2, "rate": 0.01})
HELD_OUT = families.tokens(4, seed=9)


class Killed(BaseException):
    """Stands for a process that ends here, without a chance to tidy up."""


def prune(model: Any, recipe: Recipe = FITTED, **options: Any) -> Any:
    return symprune.prune(model, families.tokens(10), recipe, held_out=HELD_OUT, **options)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def assert_same(model: Any, other: Any) -> None:
    found = weights_of(other)
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, found[name]), name


@pytest.mark.parametrize("inputs", ["pruned", "dense"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma3n", "zamba2", "gpt-oss"])
def test_errors_fall_zeros_stay_and_nothing_but_matrices_changes(family: str, inputs: str) -> None:
    dense, model = families.model(family), families.model(family)
    recipe = FITTED.with_changes(reconstruct={**(FITTED.reconstruct or {}), "inputs": inputs})
    report = prune(model, recipe)
    before, after = weights_of(dense), weights_of(model)
    for name, keep in report.masks.items():
        assert not after[name][~keep].any()
    unpruned = set(before) - set(report.masks)
    assert unpruned and all(torch.equal(before[name], after[name]) for name in unpruned)
    figures = [layer.figures for layer in report.layers]
    assert all(each[AFTER] <= each[BEFORE] for each in figures)
    assert any(each[AFTER] < each[BEFORE] for each in figures)
    assert any("Reconstruction lowered the error of" in note for note in report.notes)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_error_that_is_reported_is_that_of_the_models_outputs() -> None:
    """One block, every token as important: the held-out error is ||pruned - dense|| / ||update||,
    and training must bring it down."""
    errors = []
    outputs = FITTED.with_changes(reconstruct={**(FITTED.reconstruct or {}), "last": "outputs"})
    for recipe in (Recipe(method="wanda"), outputs):
        model, dense = families.model(), families.model()
        for each in (model, dense):
            each.model.layers = each.model.layers[:1]
            each.model.norm = torch.nn.Identity()
        prune(model, recipe)
        with torch.no_grad():
            hidden = [each.model(HELD_OUT).last_hidden_state for each in (model, dense)]
        errors.append(float((hidden[0] - hidden[1]).norm()))
    assert errors[1] < errors[0]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(method="magnitude", group="layer"),
        Recipe(pattern="2:4", refine="swap"),
        Recipe(method="wanda", update={"name": "lsq", "rounds": 2}, allocate="owl"),
        Recipe(method="magnitude", update="sparsegpt", token_limit=2),
    ],
    ids=lambda recipe: recipe.describe(),
)
def test_it_follows_every_step_and_leaves_the_masks_alone(recipe: Recipe) -> None:
    plain, fitted = families.model(), families.model()
    masks = prune(plain, recipe).masks
    report = prune(fitted, recipe.with_changes(reconstruct=FITTED.reconstruct))
    first = [name for name in masks if ".layers.0." in name]
    assert first and all(torch.equal(masks[name], report.masks[name]) for name in first)
    assert not torch.equal(weights_of(plain)[first[0]], weights_of(fitted)[first[0]])
    assert report.sparsity == pytest.approx(recipe.target_sparsity, abs=0.02)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("sparsity", [0.5, 0])
def test_values_stay_on_their_grid(family: str, sparsity: float) -> None:
    model, plain = families.model(family), families.model(family)
    recipe, tokens = FITTED.with_changes(values="int3", sparsity=sparsity), families.tokens(10)
    # Watched on tokens that are trained on: on others, untrained experts learn nothing that holds.
    report = symprune.prune(model, tokens, recipe, held_out=tokens[:4])
    without = prune(plain, recipe.with_changes(reconstruct=None))
    changed = False
    for matrix in find_layout(model).all_matrices():
        keep = matrix.slice_of(report.masks[matrix.parameter_name])
        assert torch.equal(matrix.weight, report.values[matrix.name].dense(keep)), matrix.name
        before = without.values[matrix.name]
        changed |= not torch.equal(report.values[matrix.name].codes, before.codes)
        changed |= not torch.equal(report.values[matrix.name].scales, before.scales)
    assert changed
    figures = [layer.figures for layer in report.layers]
    assert all(each[AFTER] <= each[BEFORE] for each in figures)


def test_two_runs_are_equal_and_another_seed_is_not() -> None:
    one, two, other = (families.model() for _ in range(3))
    prune(one)
    prune(two)
    prune(other, FITTED.with_changes(seed=1))
    assert_same(one, two)
    found = weights_of(other)
    assert any(not torch.equal(each, found[name]) for name, each in weights_of(one).items())


def test_half_precision_is_trained_in_full() -> None:
    """Steps far below what bfloat16 tells apart add up."""
    model = families.model().to(torch.bfloat16)
    report = prune(model)
    figures = [layer.figures for layer in report.layers]
    assert all(each[AFTER] <= each[BEFORE] for each in figures)
    assert any(each[AFTER] < each[BEFORE] for each in figures)


def test_without_held_out_tokens_some_samples_sit_out() -> None:
    model = families.model()
    report = symprune.prune(model, families.tokens(10), FITTED)
    assert all(AFTER in layer.figures for layer in report.layers)
    with pytest.raises(SympruneError, match="a sample to train on and another that watches"):
        symprune.prune(families.model(), families.tokens(1), FITTED)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("values", [None, "int4"])
def test_a_device_gives_what_main_memory_does(family: str, values: str | None) -> None:
    model, here = families.model(family), families.model(family)
    for each in (model, here):  # no gradient passes the pretended device's fused attention
        each.set_attn_implementation("eager")
    tokens, held_out = families.tokens(2), HELD_OUT[:1]
    recipe = FITTED.with_changes(values=values, reconstruct={"name": "block", "epochs": 1})
    symprune.prune(here, tokens, recipe, held_out=held_out, batch_size=1)
    with PretendDevice() as device:
        there = device.take(model)
        report = symprune.prune(there, tokens.to(DEVICE), recipe, held_out=held_out, batch_size=1)
        for name, weight in weights_of(here).items():
            found = dict(there.named_parameters())[name].detach().cpu()
            # A gradient's products are other ones there, and Adam divides each by its own size:
            # what rounding makes of one that is nearly zero is part of a step, here a tenth of it.
            step = 0.01 * float(weight[weight != 0].square().mean().sqrt())
            torch.testing.assert_close(found, weight, rtol=0, atol=step / 10, msg=name)
        assert all(value.codes.device.type == "cpu" for value in report.values.values())


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
    recipe = FITTED.with_changes(**TEXT, **changes)
    return pruning.Job(str(folder), recipe, output, evaluate=False, compute_dtype="float32")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("values", [None, "int4"])
def test_streamed_weights_are_those_of_a_model_in_memory(
    values: str | None, folder: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    record = pruning.prune(job(folder, tmp_path / "out", values=values), told.append)
    assert any("MB for a block's weights in training" in line for line in told)
    assert "Reconstruction lowered the error of" in " ".join(record["notes"])
    written = symprune.load(tmp_path / "out", dequantize=True) if values else load_model(
        hub.resolve(str(tmp_path / "out"))
    )  # fmt: skip
    model = load_model(hub.resolve(str(folder))).float()
    tokenizer = hub.load_tokenizer(hub.resolve(str(folder)))
    blocks = walk.Blocks(find_layout(model), stored=torch.bfloat16)
    recipe = FITTED.with_changes(**TEXT, values=values)
    symprune.prune(model, tokenizer, recipe, blocks=blocks)
    assert_same(model.to(torch.bfloat16), written)


@pytest.mark.parametrize("states_kept", [True, False])
@pytest.mark.parametrize("values", [None, "int4"])
def test_a_killed_run_goes_on_to_the_same_bytes(
    values: str | None,
    states_kept: bool,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pruning.prune(job(folder, tmp_path / "whole", values=values))
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
                pruning.prune(job(folder, tmp_path / "out", values=values))
    pruning.prune(job(folder, tmp_path / "out", values=values))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("family", ["gemma4", "zamba2"])
def test_it_goes_on_where_blocks_are_given_more_than_hidden_states(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.model(family).save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    pruning.prune(job(tmp_path / "dense", tmp_path / "whole"))
    finish = StreamedBlocks.finish

    def then_die(self: StreamedBlocks, index: int, *rest: Any) -> None:
        finish(self, index, *rest)
        if index == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(StreamedBlocks, "finish", then_die)
        with pytest.raises(Killed):
            pruning.prune(job(tmp_path / "dense", tmp_path / "out"))
    pruning.prune(job(tmp_path / "dense", tmp_path / "out"))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_cells_of_a_sweep_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    grid = Grid(
        methods=["wanda"], reconstructions=[FITTED.reconstruct, None, FITTED.reconstruct],
        seeds=[0, 1], eval_data=__file__, eval_windows=1, **TEXT,
    )  # fmt: skip
    together = Sweep(families.model(family), families.tokenizer(), "m", grid, tmp_path / "all")
    found = together.run()
    last = [recipe for recipe in grid.recipes() if recipe.reconstruct and recipe.seed == 1]
    alone = Sweep(families.model(family), families.tokenizer(), "m", grid, tmp_path / "one")
    assert len(found) == 4 and len(last) == 1
    expected = alone.run(recipes=last)[0]["perplexity"]
    assert expected in [cell["perplexity"] for cell in found]


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "size", lambda: 2)
    with pytest.raises(SympruneError, match="Training behind pruned blocks"):
        prune(families.model())


def test_federated_pruning_says_that_it_sends_no_weights() -> None:
    with pytest.raises(SympruneError, match="--reconstruct trains on what passes a block"):
        fed.prune(families.model(), [families.tokens(), families.tokens(seed=1)], FITTED)


def test_too_little_memory_is_said_before_a_block_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free", lambda _: 1000)
    model = families.model()
    with pytest.raises(SympruneError, match="Training a block needs"):
        prune(model)
    assert_same(model, families.model())


def test_a_recipe_survives_a_file_and_says_what_it_does(tmp_path: Path) -> None:
    FITTED.save(tmp_path / "recipe.yaml")
    assert Recipe.load(tmp_path / "recipe.yaml") == FITTED
    assert FITTED.describe() == "wanda, 50 % per row, blocks reconstructed in 2 epochs"
    with pytest.raises(SympruneError, match="Unknown reconstruct 'blocks'; choose block"):
        Recipe(reconstruct="blocks")
