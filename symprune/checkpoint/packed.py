"""Packed checkpoints: what a pruned model has left, in files to match, and back to the byte.

A packed folder is an ordinary checkpoint whose sparse matrices are blobs (`runtime.blob`): their
kept values and one bit for every weight. transformers loads it once symprune is imported, and
multiplies from the blobs; `unpack` restores the plain folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from symprune import masks, maskset
from symprune.card.base import CARD, describe_base
from symprune.card.forms import change_form
from symprune.card.text import write_card
from symprune.checkpoint import output_folder
from symprune.checkpoint.packed_files import PackedFiles, pack_floats
from symprune.checkpoint.packed_shards import (
    CONFIG,
    MANIFEST,
    Manifest,
    PackedShards,
    header_of,
    is_packed,
    open_shards,
    text_of,
)
from symprune.checkpoint.record import is_ours, read_record
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.checkpoint.tensor_files import INDEX, Header, OutputFile, Shards, shard_names
from symprune.errors import SympruneError
from symprune.machine import durable
from symprune.machine.checksums import FILE as CHECKSUMS
from symprune.machine.checksums import check_listed
from symprune.machine.foreign_files import check_links
from symprune.models import hub
from symprune.runtime import blob
from symprune.validation import parse_json

PARTS = "blocks"
Tick = Callable[[int, int], None]


def pack(
    folder: Path,
    output: Path,
    force: bool = False,
    tick: Tick = lambda *_: None,
    trust_remote_code: bool = False,
) -> dict[str, int]:
    """Write a packed copy of a checkpoint; its bytes before and after."""
    streamed, source = open_plain(folder, output, force, trust_remote_code)
    steps = len(streamed) + 1
    with output_folder.whole_folder(output) as work:
        files = PackedFiles(work, work / PARTS, streamed, source, keep_types=True)
        output_folder.check_room(output, files.size)
        files.create()
        for index in range(len(streamed)):
            tick(index, steps)
            files.write_part(index, pack_block(streamed, files, index))
        tick(len(streamed), steps)
        own = {*source.files, INDEX, CHECKSUMS}
        told = _header_of_told_masks(folder, files)
        _copy_others(folder, work, own | ({maskset.FILE_NAME} if told else set()))
        _write_card(folder, work, packed=True)
        files.write_whole(told)
        shutil.rmtree(work / PARTS)
    tick(steps, steps)
    return {"before": output_folder.folder_size(folder), "after": output_folder.folder_size(output)}


def open_plain(
    folder: Path, output: Path, force: bool = False, trust_remote_code: bool = False
) -> tuple[StreamedModel, Shards]:
    """A model that can be packed into `output`, and its files."""
    check_links(folder, deep=True)
    if not (folder / CONFIG).is_file() or not shard_names(folder) or is_packed(folder):
        raise SympruneError(f"{folder} is not a folder with a plain model in safetensors files.")
    _check_output(folder, output, force)
    check_listed(folder)
    source = Shards(folder)
    origin = hub.resolve(str(folder), hub.Access(trust_remote_code=trust_remote_code))
    config = hub.load_config(origin)
    return StreamedModel(source, config, "auto", "cpu", trust_remote_code), source


def unpack(
    folder: Path, output: Path, force: bool = False, tick: Tick = lambda *_: None
) -> dict[str, int]:
    """Restore the plain checkpoint a packed folder stands for: byte for byte what `pack` was given,
    or what pruning to a grid would have written."""
    _check_output(folder, output, force)
    check_links(folder, deep=True)
    manifest, packed = Manifest.read(folder), open_shards(folder)
    assert isinstance(packed, PackedShards)
    check_listed(folder, headers_only=packed.stored.files)
    size = sum(header.file_size for header in packed.headers.values())
    output_folder.check_room(output, size)
    done, steps = 0, len(packed.entries) + 1
    with output_folder.whole_folder(output) as work:
        for name, header in packed.headers.items():
            file = OutputFile(work / name, header.raw)
            file.create()
            for entry in header.entries:
                tick(done, steps)
                file.copy(entry.name, packed)
                done += 1
            file.close()
        stored = {*packed.stored.files, INDEX, MANIFEST, CONFIG, CHECKSUMS}
        _copy_others(folder, work, stored)
        (work / CONFIG).write_text(manifest.config)
        if manifest.index is not None:
            (work / INDEX).write_text(manifest.index)
        if manifest.masks is not None:
            _write_masks(work, manifest.masks, packed)
        _write_card(folder, work, packed=False)
    tick(steps, steps)
    return {"before": output_folder.folder_size(folder), "after": output_folder.folder_size(output)}


def weight_files(folder: Path) -> list[str]:
    """The files that hold a model's weights, packed or not."""
    names = [*shard_names(folder), *([MANIFEST] if is_packed(folder) else [])]
    if not names and any(folder.glob("packed-*-of-*.safetensors")):
        raise SympruneError(
            f"{folder} is packed in a format that is no longer read; unpack it with the one that "
            "packed it."
        )
    return names


