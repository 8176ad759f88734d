"""Files of a model folder that are nearly right: read, or refused in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import families
import packed_models
import pytest
import torch
from fuzzing import EXAMPLES, changed, changed_json, damaged, fuzz
from safetensors.torch import save_file
from torch import Tensor

from symprune import MaskSet
from symprune.checkpoint.output_folder import check_output
from symprune.checkpoint.packed import pack
from symprune.checkpoint.packed_shards import MANIFEST, open_shards
from symprune.checkpoint.record import RECORD, is_ours, read_record, write_record
from symprune.checkpoint.resume import FILE, HiddenStates, Progress, describe_kept, work_folder
from symprune.checkpoint.tensor_files import INDEX, SINGLE, make_header, shard_names
from symprune.jobs.measures import read_bos
from symprune.jobs.pruning import recipe_of
from symprune.models import hub
from symprune.recipe import Recipe


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, packed or not."""
    shards = open_shards(folder)
    return {name: shards.read(name) for name in shards}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small tensors, in one file."""
    folder = tmp_path_factory.mktemp("small")
    tensors = {"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(0)}
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model of a few kilobytes, with the file of its masks."""
    made = tmp_path_factory.mktemp("packed")
    model = packed_models.pruned("smollm")
    model.save_pretrained(made / "plain", max_shard_size="40KB")
    MaskSet.of(model).save(made / "plain")
    pack(made / "plain", made / "packed")
    return made / "packed"


@EXAMPLES
def test_a_safetensors_file_is_read_or_refused(examples: int, small: Path, tmp_path: Path) -> None:
    def read(data: bytes) -> None:
        (tmp_path / SINGLE).write_bytes(data)
        read_all(tmp_path)

    fuzz(read, damaged((small / SINGLE).read_bytes()), examples)


@EXAMPLES
def test_what_a_safetensors_header_says_is_believed_only_if_it_fits(
    examples: int, tmp_path: Path
) -> None:
    raw = make_header([("a", torch.float32, (3, 4)), ("b", torch.int8, (5,))], {"format": "pt"})
    plain, content = json.loads(raw[8:]), b"\x01" * (48 + 5)

    def read(header: object) -> None:
        text = json.dumps(header).encode()
        (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + content)
        read_all(tmp_path)

    fuzz(read, changed(plain), examples)


@EXAMPLES
def test_an_index_is_read_or_refused(examples: int, small: Path, tmp_path: Path) -> None:
    shutil.copyfile(small / SINGLE, tmp_path / SINGLE)
    index = {"metadata": {"total_size": 58}, "weight_map": {"a": SINGLE, "b": SINGLE}}

    def read(data: bytes) -> None:
        (tmp_path / INDEX).write_bytes(data)
        assert set(shard_names(tmp_path)) <= {SINGLE}
        read_all(tmp_path)

    fuzz(read, changed_json(index), examples)


