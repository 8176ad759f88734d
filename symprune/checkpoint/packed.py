"""Packed checkpoints: what a pruned model has left, in files to match, and back to the byte.

Every safetensors file becomes one: a tensor with enough zeros is kept as its values and their
places (`sparse_codes`), any other as it is. A file of masks that the zeros of the weights tell
anyway takes no room. The original header is kept, and a checksum for every tensor. transformers
does not take a packed folder for a model; `symprune.load` and every command do.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from symprune import maskset
from symprune.checkpoint import output_folder, sparse_codes
from symprune.checkpoint.tensor_files import (
    CHUNK,
    DTYPES,
    INDEX,
    OutputFile,
    Shards,
    make_header,
    parse_header,
    shard_names,
)
from symprune.errors import SympruneError

FORMAT = "symprune-packed"
PREFIX = "packed-"
MASKS = f"{PREFIX}masks.safetensors"
PACKED_INDEX = f"{PREFIX}index.json"
WHOLE, DERIVED = "whole", "from the weights"
Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class Code:
    """How a tensor is kept: `how`, the number of values, the bytes of their places, a checksum."""

    how: str
    values: int
    places: int
    checksum: int


def pack(
    folder: Path, output: Path, force: bool = False, tick: Tick = lambda *_: None
) -> dict[str, int]:
    """Write a packed copy of a checkpoint; its bytes before and after."""
    names = shard_names(folder)
    if not (folder / "config.json").is_file() or not names:
        raise SympruneError(f"{folder} is not a folder with a model in safetensors files.")
    output_folder.check_output(output, force)
    masks = [maskset.FILE_NAME] if (folder / maskset.FILE_NAME).is_file() else []
    weights = Shards(folder, names)
    steps = 2 * (len(weights.entries) + 1)
    with output_folder.whole_folder(output) as work:
        done = _Count(tick, steps)
        for number, name in enumerate(names):
            packed = f"{PREFIX}{number + 1:05}-of-{len(names):05}.safetensors"
            _pack_file(Shards(folder, [name]), work / packed, weights, done)
        for name in masks:
            _pack_file(Shards(folder, [name]), work / MASKS, weights, done)
        _copy_others(folder, work, {*names, *masks}, {INDEX: PACKED_INDEX})
    tick(steps, steps)
    return {"before": output_folder.folder_size(folder), "after": output_folder.folder_size(output)}


def unpack(
    folder: Path, output: Path, force: bool = False, tick: Tick = lambda *_: None
) -> dict[str, int]:
    """Restore the checkpoint a packed folder was made from, byte for byte."""
    output_folder.check_output(output, force)
    weights = PackedShards(folder)
    masks = [PackedShards(folder, [MASKS], weights)] if (folder / MASKS).is_file() else []
    with output_folder.whole_folder(output) as work:
        done = _Count(tick, len(weights.entries) + 1)
        for source in (weights, *masks):
            for name, header in source.headers.items():
                file = OutputFile(work / name, header.raw)
                file.create()
                for entry in header.entries:
                    file.copy(entry.name, source)
                    done()
                file.close()
        _copy_others(folder, work, {*packed_names(folder), MASKS}, {PACKED_INDEX: INDEX})
    done.finish()
    return {"before": output_folder.folder_size(folder), "after": output_folder.folder_size(output)}


def packed_names(folder: Path) -> list[str]:
    """A packed folder's files of weights; none if it is not one."""
    return sorted(path.name for path in folder.glob(f"{PREFIX}*-of-*.safetensors"))


def weight_files(folder: Path) -> list[str]:
    """The files that hold a model's weights, packed or not."""
    return packed_names(folder) or shard_names(folder)


def open_shards(folder: Path) -> Shards:
    """The tensors of a folder, packed or not."""
    return PackedShards(folder) if packed_names(folder) else Shards(folder)


