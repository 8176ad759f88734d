"""A model folder, recipe, mask file, packed file or grid from a stranger can do no harm."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from symprune import MaskSet, criteria
from symprune.checkpoint.tensor_files import parse_header, read_header
from symprune.cli import main
from symprune.errors import SympruneError
from symprune.fed.pruning.remote import Task
from symprune.models import hub
from symprune.models.support import check_sizes
from symprune.recipe import Recipe

SMALL = [
    "--calibration",
    "builtin",
    "--nsamples",
    "2",
    "--seqlen",
    "32",
    "--no-eval",
    "--no-samples",
]
BAD_NAMES = (
    "../victim.safetensors", "/tmp/victim.safetensors", "a/b.safetensors", "..", "", ".safetensors",
    "config.json", "a\\b.safetensors", "a\0b.safetensors", "x" * 300 + ".safetensors", 7, None,
)  # fmt: skip


def symprune(*arguments: str | Path) -> str:
    """Run a command in this process; a sentence for the user comes as its exception."""
    result = CliRunner().invoke(main.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refuse(*arguments: str | Path, said: str) -> None:
    with pytest.raises(SympruneError, match=said) as caught:
        symprune(*arguments)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files."""
    folder = tmp_path_factory.mktemp("models") / "shards"
    families.model("smollm").save_pretrained(folder, max_shard_size="40KB")
    families.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("packed")
    symprune("prune", "--model", shards, "-o", made / "pruned", *SMALL)
    symprune("pack", made / "pruned", made / "packed")
    return made / "packed"


def change(path: Path, how: Callable[[Any], None]) -> None:
    """Change what a JSON file says."""
    plain = json.loads(path.read_text())
    how(plain)
    path.write_text(json.dumps(plain))


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:30])
def test_an_index_names_only_files_beside_it(name: Any, shards: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shards, model)
    victim = tmp_path / "victim.safetensors"
    shutil.copyfile(next(shards.glob("*.safetensors")), victim)
    before = victim.read_bytes()

    def rename(index: dict[str, Any]) -> None:
        index["weight_map"][next(iter(index["weight_map"]))] = name

    change(model / "model.safetensors.index.json", rename)
    for command in (
        ("prune", "--model", model, "-o", tmp_path / "out", *SMALL),
        ("inspect", model),
        ("pack", model, tmp_path / "out"),
    ):
        refuse(*command, said=r"index\.json names .* is not a \.safetensors file beside it")
    assert victim.read_bytes() == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:30])
def test_a_packed_folder_names_only_files_beside_it(
    name: Any, packed: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(packed, model)

    def rename(manifest: dict[str, Any]) -> None:
        first = next(iter(manifest["files"]))
        manifest["files"][name] = manifest["files"].pop(first)
        manifest["index"] = None

    change(model / "packed.json", rename)
    for command in (
        ("unpack", model, out),
        ("prune", "--model", model, "-o", out, *SMALL),
    ):
        refuse(*command, said=r"packed\.json names .* is not a \.safetensors file beside it")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


BAD_MANIFESTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a negative row": lambda m: m["places"][next(iter(m["places"]))].__setitem__(2, -1),
    "a float row": lambda m: m["places"][next(iter(m["places"]))].__setitem__(2, 1.5),
    "a file that is no text": lambda m: m["files"].update({"x.safetensors": 7}),
    "a configuration that is none": lambda m: m.update(config="[]"),
    "an index of other files": lambda m: m.update(index='{"weight_map": {"a": "../b"}}'),
    "masks that are none": lambda m: m.update(masks="{}"),
    "masks of absurd size": lambda m: m.update(masks=_masks(2**40)),
    "masks without shapes": lambda m: m.update(masks='{"__metadata__": {}}'),
    "a field more": lambda m: m.update(more=1),
    "checksums that are a list": lambda m: m.update(checksums=[]),
    "a shape that is negative": lambda m: _reshape(m, "[-32,-32]"),
    "a shape that is a fraction": lambda m: _reshape(m, "[32.0,32]"),
}