@EXAMPLES
def test_a_packed_manifest_is_read_or_refused(examples: int, packed: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(packed, model)

    def read(data: bytes) -> None:
        (model / MANIFEST).write_bytes(data)
        read_all(model)

    fuzz(read, changed_json(json.loads((packed / MANIFEST).read_text())), examples)


@EXAMPLES
def test_the_masks_that_a_packed_manifest_describes_are_read_or_refused(
    examples: int, packed: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(packed, model)
    manifest = json.loads((packed / MANIFEST).read_text())
    header = json.loads(manifest["masks"])
    shapes = json.loads(header["__metadata__"]["shapes"])

    def read(shapes: object) -> None:
        header["__metadata__"]["shapes"] = json.dumps(shapes)
        (model / MANIFEST).write_text(json.dumps({**manifest, "masks": json.dumps(header)}))
        MaskSet.load(model).sparsity()

    fuzz(read, changed(shapes), examples)

    def read_file(data: bytes) -> None:
        (model / MANIFEST).write_bytes(data)
        MaskSet.load(model).sparsity()

    fuzz(read_file, changed_json(manifest), examples)


@EXAMPLES
def test_packed_weights_are_read_or_refused(examples: int, packed: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(packed, model)
    (name,), good = shard_names(model), read_all(packed)

    def read(data: bytes) -> None:
        (model / name).write_bytes(data)
        for key, tensor in read_all(model).items():
            assert torch.equal(tensor, good[key]), f"{key} is another one"

    whole = (packed / name).read_bytes()
    fuzz(read, damaged(whole, beginning=8 + int.from_bytes(whole[:8], "little")), examples)


@EXAMPLES
def test_a_file_of_masks_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    masks, file = MaskSet(), tmp_path / "masks.safetensors"
    masks["a"] = torch.ones(3, 5, dtype=torch.bool)
    masks["b"] = torch.zeros(2, 4, 4, dtype=torch.bool)
    masks.save(file)

    def read(data: bytes) -> None:
        file.write_bytes(data)
        MaskSet.load(file).sparsity()

    fuzz(read, damaged(file.read_bytes()), examples)


@EXAMPLES
def test_what_a_file_of_masks_says_of_their_shapes_is_read_or_refused(
    examples: int, tmp_path: Path
) -> None:
    bits = {"a": torch.ones(2, dtype=torch.uint8), "b": torch.ones(4, dtype=torch.uint8)}

    def read(shapes: object) -> None:
        save_file(bits, tmp_path / "masks.safetensors", {"shapes": json.dumps(shapes)})
        MaskSet.load(tmp_path).sparsity()

    fuzz(read, changed({"a": [3, 5], "b": [2, 4, 4]}), examples)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("record")
    recipe = Recipe("wanda", sparsity=0.5, refine="dsnot", update="lsq", values="int4").to_dict()
    bos = {"setting": "auto", "token": 1, "why": "", "loss_without": 1.0, "loss_with": 0.5}
    write_record(folder, {"model": "tiny", "recipe": recipe, "bos": bos, "layers": []})
    return (folder / RECORD).read_bytes()


@EXAMPLES
def test_a_record_is_read_or_refused(examples: int, record: bytes, tmp_path: Path) -> None:
    def reading(use: Callable[[Path], object]) -> Callable[[bytes], None]:
        def read(data: bytes) -> None:
            (tmp_path / RECORD).write_bytes(data)
            use(tmp_path)

        return read

    inputs = changed_json(json.loads(record))
    for use in (
        lambda folder: is_ours(read_record(folder)),
        recipe_of,
        read_bos,
        lambda folder: check_output(folder, force=True),
    ):
        fuzz(reading(use), inputs, examples)


@EXAMPLES
def test_the_progress_of_an_unfinished_run_is_read_or_refused(
    examples: int, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    work = work_folder(output)
    work.mkdir()
    run = {"recipe": Recipe().to_dict(), "model": {"path": "tiny"}}
    begun = Progress.open(work, run, output)
    layer = {"name": "a", "kind": "q", "part": "attn", "rows": 2, "columns": 3, "removed": 3}
    layer |= {"tokens": 5, "figures": {"relative_error": 0.5}, "dense": ""}
    begun.layers, begun.finished, begun.hidden = [layer], 2, 1
    begun.notes, begun.seconds, begun.values = ["A note."], {"mask": 1.5}, {"allocation": {"a": 3}}
    begun.save()
    written = json.loads((work / FILE).read_text())
    (work / "output").mkdir()

    def read(data: bytes) -> None:
        (work / FILE).write_bytes(data)
        assert describe_kept(output)
        Progress.open(work, run, output).reports()

    fuzz(read, changed_json(written), examples)


@EXAMPLES
def test_hidden_states_are_read_or_refused(examples: int, tmp_path: Path) -> None:
    states, hidden = HiddenStates(tmp_path), torch.ones(3, 2, 4, dtype=torch.bfloat16)
    states.keep(1, hidden)
    good = states.path(1).read_bytes()

    def read(data: bytes) -> None:
        states.path(1).write_bytes(data)
        states.restore(1, torch.empty_like(hidden))

    fuzz(read, damaged(good), examples)


@EXAMPLES
def test_a_configuration_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    config = families.model("smollm").config.to_dict()

    def read(data: bytes) -> None:
        (tmp_path / "config.json").write_bytes(data)
        hub.load_config(hub.resolve(str(tmp_path)))

    fuzz(read, changed_json(json.loads(json.dumps(config))), examples)
