"""Allocations that are tried: what is tried, how it is judged, and that a search decides the same
however the model is held and however often the run is interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from pretend_device import PretendDevice
from stopping import Killed, die_after
from torch import Tensor

import symprune
from symprune import Recipe, masks
from symprune.allocate.budget import Layer
from symprune.allocate.search import (
    CANDIDATES,
    UNIFORM,
    Search,
    candidates,
    choose,
    finalists,
    split_windows,
)
from symprune.calibration import held_out_tokens
from symprune.engine import forward
from symprune.engine.allocation.divide import divide_budget
from symprune.engine.allocation.trial import Trial
from symprune.engine.blocks import Blocks
from symprune.engine.report import Report
from symprune.engine.text.tokens import take_windows, tries
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.machine import memory
from symprune.models.layout import find_layout

SEARCH = Recipe(method="wanda", allocate={"name": "search", "windows": 3})
WINDOWS = families.tokens(3, 32, seed=5)
SILENT: tuple[Any, Any] = (lambda *_: None, lambda _: None)


def prune(model: Any, recipe: Recipe = SEARCH, **options: Any) -> Report:
    return symprune.prune(model, families.tokens(8, 32), recipe, held_out=WINDOWS, **options)


def layer(name: str, block: int, part: str, outliers: int, error: float) -> Layer:
    return Layer(name, block, 8, 100, 400, outliers, part=part, error=error)


LAYERS = [
    layer("a", 0, "attn", 40, 1.0),
    layer("b", 0, "mlp", 8, 9.0),
    layer("c", 1, "attn", 1, 2.0),
    layer("d", 1, "mlp", 2, 4.0),
    layer("e", 2, "attn", 9, 3.0),
    layer("f", 2, "mlp", 9, 5.0),
]


# What is tried


def test_a_trial_takes_a_share_of_what_a_candidate_does() -> None:
    assert Search().milder({"a": 400, "b": 10, "c": 0}) == {"a": 300, "b": 8, "c": 0}
    assert Search(share=1).milder({"a": 401}) == {"a": 401}
    for share in (0, -1, 1.01):
        with pytest.raises(SympruneError, match="share"):
            Search(share=share)


def test_every_candidate_loses_the_same_and_equal_shares_are_among_them() -> None:
    found = candidates(LAYERS, 0.5)
    assert found[UNIFORM] == dict.fromkeys("abcdef", 400)
    assert {sum(counts.values()) for counts in found.values()} == {2400}
    assert len({tuple(counts.items()) for counts in found.values()}) == len(found)


@pytest.mark.parametrize(
    ("rule", "less", "more"), [("owl", "a", "c"), ("lsa", "a", "b"), ("atp", "a", "c")]
)
def test_every_rule_is_tried_both_ways_round(rule: str, less: str, more: str) -> None:
    found = candidates(LAYERS, 0.5)
    own = {name: counts for name, counts in found.items() if name.startswith(rule)}
    assert len(own) == 2 and len(found) == CANDIDATES[0]
    for name, counts in own.items():
        turned = name.split()[1].startswith("-")
        assert (counts[less] > counts[more]) == turned


def test_candidates_that_are_the_same_are_tried_once() -> None:
    """One block, one part, no outliers: no rule has anything to say."""
    alike = [layer(name, 0, "mlp", 0, 1.0) for name in "ab"]
    assert list(candidates(alike, 0.5)) == [UNIFORM]
    one = families.model()
    one.model.layers = one.model.layers[:1]
    found: dict[str, Any] = prune(one).allocation or {}
    assert "atp" not in " ".join([*found["divergence"], *found["first"]["divergence"]])


@pytest.mark.parametrize("best", ["owl 0.08", "lsa -0.08", "atp 0.08"])
def test_the_best_rule_is_tried_with_other_spreads_in_its_direction(best: str) -> None:
    tried = candidates(LAYERS, 0.5)
    divergence = {name: [0.2, 0.1 if name == best else 0.3] for name in tried}
    found = finalists(tried, divergence | {UNIFORM: [0.0, 0.0]}, LAYERS, 0.5)
    rule, sign = best.split()[0], "-" if "-" in best else ""
    assert list(found) == [UNIFORM, best, f"{rule} {sign}0.04", f"{rule} {sign}0.15"]
    assert {sum(counts.values()) for counts in found.values()} == {2400}
    assert found[best] == tried[best] and len(found) == CANDIDATES[1]


def test_a_rule_that_breaks_the_model_goes_no_further() -> None:
    tried = candidates(LAYERS, 0.5)
    divergence = {name: [float("nan")] for name in tried} | {"atp 0.08": [5.0]}
    assert list(finalists(tried, divergence, LAYERS, 0.5))[1] == "atp 0.08"


def test_a_rule_is_found_on_other_windows_than_those_that_decide() -> None:
    for count in (3, 8, 9):
        first, others = split_windows(torch.arange(count))
        assert len(first) == count // 3 and torch.equal(
            torch.cat([first, others]), torch.arange(count)
        )
        recipe = Recipe(allocate={"name": "search", "windows": count})
        assert tries(recipe) == [(len(first), 7), (len(others), 4)]
    assert tries(Recipe(allocate={"name": "search", "windows": 2})) == [(2, 7), (2, 4)]
    assert tries(Recipe(allocate="owl")) == []


# What is chosen


def test_the_nearest_to_the_dense_model_is_chosen() -> None:
    found = {UNIFORM: [1.0, 2.0, 3.0], "near": [0.9, 1.9, 2.8], "nearest": [0.8, 1.7, 2.9]}
    assert choose(found) == "nearest"


def test_what_is_better_by_chance_is_not_chosen() -> None:
    """Mean gain 0.1, standard error of the three gains 0.458."""
    assert choose({UNIFORM: [1.0, 2.0, 3.0], "lucky": [0.0, 2.5, 3.2]}) == UNIFORM


def test_equal_shares_win_a_tie_and_where_one_window_is_all_there_is() -> None:
    assert choose({UNIFORM: [1.0, 2.0], "same": [1.0, 2.0]}) == UNIFORM
    assert choose({UNIFORM: [2.0], "better": [1.0]}) == UNIFORM


def test_a_model_that_breaks_down_is_not_chosen() -> None:
    nothing, endless = float("nan"), float("inf")
    assert choose({UNIFORM: [1.0, 2.0], "broken": [nothing, 0.1]}) == UNIFORM
    assert choose({UNIFORM: [nothing, 2.0], "broken": [0.5, 0.1]}) == UNIFORM
    assert choose({UNIFORM: [endless, endless], "finite": [0.5, 0.1]}) == UNIFORM


# How it is judged


def test_the_divergence_is_that_of_a_model_pruned_with_these_counts() -> None:
    """Against the forward passes of whole models, in double precision."""
    model, pruned = families.model(), families.model()
    norms, counts = dict[str, Tensor](), dict[str, int]()
    for number, matrix in enumerate(find_layout(pruned).all_matrices()):
        name, (rows, columns) = matrix.name, matrix.weight.shape
        norms[name], counts[name] = torch.linspace(1, 2, columns), rows * columns // 2 + number
        matrix.apply(masks.keep_count(matrix.weight.abs() * norms[name], counts[name], "row"))
    with torch.no_grad():
        dense, after = (each.double()(WINDOWS).logits.log_softmax(-1) for each in (model, pruned))
        wanted = (dense.exp() * (dense - after)).sum(-1).mean(-1)
        layout, tried = (
            find_layout(model.float()),
            {"pruned": counts, "dense": dict.fromkeys(counts, 0)},
        )
        found = Trial(layout, Blocks(layout), tried, norms, "row").run(WINDOWS, *SILENT)
    assert found["dense"] == [0.0, 0.0, 0.0]
    # a sum of two numbers about log(vocabulary), each rounded as fp32 for every token
    rounding = 8 * 5 * torch.finfo(torch.float32).eps
    assert found["pruned"] == pytest.approx(wanted.tolist(), abs=rounding)
    assert min(found["pruned"]) > 10 * rounding


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma4", "deepseek-v4"])
def test_the_search_leaves_the_model_as_it_was(family: str) -> None:
    model = families.model(family)
    before = {name: each.clone() for name, each in model.named_parameters()}
    layout = find_layout(model)
    with forward.ready(model):
        found = divide_budget(
            layout, Blocks(layout), families.tokens(4, 32), WINDOWS, SEARCH, *SILENT
        )
    assert set(found.divergence) > {UNIFORM} and found.chosen in found.divergence
    for name, each in model.named_parameters():
        assert torch.equal(each, before[name]), name


def half_empty() -> Any:
    """Half of every row is zero already: equal shares cost nothing, any other division does."""
    model = families.model()
    for matrix in find_layout(model).all_matrices():
        matrix.apply(masks.keep_by_row(matrix.weight.abs(), 0.5))
    return model


def test_where_equal_shares_are_best_they_are_chosen_and_nothing_else_changes() -> None:
    whole = {**(SEARCH.allocate or {}), "share": 1}
    recipe = SEARCH.with_changes(update="lsq", allocate=whole)
    tried, plain = half_empty(), half_empty()
    report, without = prune(tried, recipe), prune(plain, recipe.with_changes(allocate=None))
    found = report.allocation
    assert found is not None and found["chosen"] == UNIFORM
    for means in (found["divergence"], found["first"]["divergence"]):
        assert len(means) >= 3 and means[UNIFORM] == 0 < min(list(means.values())[1:])
    assert report.layers == without.layers
    for mine, theirs in zip(tried.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert "none was clearly better than equal shares" in report.notes[-1]


def test_what_was_found_is_told_and_recorded() -> None:
    told: list[str] = []
    report = prune(families.model(), tell=told.append)
    record = report.to_dict()["allocation"]
    chosen, means = record["chosen"], record["divergence"]
    assert chosen != UNIFORM and means[chosen] == min(means.values())
    first = record["first"]["divergence"]
    count = len({*means, *first})
    tried = f"Of {count} allocations, tried with 75 % of the weights they take gone,"
    assert f"{tried} {chosen} was the nearest" in report.notes[-1] and record["share"] == 0.75
    assert any(f"Trying {len(first)} allocations on 1 window:" in line for line in told)
    assert any(f"Trying {len(means)} allocations on 2 windows" in line for line in told)
    assert report.removed == report.prunable // 2
    assert report.seconds["allocate"] > 0


# Where, how and how often


@pytest.mark.parametrize("group", ["row", "layer"])
def test_two_searches_are_equal(group: str) -> None:
    recipe = SEARCH.with_changes(group=group)
    one, two = (prune(families.model(), recipe) for _ in range(2))
    assert one.allocation == two.allocation and one.layers == two.layers


def test_too_little_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda _: 10_000)
    with pytest.raises(SympruneError, match="allocations on 1 window need"):
        prune(families.model())


def job(folder: Path, output: str, recipe: Recipe = SEARCH) -> pruning.Job:
    recipe = recipe.with_changes(calibration=__file__, nsamples=4, seqlen=32)
    return pruning.Job(str(folder / "dense"), recipe, folder / output, evaluate=False)


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder / "dense")
    families.tokenizer().save_pretrained(folder / "dense")


@pytest.mark.parametrize("family", ["llama", "smollm", "gpt2", "mixtral", "gemma4"])
def test_a_streamed_model_is_searched_as_one_in_memory(family: str, tmp_path: Path) -> None:
    model = families.model(family)
    save(model, tmp_path)
    made = job(tmp_path, "out")
    record = pruning.prune(made)
    report = symprune.prune(model, families.tokenizer(), made.recipe)
    assert record["allocation"] == report.to_dict()["allocation"]
    assert len(record["allocation"]["first"]["divergence"]) > 4
    streamed = symprune.MaskSet.load(tmp_path / "out")
    assert all(torch.equal(streamed[name], keep) for name, keep in report.masks.items())


def test_a_run_that_was_killed_searches_once_and_leaves_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(families.model(), tmp_path)
    pruning.prune(job(tmp_path, "whole"))
    with monkeypatch.context() as patch:
        die_after(0, patch)
        with pytest.raises(Killed):
            pruning.prune(job(tmp_path, "out"))
    monkeypatch.setattr(Trial, "run", None)
    pruning.prune(job(tmp_path, "out"))
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_search_on_a_device_chooses_what_it_chooses_on_the_cpu(family: str) -> None:
    model = families.model(family)
    with PretendDevice() as device:
        found = prune(device.take(model))
    expected = prune(model)
    assert found.allocation is not None and expected.allocation is not None
    assert found.allocation["chosen"] == expected.allocation["chosen"]
    means = expected.allocation["divergence"]
    assert found.allocation["divergence"] == pytest.approx(means, rel=1e-3, abs=1e-6)
    assert [entry.removed for entry in found.layers] == [e.removed for e in expected.layers]


# Which windows


def test_windows_to_try_are_held_out_and_those_that_watch_stay_the_same() -> None:
    settings = (__file__, families.tokenizer(), 8, 16, 0)
    watching = held_out_tokens(*settings)
    both = held_out_tokens(*settings, 3)
    assert watching is not None and both is not None and len(both) == len(watching) + 3
    tokens = families.tokens(8, 16)
    windows, left, notes = take_windows(SEARCH, tokens, both)
    assert left is not None and torch.equal(left, watching) and not notes
    assert torch.equal(windows, both[-3:])
    assert not any(torch.equal(one, other) for one in windows for other in left)


def test_too_few_held_out_windows_are_tried_on_and_watch_both() -> None:
    few = WINDOWS[:2]
    windows, left, notes = take_windows(SEARCH, families.tokens(8, 32), few)
    assert windows is few and left is few and not notes


def test_without_held_out_text_calibration_windows_are_tried_on_and_a_note_says_so() -> None:
    tokens = families.tokens(8, 32)
    report = symprune.prune(families.model(), tokens, SEARCH)
    assert report.allocation is not None
    assert (report.allocation["windows"], report.allocation["first"]["windows"]) == (2, 1)
    assert "allocations were tried on 3 of the calibration windows" in report.notes[0]
    assert torch.equal(take_windows(SEARCH, tokens, None)[0], tokens[-3:])


def test_other_recipes_try_nothing() -> None:
    windows, left, notes = take_windows(Recipe(allocate="owl"), families.tokens(8, 32), WINDOWS)
    assert len(windows) == 0 and left is WINDOWS and not notes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"allocate": {"name": "search", "windows": 0}}, "windows must be above 0"),
        ({"allocate": {"name": "search", "spread": 0.1}}, "Allocation search has no 'spread'"),
        ({"allocate": "search", "pattern": "2:4"}, "leave out the allocation"),
    ],
)
def test_a_search_that_makes_no_sense_is_one_sentence(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SympruneError, match=sentence):
        Recipe(**options)
