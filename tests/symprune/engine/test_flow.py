"""How statistics follow the data: measured on the dense model, behind pruned blocks, or group by
group inside a block, with what weights are fitted to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from pretend_device import DEVICE, PretendDevice
from torch import nn

import symprune
from symprune import Recipe, SympruneError, fed
from symprune.checkpoint import resume
from symprune.checkpoint.load import load_model
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.engine import decide, forward, walk
from symprune.engine.collect import collect
from symprune.engine.forward import Activations
from symprune.engine.visit import shared_work
from symprune.engine.visit.dense_side import DenseSide
from symprune.engine.visit.groups import find_groups, order_kinds
from symprune.jobs import pruning
from symprune.models import hub
from symprune.models.layout import find_layout
from symprune.models.matrices import matrices

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
    "group by group": {"sequential": True},
    "group by group, trained": {"sequential": True, "reconstruct": TRAINED},
    "mixed targets": {"targets": "mixed"},
    "dense targets, trained": {"targets": "dense", "reconstruct": TRAINED},
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


TEXT = {"calibration": __file__, "nsamples": 12, "seqlen": 32}


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
@pytest.mark.parametrize("way", ["dense inputs", "group by group", "mixed targets"])
def test_a_device_gives_what_main_memory_does(way: str, family: str) -> None:
    recipe = Recipe(method="wanda", update=LSQ, **WAYS[way])  # type: ignore[arg-type]
    model, tokens = families.model(family), families.tokens(8, 24)
    with PretendDevice() as device:
        there = device.take(model)
        symprune.prune(there, tokens.to(DEVICE), recipe, held_out=tokens[:1], batch_size=1)
        found = {name: p.detach().cpu() for name, p in there.named_parameters()}
    symprune.prune(model, tokens, recipe, held_out=tokens[:1], batch_size=1)
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6, msg=name)


GROUPS = {
    "llama": [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]],
    "gpt2": [["c_attn"], ["c_proj"], ["c_fc"], ["c_proj"]],
    "gpt-neox": [["query_key_value"], ["dense"], ["dense_h_to_4h"], ["dense_4h_to_h"]],
    "mixtral": [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_up_proj"], ["down_proj"]],
}


@pytest.mark.parametrize("family", list(GROUPS))
def test_groups_are_found_in_the_order_data_flows(family: str) -> None:
    model = families.model(family)
    layout = find_layout(model)
    with forward.ready(model):
        activations = forward.embed(layout, families.tokens(1))
        groups, _ = find_groups(activations, 0, layout.blocks[0], layout.matrices(0))
    kinds = [list(dict.fromkeys(m.kind.split(".")[-1] for m in group)) for group in groups]
    assert kinds == GROUPS[family]
    assert sum(map(len, groups)) == len(layout.matrices(0))


def test_kinds_that_share_an_input_are_one_group_even_if_that_shows_late() -> None:
    block = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b", "c", "d")})
    found = matrices(block)
    one, two, three = object(), object(), object()
    inputs = {"a.weight": one, "b.weight": two, "c.weight": three}
    assert order_kinds(found, inputs) == {"a": 0, "b": 1, "c": 2}
    inputs = {"d.weight": one, "b.weight": two, "a.weight": two, "c.weight": one}
    assert order_kinds(found, inputs) == {"d": 0, "b": 1, "a": 1, "c": 0}


def by_hand(model: Any, tokens: torch.Tensor, groups: list[list[str]]) -> None:
    """Wanda, group by group, each time with forwards of the whole model and hooks."""
    for block in model.model.layers:
        layers = dict(block.named_modules())
        for group in groups:
            chosen = [m for n, m in layers.items() if n.rpartition(".")[2] in group]
            square = {m: torch.zeros(m.in_features).double() for m in chosen}

            def hook(module: Any, args: Any, square: Any = square) -> None:
                square[module] += (args[0][0].float() ** 2).sum(0).double()

            handles = [m.register_forward_pre_hook(hook) for m in chosen]
            with torch.no_grad():
                for row in tokens:
                    model(input_ids=row[None], use_cache=False)
            for handle in handles:
                handle.remove()
            for m in chosen:
                score = m.weight.detach().abs() * (square[m] / len(tokens)).sqrt().float()
                lost = torch.argsort(score, dim=1, stable=True)[:, : m.in_features // 2]
                m.weight.data.scatter_(1, lost, 0.0)


def test_group_by_group_each_is_measured_behind_the_pruned_ones() -> None:
    model, other, at_once = families.model(), families.model(), families.model()
    tokens = families.tokens(5, 12)
    symprune.prune(model, tokens, Recipe(method="wanda", sequential=True))
    by_hand(other, tokens, GROUPS["llama"])
    assert_same(model, other)
    symprune.prune(at_once, tokens, Recipe(method="wanda"))
    assert any(
        not torch.equal(w, dict(weights_of(model))[n]) for n, w in weights_of(at_once).items()
    )


def test_a_pass_that_measures_ends_where_its_group_does(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    model = families.model()
    for name, module in model.model.layers[0].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_, n=name: called.append(n.split(".")[-1]))
    told: list[str] = []
    recipe = Recipe(method="wanda", sequential=True)
    symprune.prune(model, families.tokens(5), recipe, tell=told.append)
    # A look for the groups, the first sample of each of four groups and five samples at the end
    # are whole; the other four end early.
    assert called.count("q_proj") == 10 + 4 * 4
    assert called.count("o_proj") == 10 + 4 * 3
    assert called.count("down_proj") == 10 + 4
    assert told == [
        "Group by group: 4 in a block, so 5 forwards of it and not 2; those that measure end where "
        "their group does"
    ]


def test_the_report_has_the_order_of_the_model_whatever_the_groups() -> None:
    one, other = families.model("gpt-neox"), families.model("gpt-neox")
    recipe = Recipe(method="wanda")
    expected = prune(one, recipe).layers
    found = prune(other, recipe.with_changes(sequential=True)).layers
    assert [layer.name for layer in found] == [layer.name for layer in expected]
    assert not any("no layer of a known kind" in note for note in prune(
        families.model("gpt2"), recipe.with_changes(sequential=True)
    ).notes)  # fmt: skip


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "gemma4", "zamba2"])
def test_every_family_goes_group_by_group(family: str) -> None:
    recipe = Recipe(method="wanda", update="lsq", sequential=True)
    report = prune(families.model(family), recipe)
    pruned = [layer for layer in report.layers if not layer.dense]
    assert pruned and all(layer.sparsity == pytest.approx(0.5, abs=0.05) for layer in pruned)


def test_what_cannot_be_combined_is_one_sentence() -> None:
    for change in ({"sequential": True}, {"targets": "dense"}):
        with pytest.raises(SympruneError, match="where no group is behind a pruned one"):
            Recipe(update="lsq", inputs="dense", **change)  # type: ignore[arg-type]
    with pytest.raises(SympruneError, match="give an update, or values"):
        Recipe(targets="mixed", refine="swap")
    with pytest.raises(SympruneError, match="give an update, or values"):
        Recipe(targets="mixed", values={"name": "int4", "solve": "nearest"})
    with pytest.raises(SympruneError, match="targets"):
        Recipe(update="lsq", targets="both")
    with pytest.raises(SympruneError, match="sequential is true or false"):
        Recipe(sequential=1)  # type: ignore[arg-type]
    with pytest.raises(SympruneError, match="Held-out tokens decide about targets mixed"):
        symprune.prune(families.model(), families.tokens(), Recipe(update="lsq", targets="mixed"))


def test_work_is_divided_so_that_nobody_waits_long() -> None:
    assert shared_work.divide([5, 1, 1, 3, 4], 2) == [0, 0, 0, 1, 1]
    assert shared_work.divide([1, 1, 1], 5) == [0, 1, 2]
    assert shared_work.divide([], 2) == []


def test_what_is_measured_on_is_in_the_recipe_and_its_description(tmp_path: Path) -> None:
    DENSE.save(tmp_path / "recipe.yaml")
    assert Recipe.load(tmp_path / "recipe.yaml") == DENSE
    assert DENSE.describe().endswith("50 % per row, measured on the dense model")
    with pytest.raises(SympruneError, match="inputs"):
        Recipe(inputs="sparse")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"inputs": "dense"}, "--inputs dense measures the dense model"),
        ({"sequential": True}, "--sequential and --targets measure a block"),
        ({"targets": "mixed", "update": "lsq"}, "--sequential and --targets measure a block"),
    ],
)
def test_federated_pruning_says_what_it_does_not_measure(
    change: dict[str, Any], sentence: str
) -> None:
    data = [families.tokens(), families.tokens(seed=1)]
    with pytest.raises(SympruneError, match=sentence):
        fed.prune(families.model(), data, Recipe(method="wanda", **change))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_dense_side_of_a_block_is_dense_while_the_block_is_pruned(family: str) -> None:
    model, dense = families.model(family), families.model(family)
    tokens, layout = families.tokens(2), find_layout(model)
    with forward.ready(model):
        activations, block = forward.embed(layout, tokens), layout.blocks[0]
        found = layout.matrices(0)
        groups, _ = find_groups(activations, 0, block, found)
        name = groups[1][0].name
        prefix = f"{layout.prefix}.0."
        side = DenseSide(activations, 0, block, found, prefix, frozenset({name}))
        for group in groups[:2]:
            side.keep(group)
            for matrix in group:
                matrix.weight.zero_()
        beside = side.inputs_of(groups[1])
        assert beside is not None
        given = beside(range(1, 2))[name]
    seen: list[torch.Tensor] = []
    layer = dense.get_submodule(name.removesuffix(".weight"))
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        dense(input_ids=tokens[1:], use_cache=False)
    assert torch.equal(given.reshape(seen[0].shape), seen[0])
    assert side.inputs_of(groups[0]) is None
