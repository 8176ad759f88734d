"""Regional gradients: those of autograd, the same from disk, on a device and after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from pretend_device import PretendDevice
from torch import Tensor

import symprune
from symprune import Recipe, SympruneError, masks
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.engine import decide, forward, gradients
from symprune.engine.arguments import Arguments
from symprune.engine.collect import collect
from symprune.engine.gradients import regional_gradients
from symprune.jobs import pruning
from symprune.models.layout import find_layout
from symprune.models.matrices import matrices

RECIPE = Recipe(method="wanda-plus-plus", calibration=__file__, nsamples=4, seqlen=32)


def measured(model: Any, tokens: Tensor, block: int = 0) -> dict[str, Tensor]:
    """The engine's figures for a block of the dense model, as `[out, in]`."""
    layout = find_layout(model)
    with forward.ready(model):
        activations = forward.embed(layout, tokens)
        for index in range(block):
            activations.advance(index, layout.blocks[index])
        found = layout.matrices(block)
        sums = regional_gradients(
            activations, block, layout.blocks[block], found, range(len(tokens))
        )
    return {m.name: sums[m.name].norm.view(m.weight.shape) for m in found}


def by_autograd(model: Any, tokens: Tensor, block: int = 0) -> dict[str, Tensor]:
    """The model's own forward and backward, a sample at a time, with the block's output caught."""
    layout, outputs = find_layout(model), list[Tensor]()

    def catch(_: Any, __: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    total: dict[str, Tensor] = {}
    hook = layout.blocks[block].register_forward_hook(catch)
    for tokens_of_one in tokens:
        model.zero_grad()
        outputs.clear()
        model(input_ids=tokens_of_one.unsqueeze(0), use_cache=False)
        outputs[0].square().sum().sqrt().backward()
        for matrix in layout.matrices(block):
            found = matrix.parameter.grad
            whole = torch.zeros_like(matrix.parameter) if found is None else found
            square = matrix.slice_of(whole).double().square()
            total[matrix.name] = total.get(matrix.name, 0) + square
    hook.remove()
    model.zero_grad()
    return {name: (value / len(tokens)).sqrt() for name, value in total.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma3", "gemma4", "deepseek-v4"])
def test_they_are_those_of_autograd(family: str) -> None:
    model, tokens = families.model(family).eval(), families.tokens(3, 16)
    for block in (0, 1):
        found = measured(model, tokens, block)
        expected = by_autograd(model, tokens, block)
        assert found.keys() == expected.keys() and any(g.any() for g in found.values())
        for name, gradient in found.items():
            size = float(expected[name].max())
            torch.testing.assert_close(
                gradient.double(), expected[name], rtol=1e-3, atol=1e-5 * size, msg=name
            )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_tiny_block_is_differentiated_by_hand() -> None:
    """||X W^T||_F of one matrix: its gradient is W X^T X / ||X W^T||_F."""

    class Only(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = torch.nn.Linear(4, 4, bias=False)

        def forward(self, hidden_states: Tensor, other: None) -> Tensor:
            result: Tensor = self.matrix(hidden_states)
            return result

    torch.manual_seed(0)
    block, hidden = Only(), torch.randn(3, 5, 4)
    states = forward.Activations(hidden, Arguments([((), {"other": None})], 3))
    with torch.no_grad():
        sums = regional_gradients(states, 0, block, matrices(block), range(3))
    weight, squares = block.matrix.weight.detach(), torch.zeros(4, 4)
    for x in hidden:
        squares += (weight @ x.T @ x / (x @ weight.T).norm()).square()
    (found,) = sums.values()
    torch.testing.assert_close(found.norm.view(4, 4), (squares / 3).sqrt())


@pytest.mark.parametrize("amount", [{"sparsity": 0.5}, {"group": "layer"}, {"pattern": "2:4"}])
def test_masks_are_those_of_the_formula(amount: dict[str, Any]) -> None:
    tokens, recipe = families.tokens(4, 16), RECIPE.with_changes(**amount)
    dense, model = families.model().eval(), families.model()
    report = symprune.prune(model, tokens, recipe)
    expected = measured(dense, tokens)
    plain = symprune.prune(families.model(), tokens, Recipe(method="wanda", **amount))
    changed = 0
    norms = input_norms(dense, tokens)
    for matrix in find_layout(dense).matrices(0):
        score = matrix.weight.abs() * (100 * expected[matrix.name] + norms[matrix.name])
        keep = masks.keep_mask(score, 0.5, group=recipe.group, pattern=recipe.n_of_m)
        assert torch.equal(report.masks[matrix.parameter_name], keep), matrix.name
        changed += int((keep ^ plain.masks[matrix.parameter_name]).sum())
    assert changed > 0 and report.sparsity == 0.5


def input_norms(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    layout = find_layout(model)
    with forward.ready(model):
        activations = forward.embed(layout, tokens)
        needs = decide.needs(Recipe(method="wanda"))
        found = layout.matrices(0)
        collected = collect(activations, 0, layout.blocks[0], found, needs)
    return {name: stats.norm for name, stats in collected.inputs.items()}


def test_nothing_of_the_other_methods_is_measured_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("symprune.engine.reduce.regional_gradients", None)
    symprune.prune(families.model(), families.tokens(), Recipe(method="wanda", update="lsq"))


def test_samples_that_pass_together_have_gradients_of_their_own() -> None:
    """On an accelerator many pass at once; the gradients are those of each."""
    tokens, made = families.tokens(4, 16), []
    for batch_size in (1, 4):
        model = families.model()
        made.append(symprune.prune(model, tokens, RECIPE, batch_size=batch_size).masks)
    for name in made[0]:
        assert torch.equal(made[0][name], made[1][name])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_device_gives_what_main_memory_does(family: str) -> None:
    tokens, model, here = families.tokens(3, 16), families.model(family), families.model(family)
    for each in (model, here):  # no gradient passes the pretended device's fused attention
        each.set_attn_implementation("eager")
    expected = symprune.prune(here, tokens, RECIPE)
    with PretendDevice() as device:
        found = symprune.prune(device.take(model), tokens, RECIPE)
    assert device.own_waits / len(found.layers) <= 2
    for name in expected.masks:
        assert torch.equal(found.masks[name], expected.masks[name])


def files(folder: Path) -> dict[str, bytes]:
    weights = sorted(folder.glob("*.safetensors"))
    return {path.name: path.read_bytes() for path in weights}


class Killed(BaseException):
    """Nothing catches it on the way."""


def test_a_streamed_run_that_was_killed_ends_as_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.model("smollm").save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")

    def run(output: str) -> None:
        job = pruning.Job(
            str(tmp_path / "dense"), RECIPE, tmp_path / output, device="cpu", evaluate=False
        )
        pruning.prune(job, told.append)

    told: list[str] = []
    run("whole")
    assert sum("Regional gradients" in line for line in told) == 1
    finish = StreamedBlocks.finish
    with monkeypatch.context() as patch:

        def then_die(self: StreamedBlocks, index: int, *rest: Any) -> None:
            finish(self, index, *rest)
            raise Killed

        patch.setattr(StreamedBlocks, "finish", then_die)
        with pytest.raises(Killed):
            run("out")
    run("out")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    model, tokenizer = symprune.load(tmp_path / "dense"), families.tokenizer()
    symprune.prune(model, tokenizer, RECIPE)
    model.save_pretrained(tmp_path / "memory")
    written = symprune.load(tmp_path / "whole").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, written[name]), name


def test_too_little_memory_is_said_before_a_block_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients.memory, "free", lambda _: 10)
    model = families.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SympruneError, match="regional gradients of a block need"):
        symprune.prune(model, families.tokens(), RECIPE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "steps",
    [{"refine": "swap"}, {"update": {"name": "lsq", "rounds": 3}}, {"allocate": "owl"},
     {"values": "int4"}, {"token_limit": 2.0}],
)  # fmt: skip
def test_it_goes_with_every_step(steps: dict[str, Any]) -> None:
    recipe = RECIPE.with_changes(**steps)
    assert symprune.prune(families.model(), families.tokens(), recipe).sparsity == 0.5
