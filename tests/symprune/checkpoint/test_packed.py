"""Packing loses nothing, is as small as promised, and notices every flipped bit."""

from __future__ import annotations

import json
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import symprune
from symprune import Recipe, masks
from symprune.checkpoint import packed, sparse_codes
from symprune.cli import main
from symprune.errors import SympruneError
from symprune.jobs import pruning


def pruned(folder: Path, family: str = "llama", dtype: str = "bfloat16", **recipe: object) -> Path:
    dense = folder / "dense"
    model = families.model(family).to(getattr(torch, dtype))
    model.save_pretrained(dense, max_shard_size="30KB")
    families.tokenizer().save_pretrained(dense)
    chosen = Recipe(calibration=__file__, nsamples=2, seqlen=16, **recipe)  # type: ignore[arg-type]
    pruning.prune(pruning.Job(str(dense), chosen, folder / "pruned", evaluate=False))
    return folder / "pruned"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", ["llama", "smollm", "gpt2", "mixtral"])
@pytest.mark.parametrize("amount", [{"sparsity": 0.5}, {"pattern": "2:4"}, {"sparsity": 0.9}])
def test_unpack_restores_every_byte_and_load_every_weight(
    family: str, amount: dict[str, object], tmp_path: Path
) -> None:
    folder = pruned(tmp_path, family, **amount)
    packed.pack(folder, tmp_path / "packed")
    packed.unpack(tmp_path / "packed", tmp_path / "again")
    assert files(tmp_path / "again") == files(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    loaded = symprune.load(tmp_path / "packed")
    assert loaded.state_dict().keys() == expected.keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]) and value.dtype == torch.bfloat16, name
    assert not loaded.training and loaded.generate(torch.tensor([[1, 5]]), max_new_tokens=2).numel()