def pack_block(streamed: StreamedModel, files: PackedFiles, index: int) -> dict[str, Tensor]:
    """The block's parameters that are smaller packed."""
    blobs = {}
    with streamed.block(index):
        for name in {matrix.parameter_name: None for matrix in streamed.layout.matrices(index)}:
            packed = pack_floats(files.packings[name], streamed.model.get_parameter(name).data)
            if packed is not None:
                blobs[name] = packed
    return blobs


def _header_of_told_masks(folder: Path, files: PackedFiles) -> str | None:
    """The header of the file of masks, if there is one and the packed weights tell all of it."""
    if not (folder / maskset.FILE_NAME).is_file():
        return None
    file, written = Shards(folder, [maskset.FILE_NAME]), files.open_parts()
    header = file.headers[maskset.FILE_NAME]
    shapes = _shapes(header)
    if shapes.keys() != file.entries.keys():
        return None
    told = (torch.equal(file.read(n), _tell_mask(written, n, shapes[n])) for n in shapes)
    return text_of(header) if all(told) else None


def _write_masks(work: Path, text: str, packed: PackedShards) -> None:
    header = header_of(maskset.FILE_NAME, text)
    shapes, file = _shapes(header), OutputFile(work / maskset.FILE_NAME, header.raw)
    file.create()
    for name, shape in shapes.items():
        file.write(name, _tell_mask(packed, name, shape))
    file.close()


def _shapes(header: Header) -> dict[str, tuple[int, ...]]:
    found = parse_json(header.metadata.get("shapes", "{}"))
    return {name: tuple(shape) for name, shape in found.items()}


def _tell_mask(packed: PackedShards, parameter: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter's mask in bits: what its blob says, everything if it is not packed."""
    if blob.packed_name(parameter) not in packed.stored:
        return masks.pack_bits(torch.ones(shape, dtype=torch.bool))
    return masks.pack_bits(blob.keep_mask(packed.packed(parameter)))


def _check_output(folder: Path, output: Path, force: bool) -> None:
    output_folder.check_output(output, force, [folder])
    if output.resolve().is_relative_to(folder.resolve()):
        raise SympruneError(f"The output {output} lies in {folder}, which is copied as a whole.")


def _write_card(folder: Path, work: Path, packed: bool) -> None:
    """The folder's card, for the other form; a new one where it has none."""
    card = folder / CARD
    if not card.is_file():
        record = read_record(folder) or {}
        about = record if is_ours(record) else {"base": describe_base("", folder, None, None)}
        try:
            text = write_card(about, packed)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SympruneError(f"The record in {folder} makes no sense: {error}.") from error
        durable.write_text(work / CARD, text)
        return
    try:
        text = card.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return  # somebody's own, copied as it is
    (work / CARD).write_bytes(change_form(text, packed).encode("utf-8"))


def _copy_others(folder: Path, work: Path, but: set[str]) -> None:
    for path in sorted(folder.iterdir()):
        if path.name in but:
            continue
        if path.is_dir():
            shutil.copytree(path, work / path.name)
        else:
            shutil.copyfile(path, work / path.name)