def _masks(size: int) -> str:
    shapes = json.dumps({"w": [8, size]})
    about = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    return json.dumps({"__metadata__": {"shapes": shapes}, "w": about})


def _reshape(manifest: dict[str, Any], shape: str) -> None:
    files = manifest["files"]
    for name in files:
        files[name] = files[name].replace("[32,32]", shape)


@pytest.mark.parametrize("what", BAD_MANIFESTS)
def test_a_manifest_that_makes_no_sense_is_a_sentence(
    what: str, packed: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(packed, model)
    change(model / "packed.json", BAD_MANIFESTS[what])
    refuse("unpack", model, tmp_path / "out", said=r"packed\.json is corrupt")


def header(**about: Any) -> bytes:
    described = {"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | about}
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "about",
    [
        {"shape": [-2, -2]},
        {"shape": [2.0, 2]},
        {"shape": [True, 4]},
        {"shape": [2**62, 0], "data_offsets": [0, 0]},
        {"shape": "22"},
        {"data_offsets": [0.0, 16.0]},
        {"data_offsets": ["0", "16"]},
        {"dtype": ["F32"]},
    ],
    ids=str,
)
def test_a_header_with_sizes_that_are_none_is_corrupt(
    about: dict[str, Any], tmp_path: Path
) -> None:
    parse_header(header(), "x")
    (tmp_path / "x.safetensors").write_bytes(header(**about) + b"\0" * 16)
    with pytest.raises(SympruneError, match="is a corrupt safetensors file"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("file", ["header", "index", "record", "packed", "config"])
def test_deep_nesting_is_a_sentence(file: str, packed: Path, shards: Path, tmp_path: Path) -> None:
    model, deep = tmp_path / "model", "[" * 200_000
    shutil.copytree(packed if file == "packed" else shards, model)
    if file == "header":
        text = deep.encode()
        path = next(model.glob("*.safetensors"))
        path.write_bytes(len(text).to_bytes(8, "little") + text)
    else:
        names = {"index": "model.safetensors.index.json", "record": "symprune.json"}
        names |= {"packed": "packed.json", "config": "config.json"}
        (model / names[file]).write_text(deep)
    refuse("inspect", model, said="corrupt|not a readable|is not JSON")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**7),
        ("num_hidden_layers", 10**13),
        ("num_hidden_layers", 2.5),
        ("hidden_size", -32),
        ("intermediate_size", 10**18),
        ("vocab_size", 1e9),
    ],
)
def test_a_configuration_with_absurd_sizes_is_refused_before_anything_is_made(
    name: str, value: float, tiny_folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    change(model / "config.json", lambda config: config.update({name: value}))
    for command in (("inspect", model), ("prune", "--model", model, "-o", tmp_path / "o", *SMALL)):
        refuse(*command, said=f"its {name} is {re.escape(str(value))}")
    with pytest.raises(SympruneError, match=name):
        check_sizes({"text_config": {name: value}})


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_a_link_out_of_a_model_is_not_followed(
    name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    model, secret = tmp_path / "model", tmp_path / "secret"
    shutil.copytree(tiny_folder, model)
    shutil.move(model / name, secret)
    (model / name).symlink_to(secret)
    for command in (
        ("prune", "--model", model, "-o", tmp_path / "out", *SMALL),
        ("inspect", model),
        ("pack", model, tmp_path / "out"),
    ):
        refuse(*command, said=f"{name} is a link to {secret}, outside of its folder")
    assert not (tmp_path / "out").exists()


def test_pack_copies_no_link_out_of_a_subfolder(tiny_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    (model / "more").mkdir()
    (model / "more" / "passwords").symlink_to("/etc/passwd")
    refuse("pack", model, tmp_path / "out", said="passwords is a link to /etc/passwd")


def test_links_inside_a_folder_and_of_the_hubs_cache_are_followed(
    tiny_folder: Path, tmp_path: Path
) -> None:
    snapshot, blobs = tmp_path / "models--x--y" / "snapshots" / "abc", tmp_path / "models--x--y"
    blobs /= "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(tiny_folder.iterdir()):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    symprune("prune", "--model", snapshot, "-o", tmp_path / "out", *SMALL)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    (snapshot / "README.md").symlink_to(tmp_path / "out" / "config.json")
    with pytest.raises(SympruneError, match="outside of its folder"):
        hub.resolve(str(snapshot))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module beside the user that leaves a trace when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(criteria, "_NAMED", set())
    Path("planted_code.py").write_text(
        "open('trace', 'w').close()\ndef score(weight):\n    return weight.abs()\n"
    )
    monkeypatch.delitem(__import__("sys").modules, "planted_code", raising=False)
    return tmp_path


def test_masks_do_not_bring_code(planted: Path, tiny_folder: Path) -> None:
    symprune("prune", "--model", tiny_folder, "-o", "made", *SMALL)
    change(
        planted / "made" / "symprune.json",
        lambda record: record["recipe"].update(method="planted_code:score", params={}),
    )
    command = ["refine", "--model", tiny_folder, "--masks", "made", "-o", "out", *SMALL]
    refuse(*command, said="Method planted_code:score is code, which runs only if it is named")
    assert not Path("trace").exists()
    symprune(*command, "--method", "planted_code:score")
    assert Path("trace").exists()


def test_recipes_grids_and_messages_do_not_bring_code(planted: Path, tiny_folder: Path) -> None:
    said = "is code, which runs only if it is named"
    Path("r.yaml").write_text("method: planted_code:score\n")
    command = ["prune", "--model", tiny_folder, "-o", "out", *SMALL]
    refuse(*command, "--recipe", "r.yaml", said=said)
    Path("g.yaml").write_text(
        "methods: ['planted_code:score']\ncalibration: builtin\nseqlen: 32\nnsamples: 2\n"
        "eval_data: builtin\neval_windows: 1\n"
    )
    sweep = ["sweep", "--model", tiny_folder, "--grid", "g.yaml"]
    refuse(*sweep, said=said)
    task = json.loads(Task("x", Recipe("magnitude"), 2).to_json())
    task["recipe"]["method"] = "planted_code:score"
    with pytest.raises(SympruneError, match=said):
        Task.from_json(json.dumps(task))
    Path("p.yaml").write_text(
        "algorithms: [{algorithm: sub-fedavg, mask_score: 'planted_code:score'}]\n"
        "problem: {model: 'mlp:4', clients: 2}\nrounds: 1\n"
    )
    refuse("fed", "compare", "p.yaml", "--output", "o", said=said)
    assert not Path("trace").exists()
    symprune(*command, "--recipe", "r.yaml", "--method", "planted_code:score")
    assert Path("trace").exists()
    symprune(*sweep, "--method", "planted_code:score")


@pytest.mark.parametrize("shape", [[-4, -8], [4.0, 8], [2**40, 8], [4, 9], "48", None], ids=str)
def test_masks_whose_shapes_make_no_sense_are_corrupt(shape: Any, tmp_path: Path) -> None:
    path = tmp_path / "masks.safetensors"
    save_file({"w": torch.zeros(4, dtype=torch.uint8)}, path, {"shapes": json.dumps({"w": shape})})
    with pytest.raises(SympruneError, match="is corrupt"):
        MaskSet.load(path)


def test_a_record_of_a_stranger_is_a_sentence(tiny_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    (model / "symprune.json").write_text('{"recipe": 3, "bos": {"more": 1}}')
    assert "recipe is unknown" in symprune("inspect", model)
    options = ("--data", "builtin", "--seqlen", "32", "--windows", "1")
    refuse("eval", "--model", model, *options, said="about BOS makes no sense")
    options = ("-o", tmp_path / "out", *SMALL)
    refuse("refine", "--model", model, "--masks", model, *options, said="has no recipe")