@pytest.mark.parametrize(
    ("how", "limit"), [("half", 0.57), ("2:4", 0.55), ("1:4", 0.29), ("dense", 1.01)]
)
def test_a_pruned_16_bit_matrix_is_as_small_as_promised(
    how: str, limit: float, tmp_path: Path
) -> None:
    weight = torch.randn(512, 768, generator=torch.Generator().manual_seed(0))
    score = weight.abs()
    if how == "half":
        weight.masked_fill_(~masks.keep_by_layer(score, 0.5), 0)
    elif how != "dense":
        weight.masked_fill_(~masks.keep_n_of_m(score, masks.Pattern.parse(how)), 0)
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text("{}")
    save_file({"layers.0.weight": weight.half()}, dense / "model.safetensors")
    packed.pack(dense, tmp_path / "packed")
    before = (dense / "model.safetensors").stat().st_size
    after = sum(path.stat().st_size for path in (tmp_path / "packed").glob("*.safetensors"))
    assert after <= limit * before
    packed.unpack(tmp_path / "packed", tmp_path / "again")
    assert files(tmp_path / "again") == files(dense)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    item=st.sampled_from([1, 2, 4, 8]),
    share=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0]),
    how=st.sampled_from(["any", "2:4", "4:8", "1:4", "1:2", "2:4T", "4:8T", "1:4T", "1:2T"]),
)
def test_any_array_comes_back(
    rows: int, groups: int, seed: int, item: int, share: float, how: str
) -> None:
    chance = np.random.default_rng(seed)
    shape = (2, rows, 8 * groups)
    data = chance.integers(1, 200, shape).astype(sparse_codes.INTEGERS[item])
    data *= (chance.random(shape) < share).astype(data.dtype)
    if how != "any":
        n, m = (int(part) for part in how.removesuffix("T").split(":"))
        rank = chance.random((*shape[:-1], shape[-1] // m, m)).argsort(-1).argsort(-1)
        data *= (rank < n).reshape(shape).astype(data.dtype)
        if how.endswith("T"):
            data = np.ascontiguousarray(data.swapaxes(-1, -2))
        hows = [how, sparse_codes.BITMASK]
    else:
        found = sparse_codes.choose(sparse_codes.nonzero(data), item)
        hows = [sparse_codes.BITMASK, *([found[0]] if found else [])]
    for code in hows:
        values, places = sparse_codes.encode(data, code)
        again = sparse_codes.decode(values, places, data.shape, code)
        assert np.array_equal(again, data) and again.dtype == data.dtype


def test_minus_zero_is_a_value_of_its_own() -> None:
    weight = torch.tensor([[0.0, -0.0, 1.0, 0.0]]).half()
    data = packed._integers(weight)
    values, places = sparse_codes.encode(data, sparse_codes.BITMASK)
    assert len(values) == 2
    assert np.array_equal(sparse_codes.decode(values, places, (1, 4), "mask"), data)


def test_masks_that_the_weights_tell_take_no_room(tmp_path: Path) -> None:
    folder = pruned(tmp_path)
    packed.pack(folder, tmp_path / "packed")
    stored = packed.Shards(tmp_path / "packed", [packed.MASKS])
    assert (
        len(stored.entries) == 0 and len(packed.Shards(folder, ["masks.safetensors"]).entries) == 14
    )
    name = "model.layers.0.mlp.up_proj.weight"
    weights = packed.Shards(folder)
    file = packed.OutputFile(
        folder / weights.entries[name].file, weights.headers[weights.entries[name].file].raw
    )
    file.write(name, torch.zeros(weights.entries[name].shape, dtype=torch.bfloat16))
    file.close()
    packed.pack(folder, tmp_path / "other")
    assert list(packed.Shards(tmp_path / "other", [packed.MASKS])) == [name]
    packed.unpack(tmp_path / "other", tmp_path / "again")
    assert files(tmp_path / "again") == files(folder)


def test_every_damage_is_found_and_named(tmp_path: Path) -> None:
    folder = pruned(tmp_path)
    packed.pack(folder, tmp_path / "packed")
    path = sorted((tmp_path / "packed").glob("packed-*-of-*"))[0]
    whole, header = path.read_bytes(), packed.Shards(tmp_path / "packed", [path.name]).headers
    for entry in header[path.name].entries:
        broken = bytearray(whole)
        broken[entry.start + entry.size // 2] ^= 4
        path.write_bytes(broken)
        name = entry.name.partition(":")[0]
        with pytest.raises(SympruneError, match=rf"^{name} in .*{path.name} is corrupt"):
            symprune.load(tmp_path / "packed")
        with pytest.raises(SympruneError, match=rf"^{name} in .*{path.name} is corrupt"):
            packed.unpack(tmp_path / "packed", tmp_path / "again")
        assert not (tmp_path / "again").exists()
    path.write_bytes(whole[:-5])
    with pytest.raises(SympruneError, match=rf"{path.name} is a corrupt safetensors file"):
        symprune.load(tmp_path / "packed")


def test_commands_take_a_packed_model(tmp_path: Path) -> None:
    folder = pruned(tmp_path)
    runner = CliRunner()
    shown = runner.invoke(main.app, ["pack", str(folder), str(tmp_path / "packed")])
    assert shown.exit_code == 0 and "%" in shown.output
    options = ["--data", __file__, "--seqlen", "32", "--windows", "2"]
    results = []
    for name in (folder, tmp_path / "packed"):
        out = tmp_path / "result.json"
        command = ["eval", "--model", str(name), *options, "--json", str(out)]
        assert runner.invoke(main.app, command, catch_exceptions=False).exit_code == 0
        results.append(json.loads(out.read_text())["perplexity"])
    assert results[0] == results[1]
    shown = runner.invoke(main.app, ["inspect", str(tmp_path / "packed")])
    assert "50.00 %" in shown.output
    chosen = Recipe(calibration=__file__, nsamples=2, seqlen=16, sparsity=0.75)
    pruning.prune(pruning.Job(str(tmp_path / "packed"), chosen, tmp_path / "more", evaluate=False))
    pruning.prune(pruning.Job(str(folder), chosen, tmp_path / "same", evaluate=False))
    for path in (tmp_path / "more").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "same" / path.name).read_bytes()
    with pytest.raises(SympruneError, match="not a folder with a model"):
        packed.pack(tmp_path / "packed", tmp_path / "twice")
    with pytest.raises(SympruneError, match="not a packed checkpoint"):
        packed.unpack(folder, tmp_path / "nothing")
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