class PackedShards(Shards):
    """The tensors of packed files, as if they were not: under their names, in their old places."""

    def __init__(
        self, folder: Path, names: Iterable[str] | None = None, weights: Shards | None = None
    ) -> None:
        stored = Shards(folder, packed_names(folder) if names is None else names)
        if not stored.files:
            raise SympruneError(f"{folder} is not a packed checkpoint.")
        self.folder = folder
        self.stored = stored
        self.weights = weights
        self.headers, self.entries = {}, {}
        self.codes: dict[str, Code] = {}
        self._packed_in: dict[str, str] = {}
        for name, header in stored.headers.items():
            about = header.metadata
            try:
                if about.get("format") != FORMAT:
                    raise ValueError("it is not a packed file")
                raw = bytes.fromhex(about["length"]) + about["header"].encode()
                original = parse_header(raw, about["file"])
                codes = {k: Code(*v) for k, v in json.loads(about["tensors"]).items()}
                self.codes |= {entry.name: codes[entry.name] for entry in original.entries}
            except (ValueError, KeyError, TypeError) as error:
                raise SympruneError(f"{folder / name} is corrupt: {error}.") from error
            self.headers[about["file"]] = original
            self.entries |= {entry.name: entry for entry in original.entries}
            self._packed_in[about["file"]] = name
        self.files = list(self.headers)

    def read(self, name: str) -> Tensor:
        entry, code = self.entries[name], self.codes[name]
        try:
            data = self._decode(name)
        except (ValueError, IndexError, KeyError) as error:
            raise self._corrupt(name) from error
        data = np.ascontiguousarray(data)
        if zlib.crc32(data.reshape(-1).view(np.uint8).data) != code.checksum:
            raise self._corrupt(name)
        flat = torch.from_numpy(data.reshape(-1).view(np.uint8))
        return flat.view(DTYPES[entry.dtype]).view(entry.shape)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        whole = self.read(name).reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(whole), CHUNK):
            yield whole[start : start + CHUNK]

    def prefetch(self, names: Iterable[str]) -> None:
        kept = [part for name in names for part in (name, f"{name}:values", f"{name}:places")]
        self.stored.prefetch(kept)

    def _decode(self, name: str) -> np.ndarray:
        entry, how = self.entries[name], self.codes[name].how
        if how == WHOLE:
            return _integers(self.stored.read(name))
        if how == DERIVED:
            if self.weights is None:
                raise KeyError(name)
            return _bits(_integers(self.weights.read(name)))
        values = _integers(self.stored.read(f"{name}:values"))
        places = self.stored.read(f"{name}:places").numpy()
        return sparse_codes.decode(values, places, entry.shape, how)

    def _corrupt(self, name: str) -> SympruneError:
        file = self.folder / self._packed_in[self.entries[name].file]
        return SympruneError(f"{name} in {file} is corrupt: its checksum does not match.")


def _pack_file(source: Shards, path: Path, weights: Shards, done: _Count) -> None:
    """Look at every tensor, then write the file: its header comes first."""
    header = source.headers[source.files[0]]
    codes: dict[str, Code] = {}
    for entry in header.entries:
        codes[entry.name] = _code(source, entry.name, weights)
        done()
    kept: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for entry in header.entries:
        code, dtype = codes[entry.name], DTYPES[entry.dtype]
        if code.how == WHOLE:
            kept.append((entry.name, dtype, entry.shape))
        elif code.how != DERIVED:
            kept.append((f"{entry.name}:values", dtype, (code.values,)))
            kept.append((f"{entry.name}:places", torch.uint8, (code.places,)))
    about = {
        "format": FORMAT,
        "file": source.files[0],
        "length": header.raw[:8].hex(),
        "header": header.raw[8:].decode(),
        "tensors": json.dumps({name: list(vars(code).values()) for name, code in codes.items()}),
    }
    file = OutputFile(path, make_header(kept, about))
    file.create()
    for entry in header.entries:
        how = codes[entry.name].how
        if how == WHOLE:
            file.copy(entry.name, source)
        elif how != DERIVED:
            tensor = source.read(entry.name)
            values, places = sparse_codes.encode(_integers(tensor), how)
            stored = torch.from_numpy(values.view(np.uint8)).view(tensor.dtype)
            file.write(f"{entry.name}:values", stored)
            file.write(f"{entry.name}:places", torch.from_numpy(places))
        done()
    file.close()


def _code(source: Shards, name: str, weights: Shards) -> Code:
    tensor = source.read(name)
    data = _integers(tensor)
    checksum = zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    if source.files == [maskset.FILE_NAME]:
        if name in weights and np.array_equal(_bits(_integers(weights.read(name))), data):
            return Code(DERIVED, 0, 0, checksum)
        return Code(WHOLE, data.size, 0, checksum)
    found = sparse_codes.choose(sparse_codes.nonzero(data), tensor.element_size())
    if found is None:
        return Code(WHOLE, data.size, 0, checksum)
    return Code(*found, checksum)


def _integers(tensor: Tensor) -> np.ndarray:
    """A tensor's bits, as unsigned integers of its shape."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(sparse_codes.INTEGERS[tensor.element_size()]).reshape(tensor.shape)


def _bits(data: np.ndarray) -> np.ndarray:
    """The mask of what is not zero, eight weights a byte, as a file of masks has it."""
    return np.packbits(sparse_codes.nonzero(data).reshape(-1), bitorder="little")


def _copy_others(folder: Path, work: Path, but: set[str], renamed: dict[str, str]) -> None:
    for path in sorted(folder.iterdir()):
        if path.name in but:
            continue
        target = work / renamed.get(path.name, path.name)
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copyfile(path, target)


class _Count:
    """Counts steps for a progress bar."""

    def __init__(self, tick: Tick, total: int) -> None:
        self.tick, self.total, self.done = tick, total, 0

    def __call__(self) -> None:
        self.done = min(self.done + 1, self.total - 1)
        self.tick(self.done, self.total)

    def finish(self) -> None:
        self.tick(self.total, self.total)
