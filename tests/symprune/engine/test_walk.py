"""The engine against a slow, obvious transcription, and its promises to library users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import psutil
import pytest
import torch
from torch import Tensor, nn

import symprune
from symprune.engine import decide, forward, walk
from symprune.engine.collect import collect
from symprune.errors import HalfPrunedError, SympruneError
from symprune.jobs import pruning
from symprune.machine import memory
from symprune.models.layout import find_layout
from symprune.recipe import Recipe
from symprune.stats import SQUARE, Needs


def plain_prune(model: Any, tokens: Tensor, method: str, sparsity: float) -> None:
    """Wanda, RIA and magnitude as their papers tell them: whole-model forwards with hooks, sums in
    fp64, a stable full sort; block after block, each measured behind the pruned ones."""
    for block in model.model.layers:
        linears = [m for m in block.modules() if isinstance(m, nn.Linear)]
        square: dict[nn.Module, Tensor] = {m: torch.zeros(m.in_features).double() for m in linears}

        def hook(module: nn.Module, args: Any, square: Any = square) -> None:
            square[module] += (args[0][0].float() ** 2).sum(0).double()

        handles = [m.register_forward_pre_hook(hook) for m in linears]
        with torch.no_grad():
            for row in tokens:
                model(input_ids=row[None], use_cache=False)
        for handle in handles:
            handle.remove()
        for m in linears:
            x = (square[m] / len(tokens)).sqrt().float()
            size = m.weight.detach().abs()
            if method == "magnitude":
                score = size
            elif method == "wanda":
                score = size * x
            else:
                relative = size * (1 / size.sum(0, keepdim=True) + 1 / size.sum(1, keepdim=True))
                score = relative * x**0.5
            order = torch.argsort(score, dim=1, stable=True)
            lost = order[:, : int(m.in_features * sparsity)]
            m.weight.data.scatter_(1, lost, 0.0)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "ria"])
def test_masks_are_bit_for_bit_those_of_the_plain_transcription(method: str) -> None:
    """Whose sums differ in the last digit: no two of so few scores are that close, and what stays
    is not touched."""
    tokens = families.tokens(5, 12)
    plain, ours = families.model(seed=7), families.model(seed=7)
    plain_prune(plain, tokens, method, 0.6)
    report = walk.prune(ours, tokens, Recipe(method=method, sparsity=0.6))
    for (name, expected), (_, got) in zip(
        plain.named_parameters(), ours.named_parameters(), strict=True
    ):
        assert torch.equal(expected, got), name
    assert abs(report.sparsity - 0.6) < 0.02


def test_the_same_recipe_gives_the_same_bits() -> None:
    """The same calls with the same numbers, in the same order."""
    recipe = Recipe(method="stochria", params={"beta": 0.3}, seed=5)
    runs = [families.model(seed=1) for _ in range(2)]
    for model in runs:
        walk.prune(model, families.tokens(), recipe)
    other = families.model(seed=1)
    walk.prune(other, families.tokens(), recipe.with_changes(seed=6))
    one, two, three = (model.state_dict() for model in (*runs, other))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], three[name]) for name in one)


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4"])
def test_patterns_hold_in_every_group(pattern: str) -> None:
    model = families.model()
    walk.prune(model, families.tokens(), Recipe(method="wanda", pattern=pattern))
    n, m = (int(part) for part in pattern.split(":"))
    for matrix in find_layout(model).all_matrices():
        kept = (matrix.weight.reshape(-1, m) != 0).sum(1)
        assert (kept == n).all(), matrix.name


def test_layer_groups_remove_the_exact_number() -> None:
    model = families.model()
    report = walk.prune(model, families.tokens(), Recipe(sparsity=0.37, group="layer"))
    for layer in report.layers:
        assert layer.removed == int(layer.size * 37 // 100)


def test_zero_sparsity_changes_nothing() -> None:
    model, same = families.model(), families.model()
    walk.prune(model, families.tokens(), Recipe(sparsity=0.0))
    for name, value in same.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_shared_inputs_are_measured_once() -> None:
    model = families.model()
    layout = find_layout(model)
    with forward.ready(model):
        activations = forward.embed(layout, families.tokens())
        found = layout.matrices(0)
        measured = collect(activations, 0, layout.blocks[0], found, Needs(frozenset({SQUARE})))
    by_leaf = {name.split(".")[-2]: stats for name, stats in measured.inputs.items()}
    assert by_leaf["q_proj"] is by_leaf["k_proj"] is by_leaf["v_proj"]
    assert by_leaf["gate_proj"] is by_leaf["up_proj"]
    distinct = {id(stats) for stats in measured.inputs.values()}
    assert len(distinct) == 4 and len(measured.inputs) == 7
    assert all(s.samples == 4 and s.tokens == 64 for s in measured.inputs.values())
    assert measured.outputs == {}


def test_a_token_limit_bounds_what_is_measured_of_inputs_and_outputs() -> None:
    model = families.model()
    layout = find_layout(model)
    both = frozenset({SQUARE})
    with forward.ready(model):
        activations = forward.embed(layout, families.tokens())
        activations.hidden[:, 0] *= 1e3
        block, found = layout.blocks[0], layout.matrices(0)
        down = next(matrix.name for matrix in found if "down_proj" in matrix.name)
        free, bounded = (
            collect(activations, 0, block, found, Needs(both, both, limit)) for limit in (None, 1.0)
        )
    for side in ("inputs", "outputs"):
        whole, part = (getattr(c, side)[down].norm.norm() for c in (free, bounded))
        assert part < whole


def test_a_token_limit_no_token_reaches_changes_no_bit() -> None:
    """It multiplies by one."""
    models = [families.model(), families.model(), families.model()]
    for model, limit in zip(models, (None, 1e6, 1.0), strict=True):
        walk.prune(model, families.tokens(), Recipe(method="wanda", token_limit=limit))
    free, loose, tight = (list(model.state_dict().values()) for model in models)
    assert all(map(torch.equal, free, loose))
    assert not all(map(torch.equal, free, tight))


def test_magnitude_needs_no_data_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "embed", lambda *_: pytest.fail("ran the model"))
    report = symprune.prune(families.model(), families.tokenizer(), Recipe(method="magnitude"))
    assert report.sparsity == 0.5


def test_the_library_takes_a_tokenizer_and_caps_the_sequence_length() -> None:
    recipe = symprune.Recipe(calibration="builtin", nsamples=2, seqlen=100)
    report = symprune.prune(families.model(), families.tokenizer(), recipe)
    assert report.seqlen == 64 and "64 positions" in report.notes[0]
    assert report.layers[0].tokens == 2 * 64


def test_half_precision_stays_half_precision() -> None:
    model = families.model().to(torch.bfloat16)
    walk.prune(model, families.tokens(), Recipe())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_one_copy_of_the_hidden_states_is_kept() -> None:
    model = families.model()
    layout = find_layout(model)
    with forward.ready(model):
        activations = forward.embed(layout, families.tokens())
        place = activations.hidden.data_ptr()
        before = activations.hidden.clone()
        activations.advance(0, layout.blocks[0])
    assert activations.hidden.data_ptr() == place
    assert not torch.equal(activations.hidden, before)


def test_non_finite_weights_and_activations_name_the_layer() -> None:
    model = families.model()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(SympruneError, match=r"layers\.1\.mlp\.up_proj.*weights"):
        walk.prune(model, families.tokens(), Recipe(method="magnitude"))
    model = families.model()
    model.get_input_embeddings().weight.data[5] = torch.inf
    with pytest.raises(SympruneError, match=r"layers\.0\.self_attn\.q_proj.*activations"):
        walk.prune(model, torch.full((1, 8), 5), Recipe())


def test_a_failure_on_the_way_says_how_much_of_a_model_in_memory_is_pruned() -> None:
    model = families.model()
    overflowing(model)
    with pytest.raises(HalfPrunedError, match=r"1 of 2 blocks of the model in memory.*load it"):
        walk.prune(model, families.tokens(), Recipe())
    first, second = (block.self_attn.q_proj.weight for block in model.model.layers)
    assert (first == 0).sum() == first.numel() // 2
    assert not (second == 0).any()


def test_a_block_that_is_pruned_in_part_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made, score = [], decide.score

    def fails_at_last(*arguments: Any) -> Tensor:
        made.append(score(*arguments))
        return made[-1] * (torch.nan if len(made) == 3 else 1)

    monkeypatch.setattr(decide, "score", fails_at_last)
    with pytest.raises(HalfPrunedError, match=r"NaN.*1 of 2 blocks of the model in memory"):
        walk.prune(families.model(), families.tokens(), Recipe())


def test_a_failure_before_anything_is_pruned_does_not_speak_of_it() -> None:
    model = families.model()
    untouched = {name: value.clone() for name, value in model.state_dict().items()}
    model.get_input_embeddings().weight.data[5] = torch.inf
    with pytest.raises(SympruneError) as caught:
        walk.prune(model, torch.full((1, 8), 5), Recipe())
    assert not isinstance(caught.value, HalfPrunedError) and "in memory" not in str(caught.value)
    untouched["model.embed_tokens.weight"][5] = torch.inf
    assert all(torch.equal(model.state_dict()[name], untouched[name]) for name in untouched)


def test_a_failure_of_a_model_on_disk_loses_nothing_and_says_nothing_of_it(tmp_path: Path) -> None:
    model = families.model("smollm")
    overflowing(model)
    model.save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    before = {path.name: path.read_bytes() for path in (tmp_path / "dense").iterdir()}
    recipe = Recipe(calibration=__file__, nsamples=3, seqlen=16)
    job = pruning.Job(str(tmp_path / "dense"), recipe, tmp_path / "out", evaluate=False)
    with pytest.raises(SympruneError, match=r"layers\.1\.mlp\.down_proj.*activations\.$"):
        pruning.prune(job)
    assert {path.name: path.read_bytes() for path in (tmp_path / "dense").iterdir()} == before


def overflowing(model: Any) -> None:
    """Activations that are infinite in the last matrix of the last block, not before."""
    model.model.layers[1].mlp.up_proj.weight.data.fill_(1e38)


def test_a_pattern_that_does_not_divide_names_the_layer_before_any_work() -> None:
    model = families.model()
    untouched = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SympruneError, match=r"2:5.*32 input channels.*q_proj"):
        walk.prune(model, families.tokens(), Recipe(pattern="2:5"))
    assert all(torch.equal(model.state_dict()[name], untouched[name]) for name in untouched)


def test_empty_tokens_are_refused() -> None:
    with pytest.raises(SympruneError, match="filled"):
        walk.prune(families.model(), torch.zeros((0, 8), dtype=torch.long), Recipe())


@pytest.mark.parametrize("token", [-1, families.VOCABULARY])
def test_tokens_just_outside_the_vocabulary_are_refused(token: int) -> None:
    tokens = families.tokens(2, 8)
    tokens[1, 3] = token
    with pytest.raises(SympruneError, match=f"token {token} is not in the model's vocabulary"):
        walk.prune(families.model(), tokens, Recipe())
    tokens[1, 3] = families.VOCABULARY - 1
    walk.prune(families.model(), tokens, Recipe())


def test_importing_the_tensor_modules_needs_no_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import sys, symprune.scores, symprune.masks, symprune.stats, symprune.maskset;"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_steps_that_fit_the_calibration_data_are_watched_on_other_tokens() -> None:
    """One short sample says too little to fit 32 weights: the run says so."""
    recipe = Recipe(method="wanda", update={"name": "lsq", "damping": 1e-6, "iters": 100})
    few, others = families.tokens(1, 16), families.tokens(8, 16, seed=1)
    report = walk.prune(families.model(), few, recipe, held_out=others)
    assert all("held_out_error" in layer.figures for layer in report.layers)
    assert any("On held-out tokens" in note for note in report.notes)
    many = walk.prune(families.model(), families.tokens(200, 16), recipe, held_out=others)
    assert not any("On held-out tokens" in note for note in many.notes)


def test_held_out_tokens_decide_nothing() -> None:
    """Not a bit: a sample's sums are its own, and the held-out ones go elsewhere."""
    recipe = Recipe(method="wanda", refine="swap", update="lsq")
    models = families.model(), families.model()
    walk.prune(models[0], families.tokens(8, 16), recipe, held_out=families.tokens(2, 16, seed=1))
    walk.prune(models[1], families.tokens(8, 16), recipe)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_memory_of_gram_matrices_is_said_before_the_first_block() -> None:
    told: list[str] = []
    stages: list[str] = []
    recipe = Recipe(method="wanda", refine="swap")

    def watch(stage: str, *_: object) -> None:
        stages.append(stage)
        assert told or stage == "embed"

    for where in ("auto", "cpu", "disk"):
        told.clear()
        walk.prune(
            families.model(),
            families.tokens(),
            recipe,
            watch=watch,
            gram_device=where,
            tell=told.append,
        )
        assert told == [
            f"Gram matrices: 4 a block, 0 MB of {'disk' if where == 'disk' else 'memory'}"
        ]
    assert "mask" in stages
    with pytest.raises(SympruneError, match="gram_device"):
        walk.prune(families.model(), families.tokens(), recipe, gram_device="tape")


def test_gram_matrices_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda device: 1000)
    recipe = Recipe(method="wanda", update="lsq")
    with pytest.raises(SympruneError, match="--gram-device disk"):
        walk.prune(families.model(), families.tokens(), recipe)
    walk.prune(families.model(), families.tokens(), recipe, gram_device="disk")


def test_what_is_free_is_a_part_of_what_there_is(device: torch.device) -> None:
    on_host = device.type == "cpu"
    whole = psutil.virtual_memory().total if on_host else torch.cuda.mem_get_info(device)[1]
    assert 0 < memory.free(device) < whole
