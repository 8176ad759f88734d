"""Recipes, grids, results of sweeps and packed matrices that are nearly right: read or refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fuzzing import EXAMPLES, changed, damaged, fuzz
from hypothesis import strategies as st

from symprune.errors import SympruneError
from symprune.eval import tables
from symprune.jobs import sweep
from symprune.recipe import Recipe
from symprune.runtime import blob
from symprune.validation import parse_assignments

RECIPE = {
    "method": "symwanda",
    "params": {"alpha": 0.5, "squared": True, "balance": 1.0},
    "sparsity": 0.5,
    "group": "layer",
    "refine": {"name": "r2-dsnot", "preset": "ria", "max_cycles": 5, "gamma1": 0.1},
    "update": {"name": "lsq", "iters": 3, "damping": 0.01},
    "allocate": {"name": "owl", "spread": 0.05},
    "values": {"name": "int4", "solve": "gptq", "sweeps": 2},
    "values_head": "int8",
    "token_limit": 3.0,
    "calibration": "builtin",
    "nsamples": 4,
    "seqlen": 32,
    "seed": 1,
    "calibration_seed": 2,
    "bos": "auto",
}
GRID = {
    "methods": ["wanda", {"name": "ria", "alpha": 0.3}],
    "alphas": [0.5, 1.0],
    "sparsities": [0.5, 0.6],
    "patterns": ["2:4"],
    "groups": ["row", "layer"],
    "refinements": [None, "dsnot"],
    "values": [None, "int8"],
    "seeds": [0, 1],
    "calibration": "builtin",
    "nsamples": 2,
    "eval_windows": 1,
}


def texts(good: Any) -> st.SearchStrategy[bytes]:
    """YAML files that are nearly this one."""
    text = yaml.safe_dump(good).encode()
    plain = changed(good).map(lambda value: json.dumps(value).encode())
    return plain | damaged(text)


@EXAMPLES
def test_a_recipe_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        recipe = Recipe.load(file)
        assert recipe.describe() and Recipe.from_dict(recipe.to_dict()) == recipe

    file.write_text(yaml.safe_dump(RECIPE))
    assert Recipe.load(file).method == "symwanda"
    fuzz(read, texts(RECIPE), examples)


@EXAMPLES
def test_a_grid_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        sweep.Grid.load(file).recipes()

    assert len(sweep.Grid.from_dict(GRID).recipes()) > 30
    fuzz(read, texts(GRID), examples)


@EXAMPLES
def test_what_is_assigned_on_the_command_line_is_read_or_refused(examples: int) -> None:
    fuzz(lambda text: parse_assignments([text]), st.text(max_size=30), examples)
    values = damaged(b"alpha=[0.1, {x: 1e-3}, yes, ~]").map(lambda data: data.decode("latin-1"))
    fuzz(lambda text: parse_assignments([text]), values, examples)


@pytest.fixture(scope="module")
def cell() -> dict[str, Any]:
    return {
        "key": "0123456789abcdef",
        "model": "tiny",
        "recipe": {"method": "wanda", "sparsity": 0.5, "seed": 0},
        "description": "wanda",
        "data": "builtin",
        "windows": 2,
        "seqlen": 32,
        "bos": {"setting": "auto", "token": None},
        "dense": 20.0,
        "perplexity": 25.0,
        "sparsity": 0.5,
        "seconds": 1.0,
    }


@EXAMPLES
def test_the_results_of_a_sweep_are_read_or_refused(
    examples: int, cell: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "sweep.jsonl"
    line = json.dumps(cell).encode() + b"\n"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        sweep.check_results(file)
        found = list(sweep.read_results(file).values())
        if found:
            tables.sweep(sweep.over_seeds(found))

    lines = changed(cell).map(lambda value: line + json.dumps(value).encode() + b"\n")
    fuzz(read, lines | damaged(2 * line), examples)
    file.write_bytes(line)
    assert sweep.read_results(file) == {cell["key"]: cell}


@pytest.mark.parametrize("masked", [False, True])
@EXAMPLES
def test_a_packed_matrix_is_expanded_or_refused(examples: int, masked: bool) -> None:
    """By the compiled check and by the one in numpy alike."""
    codes = torch.randint(0, 16, (20, 70), dtype=torch.uint8)
    keep = torch.rand(20, 70) < 0.5 if masked else None
    scales = torch.ones(20, 2, dtype=torch.bfloat16)
    good = blob.encode_codes([(codes, scales, keep)], "int4")

    def read(data: bytes) -> None:
        if not data:
            return
        packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        blob.check(packed)
        decoded = blob.decode(packed, torch.float32)
        assert torch.isfinite(decoded).all() and decoded.shape == blob.describe(packed).shape
        assert blob.keep_mask(packed).shape == decoded.shape
        with contextlib.suppress(SympruneError):  # floats have no codes
            blob.decode_codes(packed)

    fuzz(read, damaged(good.numpy().tobytes()), examples)
