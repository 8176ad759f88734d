"""Packing loses nothing, is as small as promised, and notices every flipped bit."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
import torch
from typer.testing import CliRunner

from symprune import Recipe
from symprune.checkpoint import packed, packed_files
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.tensor_files import OutputFile, Shards
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


FAMILIES = ["llama", "smollm", "gpt2", "mixtral"]
AMOUNTS = [{"sparsity": 0.5}, {"pattern": "2:4"}, {"sparsity": 0.9}]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("amount", AMOUNTS)
def test_unpack_restores_every_byte(family: str, amount: dict[str, object], tmp_path: Path) -> None:
    folder = pruned(tmp_path, family, **amount)
    packed.pack(folder, tmp_path / "packed")
    stored = Shards(tmp_path / "packed")
    assert sum("packed" in name for name in stored) >= 8
    packed.unpack(tmp_path / "packed", tmp_path / "again")
    assert files(tmp_path / "again") == files(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_checkpoint_reads_like_the_plain_one(family: str, tmp_path: Path) -> None:
    folder = pruned(tmp_path, family)
    packed.pack(folder, tmp_path / "packed")
    plain, view = Shards(folder), open_shards(tmp_path / "packed")
    assert view.files == plain.files and list(view) == list(plain)
    for name in reversed(list(plain)):
        assert torch.equal(view.read(name), plain.read(name))


def test_a_checkpoint_without_zeros_is_packed_as_it_is(tmp_path: Path) -> None:
    pruned(tmp_path)
    packed.pack(tmp_path / "dense", tmp_path / "packed")
    assert set(Shards(tmp_path / "packed")) == set(Shards(tmp_path / "dense"))
    packed.unpack(tmp_path / "packed", tmp_path / "again")
    for added in ("checksums.json", "README.md"):
        (tmp_path / "again" / added).unlink()
    assert files(tmp_path / "again") == files(tmp_path / "dense")


def test_small_files_become_one_and_large_ones_are_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pruned(tmp_path)
    assert len(Shards(folder).files) > 1
    packed.pack(folder, tmp_path / "one")
    assert Shards(tmp_path / "one").files == ["model.safetensors"]
    monkeypatch.setattr(packed_files, "LARGEST_FILE", 20_000)
    packed.pack(folder, tmp_path / "several")
    assert len(Shards(tmp_path / "several").files) > 1
    packed.unpack(tmp_path / "several", tmp_path / "again")
    assert files(tmp_path / "again") == files(folder)


def test_masks_that_the_weights_tell_take_no_room(tmp_path: Path) -> None:
    folder = pruned(tmp_path)
    packed.pack(folder, tmp_path / "packed")
    assert not (tmp_path / "packed" / "masks.safetensors").exists()
    name = "model.layers.0.mlp.up_proj.weight"
    weights = Shards(folder)
    entry = weights.entries[name]
    file = OutputFile(folder / entry.file, weights.headers[entry.file].raw)
    file.write(name, torch.zeros(entry.shape, dtype=torch.bfloat16))
    file.close()
    with pytest.raises(SympruneError, match=f"{entry.file} is changed"):
        packed.pack(folder, tmp_path / "other")
    (folder / "checksums.json").unlink()
    packed.pack(folder, tmp_path / "other")
    assert (tmp_path / "other" / "masks.safetensors").exists()
    packed.unpack(tmp_path / "other", tmp_path / "again")
    (tmp_path / "again" / "checksums.json").unlink()
    assert files(tmp_path / "again") == files(folder)


def test_every_damage_is_found_and_named(tmp_path: Path) -> None:
    folder = pruned(tmp_path)
    packed.pack(folder, tmp_path / "packed")
    path = tmp_path / "packed" / "model.safetensors"
    whole, entries = path.read_bytes(), Shards(tmp_path / "packed").entries
    for entry in filter(lambda entry: entry.size, entries.values()):
        broken = bytearray(whole)
        broken[entry.start + entry.size // 2] ^= 4
        path.write_bytes(broken)
        with pytest.raises(SympruneError, match=rf"^{entry.name} in .*{path.name} is corrupt"):
            packed.unpack(tmp_path / "packed", tmp_path / "again")
        assert not (tmp_path / "again").exists()
    path.write_bytes(whole[:-5])
    with pytest.raises(SympruneError, match=rf"{path.name} is a corrupt safetensors file"):
        packed.unpack(tmp_path / "packed", tmp_path / "again")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 7}, "version 7 of the format"),
        ({"format": "else"}, "is corrupt: it is no manifest"),
        ({"files": {"a": "{"}}, "is corrupt"),
        ({"places": {"a": []}}, "is corrupt"),
        ({"new": 1}, "is corrupt"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_one_sentence(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    packed.pack(pruned(tmp_path), tmp_path / "packed")
    manifest = tmp_path / "packed" / "packed.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(SympruneError, match=said):
        packed.unpack(tmp_path / "packed", tmp_path / "again")
    assert not (tmp_path / "again").exists()


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
    with pytest.raises(SympruneError, match="not a folder with a plain model"):
        packed.pack(tmp_path / "packed", tmp_path / "twice")
    with pytest.raises(SympruneError, match="not a packed checkpoint"):
        packed.unpack(folder, tmp_path / "nothing")
