"""Every byte of a folder that symprune wrote is vouched for, and damage is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from typer.testing import CliRunner

import symprune
from symprune import Recipe
from symprune.checkpoint import packed, packed_files
from symprune.checkpoint.output_folder import save
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.tensor_files import Shards
from symprune.checkpoint.verify import verify
from symprune.cli import main
from symprune.engine import walk
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.machine import checksums


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind. The packed one has several files of weights, and one of masks, which
    its weights do not tell."""
    made = tmp_path_factory.mktemp("made")
    families.model("llama").to(torch.bfloat16).save_pretrained(
        made / "dense", max_shard_size="30KB"
    )
    families.tokenizer().save_pretrained(made / "dense")
    recipe = Recipe(calibration=__file__, nsamples=2, seqlen=16)
    pruning.prune(pruning.Job(str(made / "dense"), recipe, made / "pruned", evaluate=False))
    shutil.copytree(made / "pruned", made / "changed")
    (made / "changed" / "checksums.json").unlink()
    masks = symprune.MaskSet.load(made / "pruned")
    name = next(iter(masks))
    masks[name] = torch.ones_like(masks[name])
    masks.save(made / "changed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_files, "LARGEST_FILE", 20_000)
        packed.pack(made / "changed", made / "packed")
    packed.unpack(made / "packed", made / "unpacked")
    grid = recipe.with_changes(values="int4")
    pruning.prune(pruning.Job(str(made / "dense"), grid, made / "coded", evaluate=False))
    model = families.model("llama")
    report = walk.prune(model, families.tokens(), recipe)
    save(made / "saved", model, families.tokenizer(), report.to_dict(), report.masks)
    return made


KINDS = ("pruned", "packed", "unpacked", "coded", "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_listed_with_its_size_and_checksum(kind: str, folders: Path) -> None:
    listed = json.loads((folders / kind / "checksums.json").read_text())["files"]
    files = {path.name: path.read_bytes() for path in (folders / kind).iterdir()}
    del files["checksums.json"]
    assert {"config.json", "tokenizer.json", "symprune.json"} <= files.keys()
    assert listed.keys() == files.keys()
    for name, content in files.items():
        assert listed[name]["size"] == len(content)
        assert listed[name]["sha256"] == hashlib.sha256(content).hexdigest()
    verdict = verify(folders / kind)
    assert verdict.is_whole and verdict.findings == [] and verdict.files == len(files)


Damage = Callable[[], None]


def damages(folder: Path) -> Iterator[tuple[str, str, Damage]]:
    """What is done to which file, and doing it; what was there is put back by the caller."""
    for path in sorted(each for each in folder.iterdir() if each.name != "README.md"):
        content, name = path.read_bytes(), path.name
        for what, place in (("first", 0), ("middle", len(content) // 2), ("last", -1)):
            flipped = bytearray(content)
            flipped[place] ^= 4
            yield name, f"the {what} byte", lambda p=path, c=bytes(flipped): p.write_bytes(c)
        yield name, "cut", lambda p=path, c=content: p.write_bytes(c[:-2])
        yield name, "longer", lambda p=path, c=content: p.write_bytes(c + b"}")
        yield name, "emptied", lambda p=path: p.write_bytes(b"")
        yield name, "deleted", path.unlink
        yield name, "renamed", lambda p=path: p.rename(p.with_name(f"other-{p.name}"))
        if path.suffix == ".json":
            for what, text in altered(json.loads(content)):
                yield name, what, lambda p=path, t=text: p.write_text(t)
        if path.suffix == ".safetensors":
            for what, header in altered_headers(content):
                yield name, what, lambda p=path, c=header: p.write_bytes(c)


def altered(value: Any) -> Iterator[tuple[str, str]]:
    """A JSON file with each of its keys removed, renamed or given another value in turn."""
    root = {"": value}
    for parent, key, path in [(root, "", ""), *walk_json(value)]:
        was = parent[key]
        for what, other in (("other", changed(was)), ("none", None)):
            if other == was:
                continue
            parent[key] = other
            yield f"{path}: {what}", json.dumps(root[""], indent=1) + "\n"
            parent[key] = was
        if path and isinstance(parent, dict):
            del parent[key]
            yield f"{path}: removed", json.dumps(value, indent=1) + "\n"
            parent[f"{key}x"] = was
            yield f"{path}: renamed", json.dumps(value, indent=1) + "\n"
            del parent[f"{key}x"]
            parent[key] = was


def walk_json(value: Any, path: str = "", depth: int = 2) -> Iterator[tuple[Any, Any, str]]:
    """Every place in a value, some levels deep: what holds it, its key, and the way to it."""
    keys = list(value) if isinstance(value, dict) else range(len(value) * isinstance(value, list))
    for key in keys:
        yield value, key, f"{path}.{key}"
        if depth > 1 and isinstance(value[key], dict | list):
            yield from walk_json(value[key], f"{path}.{key}", depth - 1)


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else []


def altered_headers(content: bytes) -> Iterator[tuple[str, bytes]]:
    """A safetensors file that says something else of each of its tensors."""
    length = int.from_bytes(content[:8], "little")
    described, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    same_size = {"BF16": "F16", "F16": "BF16", "U8": "I8", "F32": "I32"}

    def written() -> bytes:
        text = json.dumps(described, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text + data

    for name in [name for name in described if name != "__metadata__"]:
        about = described[name]
        described[name] = {**about, "dtype": same_size[about["dtype"]]}
        yield f"{name}: dtype", written()
        described[name] = {**about, "shape": [1, *about["shape"]]}
        yield f"{name}: shape", written()
        described[name] = about
        described[f"{name}x"] = described.pop(name)
        yield f"{name}: name", written()
        described[name] = described.pop(f"{name}x")
    described["__metadata__"] = {**described.get("__metadata__", {}), "format": "tf"}
    yield "metadata", written()


def is_refused(act: Callable[[], object]) -> bool:
    try:
        act()
    except SympruneError as error:
        return "\n" not in str(error)
    return False


def test_no_damage_to_a_packed_folder_goes_unnoticed(folders: Path, tmp_path: Path) -> None:
    """`verify` finds all of it, `unpack` goes on with none, and nothing is loaded where what says
    which weights there are is not as it was."""
    folder, out = tmp_path / "packed", tmp_path / "out"
    shutil.copytree(folders / "packed", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len([name for name in before if name.startswith("model-")]) > 1
    assert "masks.safetensors" in before and verify(folder).is_whole
    unnoticed, tried = [], 0
    for name, what, do in damages(folder):
        do()
        tried += 1
        if not is_refused(lambda: _fail_unless_whole(folder)):
            unnoticed.append(f"verify: {name}: {what}")
        if not is_refused(lambda: packed.unpack(folder, out)) and not forgets(name, what):
            unnoticed.append(f"unpack: {name}: {what}")
        if decides(name, what) and not is_refused(lambda: open_shards(folder)):
            unnoticed.append(f"load: {name}: {what}")
        shutil.rmtree(out, ignore_errors=True)
        for path in folder.iterdir():
            if path.name not in before:
                path.unlink()
        (folder / name).write_bytes(before[name])
    assert unnoticed == []
    assert tried > 300 and verify(folder).is_whole


def forgets(name: str, what: str) -> bool:
    """Whether a folder is as one of an earlier version, which has no list."""
    return name == "checksums.json" and what in ("deleted", "renamed")


def decides(name: str, what: str) -> bool:
    """Whether it changes which weights there are, before any is read. (Without `packed.json` a
    folder is a packed model that was saved from memory, with the same weights.)"""
    if name.endswith(".safetensors"):
        return what not in ("the middle byte", "the last byte")
    if name == "packed.json":
        return what not in ("deleted", "renamed")
    return name in ("config.json", "model.safetensors.index.json")


def _fail_unless_whole(folder: Path) -> None:
    verdict = verify(folder)
    if not verdict.is_whole:
        raise SympruneError(verdict.describe())


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_that_are_damaged_are_named(kind: str, folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders / kind, folder)
    (folder / "tokenizer.json").unlink()
    config = folder / "config.json"
    config.write_text(config.read_text().replace("silu", "gelu"))
    weights = next(folder.glob("model*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    (folder / "notes.md").write_text("mine")
    (folder / "README.md").write_text("mine")
    (folder / "adapter_config.json").write_text("{}")
    verdict = verify(folder)
    assert verdict.named(checksums.MISSING) == ["tokenizer.json"]
    assert verdict.named(checksums.CHANGED) == ["config.json", weights.name]
    assert verdict.named(checksums.ADDED) == ["adapter_config.json"]
    assert verdict.named(checksums.EXTRA) == ["notes.md"]
    assert verdict.named(checksums.EDITED) == ["README.md"]
    assert bool(verdict.tensors) == (kind in ("packed", "coded"))


def command(*arguments: object) -> tuple[int, str]:
    """A command as the console script runs it: its exit code and what it printed."""
    result = CliRunner().invoke(main.app, ["verify", *map(str, arguments)])
    if isinstance(result.exception, SympruneError):
        return 2, result.output + str(result.exception)
    return result.exit_code, result.output


def test_the_command_says_what_is_the_matter(folders: Path, tmp_path: Path) -> None:
    folder, found = tmp_path / "model[b]", tmp_path / "found.json"
    shutil.copytree(folders / "pruned", folder)
    (folder / "notes[b].txt").write_text("mine")
    code, said = command(folder, "--json", found)
    assert code == 0 and "notes[b].txt" in said and "all as symprune wrote them" in said
    assert json.loads(found.read_text())["whole"] is True
    (folder / "config.json").write_text("{}")
    (folder / "masks.safetensors").unlink()
    code, said = command(folder, "--json", found)
    assert code == 2 and "1 file missing, 1 file changed." in said
    told = json.loads(found.read_text())
    assert told["whole"] is False
    assert (told["missing"], told["changed"]) == (["masks.safetensors"], ["config.json"])
    code, said = command(folders / "dense")
    assert code == 2 and "has no checksums.json" in said
    code, said = command(tmp_path / "nowhere")
    assert code == 2 and "There is no folder" in said


def test_packed_weights_that_make_no_sense_are_found_although_their_checksums_match(
    folders: Path, tmp_path: Path
) -> None:
    """As a packer with a fault would leave them."""
    folder = tmp_path / "packed"
    shutil.copytree(folders / "coded", folder)
    stored = Shards(folder)
    entry = next(entry for entry in stored.entries.values() if entry.dtype == "U8")
    path = folder / entry.file
    content = bytearray(path.read_bytes())
    content[entry.start + 70] ^= 0xFF
    path.write_bytes(content)
    manifest = json.loads((folder / "packed.json").read_text())
    manifest["checksums"][entry.name] = checksums.checksum(Shards(folder).read(entry.name))
    (folder / "packed.json").write_text(json.dumps(manifest))
    checksums.write_checksums(folder)
    verdict = verify(folder)
    assert not verdict.findings and not verdict.is_whole
    assert "damaged" in verdict.tensors[0] and "make no sense" in verdict.describe()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "a\0b", ""])
def test_a_list_names_only_files_of_its_folder(name: str, tmp_path: Path) -> None:
    files = {name: {"size": 1, "sha256": "0", "header": None}}
    about = {"format": checksums.FORMAT, "version": 1, "list": checksums._digest_of(files)}
    (tmp_path / "checksums.json").write_text(json.dumps({**about, "files": files}))
    with pytest.raises(SympruneError, match="is not a file beside it"):
        verify(tmp_path)


def test_masks_are_not_taken_from_damaged_weights(folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(folders / "coded", folder)
    entry = next(e for e in Shards(folder).entries.values() if e.dtype == "U8")
    content = bytearray((folder / entry.file).read_bytes())
    content[entry.start + entry.size // 2] ^= 1
    (folder / entry.file).write_bytes(content)
    with pytest.raises(SympruneError, match=r"checksum of .* does not match"):
        symprune.MaskSet.load(folder)
    with pytest.raises(SympruneError, match="is corrupt: its checksum does not match"):
        symprune.load(folder)


def test_force_replaces_a_damaged_folder_but_not_what_was_added_to_it(
    folders: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    packed.pack(folders / "pruned", out)
    (out / "config.json").unlink()
    (out / "notes.txt").write_text("precious")
    with pytest.raises(SympruneError, match=r"holds notes\.txt, which symprune did not write"):
        packed.pack(folders / "pruned", out, force=True)
    (out / "notes.txt").unlink()
    packed.pack(folders / "pruned", out, force=True)
    (out / "checksums.json").write_text("{")
    packed.pack(folders / "pruned", out, force=True)
    assert verify(out).is_whole
