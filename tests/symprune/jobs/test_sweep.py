"""Sweeps: every cell once, resumable, the same as pruning by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import families
import pytest
import torch

from symprune import calibration
from symprune.checkpoint.load import load_with_tokenizer
from symprune.engine import forward, walk
from symprune.errors import SympruneError
from symprune.eval.perplexity import perplexity
from symprune.jobs.sweep import Grid, Sweep, over_seeds, read_results

SHARED: dict[str, Any] = {
    "calibration": "builtin",
    "nsamples": 3,
    "seqlen": 32,
    "eval_data": "builtin",
    "eval_windows": 3,
}


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> tuple[Any, Any]:
    return load_with_tokenizer(str(tiny_folder), device="cpu")


def sweep(loaded: tuple[Any, Any], results: Path, **lists: Any) -> Sweep:
    return Sweep(*loaded, "tiny", Grid.from_dict({**SHARED, **lists}), results)


def test_cells_are_the_combinations_and_each_once() -> None:
    grid = Grid.from_dict(
        {
            "methods": ["magnitude", "wanda", {"name": "stochria", "beta": 0.5}],
            "sparsities": [0.5, 0.6],
            "patterns": ["2:4"],
            "alphas": [0.5, 1],
            "betas": [0.1],
            "seeds": [0, 1],
            "refinements": [None, "dsnot"],
        }
    )
    recipes = grid.recipes()
    # alphas do not apply to magnitude; betas are fixed for stochria and unknown to the others.
    assert len(recipes) == (1 + 2 + 2) * 3 * 2 * 2
    assert {r.params.get("beta") for r in recipes if r.method == "stochria"} == {0.5}


def test_a_cell_is_what_pruning_by_hand_gives(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    job = sweep(loaded, tmp_path / "r.jsonl", methods=["wanda", "ria"], refinements=[None, "dsnot"])
    results = job.run()
    for result, recipe in zip(results, job.grid.recipes(), strict=True):
        model, tokenizer = families.model("smollm"), loaded[1]
        walk.prune(model, tokenizer, recipe)
        ids = calibration.encode(tokenizer, calibration.text("builtin", "test"))
        by_hand = perplexity(model, ids, 32, 3).perplexity
        assert result["perplexity"] == pytest.approx(by_hand, rel=1e-6)


def test_finished_cells_are_not_done_again(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    first = sweep(loaded, path, methods=["wanda"]).run()
    with path.open("a") as file:
        file.write('{"key": "cut sho')
    pruned: list[str] = []
    original = walk.prune

    def counting(model: Any, data: Any, recipe: Any, *args: Any, **kwargs: Any) -> Any:
        pruned.append(recipe.method)
        return original(model, data, recipe, *args, **kwargs)

    monkeypatch.setattr(walk, "prune", counting)
    both = sweep(loaded, path, methods=["wanda", "magnitude"]).run()
    assert pruned == ["magnitude"] and both[0] == first[0]
    assert len(read_results(path)) == 2
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_the_calibration_set_is_embedded_once(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = forward.embed

    def counting(*args: Any) -> forward.Activations:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(forward, "embed", counting)
    sweep(loaded, tmp_path / "r.jsonl", methods=["wanda", "ria"], sparsities=[0.5, 0.7]).run()
    assert len(calls) == 1


def test_seeds_are_shown_as_mean_and_deviation(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    job = sweep(
        loaded,
        tmp_path / "r.jsonl",
        methods=["wanda", {"name": "stochria", "beta": 0.3}],
        seeds=[0, 1, 2],
        calibration_seed=0,
        report_error=True,
    )
    rows = over_seeds(job.run())
    assert [row["seeds"] for row in rows] == [3, 3]
    assert rows[0]["deviation"] == 0 and rows[1]["deviation"] > 0
    assert 0 < rows[0]["relative_error"] < 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"methds": []}, "did you mean methods"),
        ({"methods": "ria"}, "methods of a grid is a list"),
        ({"methods": ["rai"]}, "did you mean ri"),
        ({"sparsities": [2]}, "outside"),
        ({"methods": []}, "list of the grid is empty"),
        ({"seeds": []}, "list of the grid is empty"),
        ({"eval_windows": 0}, "eval_windows must be a whole number above 0, not 0"),
        ({"eval_windows": -1}, "eval_windows must be a whole number above 0, not -1"),
        ({"eval_windows": True}, "eval_windows must be a whole number above 0, not True"),
    ],
)
def test_a_bad_grid_says_what_is_wrong(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SympruneError, match=said):
        Grid.from_dict(values).recipes()


def test_a_bad_grid_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match=r"no\.yaml"):
        Grid.load(tmp_path / "no.yaml")
    (tmp_path / "g.yaml").write_text("[1")
    with pytest.raises(SympruneError, match=r"g\.yaml"):
        Grid.load(tmp_path / "g.yaml")


def test_a_cell_that_fails_leaves_the_model_dense_and_does_not_ask_to_load_it_again(
    tiny_folder: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_with_tokenizer(str(tiny_folder), device="cpu")
    model.model.layers[1].mlp.up_proj.weight.data.fill_(1e38)
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SympruneError, match=r"down_proj.*activations\.$"):
        sweep((model, tokenizer), tmp_path / "r.jsonl", methods=["wanda"]).run()
    assert all(torch.equal(value, dense[name]) for name, value in model.state_dict().items())


def test_seeds_are_summed_up_by_mean_and_sample_deviation() -> None:
    def cell(seed: int, perplexity: float) -> dict[str, Any]:
        recipe = {"method": "wanda", "seed": seed, "calibration_seed": seed}
        return {"recipe": recipe, "perplexity": perplexity, "seconds": float(seed)}

    (row,) = over_seeds([cell(0, 10.0), cell(1, 14.0), cell(2, 12.0)])
    assert (row["perplexity"], row["seeds"], row["seconds"]) == (12.0, 3, 1.0)
    assert row["deviation"] == pytest.approx(2.0)
    (broken,) = over_seeds([cell(0, 10.0), cell(1, math.inf)])
    assert broken["perplexity"] == math.inf and broken["deviation"] is None
