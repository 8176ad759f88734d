"""Where pruned blocks go: the files of the output folder, filled as blocks are done.

The output's files are those of the input: the same names, the same tensors, in the same places.
Prunable matrices are written in the model's type, whatever they were computed in, everything else
byte for byte (unless another type was asked for). Masks are written as they are made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from symprune.checkpoint.streamed_model import StreamedModel
from symprune.checkpoint.tensor_files import DTYPES, INDEX, OutputFile, Shards, make_header
from symprune.engine.blocks import PrunedBlock
from symprune.engine.permute.moves import Move
from symprune.machine import durable
from symprune.maskset import FILE_NAME, metadata
from symprune.validation import parse_json


class OutputFiles:
    """The files of the output folder."""

    def __init__(
        self, folder: Path, streamed: StreamedModel, source: Shards, keep_types: bool
    ) -> None:
        self.folder = folder
        self.streamed = streamed
        self.source = source
        headers = plain_headers(source, streamed, keep_types)
        self.files = {name: OutputFile(folder / name, raw) for name, raw in headers.items()}
        self.masks = OutputFile(folder / FILE_NAME, mask_header(streamed))

    @property
    def size(self) -> int:
        """Bytes the files take."""
        return sum(file.header.file_size for file in (*self.files.values(), self.masks))

    def bits_per_weight(self) -> float:
        """What a prunable weight takes."""
        return 8 * self.streamed.dtype.itemsize

    def create(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for file in (*self.files.values(), self.masks):
            file.create()

    def take_up(self, finished: int, digests: Mapping[str, str]) -> int:
        """How many of the `finished` blocks of an earlier attempt are still there as they were
        written, from the first one on."""
        files = (*self.files.values(), self.masks)
        for file in files:
            if not file.path.is_file() or file.path.stat().st_size != file.header.file_size:
                return 0
            file.write_header()
        written, masks = self.open_written(), Shards(self.folder, [FILE_NAME])
        for index in range(finished):
            keys = self.streamed.keys_of_block(index)
            names = {m.parameter_name: None for m in self.streamed.layout.matrices(index)}
            found = [(self._file_of(key).path.name, key, written) for key in keys]
            found += [(FILE_NAME, name, masks) for name in names]
            if any(shards.digest(n) != digests.get(f"{file}/{n}") for file, n, shards in found):
                return index
        return finished

    def open_written(self) -> Shards:
        """The tensors written so far."""
        return Shards(self.folder, self.source.files)

    def open_computed(self) -> Shards:
        """The same: blocks are computed with what will be written."""
        return self.open_written()

    def write_block(self, index: int, pruned: PrunedBlock) -> dict[str, str]:
        """The block that is in memory, and its masks, on the disk when this returns; the digests of
        what was written, for `take_up`."""
        kept = pruned.masks
        values = {n: to_stored(self.streamed, n, kept[n], pruned.moves) for n in kept}
        values |= read_moved(self.streamed, self.streamed.names_of_block(index), pruned)
        values = self.streamed.names.take_apart(values)
        used, digests = {FILE_NAME: self.masks}, dict[str, str]()
        for key in self.streamed.keys_of_block(index):
            file = self._file_of(key)
            used[file.path.name] = file
            digests[f"{file.path.name}/{key}"] = self._write(key, values)
        for name in kept:
            digests[f"{FILE_NAME}/{name}"] = self.masks.write(name, kept.bits(name))
        for file in used.values():
            file.sync()
        return digests

    def write_rest(self) -> None:
        """What belongs to no block, and the index."""
        blocks = range(len(self.streamed))
        done = {key for index in blocks for key in self.streamed.keys_of_block(index)}
        values = read_moved(self.streamed, self.streamed.names_around())
        values = self.streamed.names.take_apart(values)
        for key in self.source:
            if key not in done:
                self._write(key, values)
        for file in (*self.files.values(), self.masks):
            file.sync()
            file.close()
        index = self.source.folder / INDEX
        if index.is_file():
            size = sum(e.size for file in self.files.values() for e in file.header.entries)
            durable.write_text(self.folder / INDEX, index_of(index, size))

    def _write(self, key: str, values: Mapping[str, Tensor]) -> str:
        """What became of a tensor, or what it was; its digest."""
        file = self._file_of(key)
        if key not in values:
            return file.copy(key, self.source)
        return file.write(key, values[key].to(DTYPES[file.entries[key].dtype]))

    def _file_of(self, key: str) -> OutputFile:
        return self.files[self.source.entries[key].file]


def read_moved(
    streamed: StreamedModel, names: Iterable[str], pruned: PrunedBlock | None = None
) -> dict[str, Tensor]:
    """Parameters that are not pruned, but in another order than they were stored in."""
    pruned = pruned or PrunedBlock()
    moved = streamed.moved(names, pruned.moves)
    return {n: streamed.read(n, pruned.moves) for n in moved if n not in pruned.masks}


def to_stored(
    streamed: StreamedModel, name: str, keep: Tensor, moves: Iterable[Move] = ()
) -> Tensor:
    """A parameter of the block in memory in the type it is stored in. One that was computed in a
    type with fewer digits gets back those it had, unless it was changed."""
    computed = streamed.model.get_parameter(name).data
    dtype, narrow = streamed.dtype, streamed.compute
    if computed.dtype == dtype or narrow == torch.float32:
        return computed.to(dtype)  # type: ignore[no-any-return]
    before = streamed.read(name, moves).to(computed.device, dtype)
    same = before.to(narrow) == computed
    found = torch.where(same, before, computed.to(dtype))
    return found.masked_fill_(~keep.to(found.device), 0)


def plain_headers(source: Shards, streamed: StreamedModel, keep_types: bool) -> dict[str, bytes]:
    """The headers of the plain files: prunable matrices in the model's type, everything else as it
    is, or in the model's type too."""
    pruned = {matrix.parameter_name for matrix in streamed.layout.all_matrices()}
    computed, dtype = set(streamed.names.keys_of(pruned)), streamed.dtype
    found = {}
    for name, header in source.headers.items():
        tensors = []
        for entry in header.entries:
            stored = source.dtype(entry.name)
            change = stored.is_floating_point and (not keep_types or entry.name in computed)
            tensors.append((entry.name, dtype if change else stored, entry.shape))
        same = all(dtype == source.dtype(name) for name, dtype, _ in tensors)
        found[name] = header.raw if same else make_header(tensors, header.metadata)
    return found


def mask_header(streamed: StreamedModel) -> bytes:
    """The header of the file of masks."""
    pruned = {m.parameter_name: m.parameter for m in streamed.layout.all_matrices()}
    bits = [(name, torch.uint8, ((p.numel() + 7) // 8,)) for name, p in pruned.items()]
    return make_header(bits, metadata({name: tuple(p.shape) for name, p in pruned.items()}))


def index_of(path: Path, size: int) -> str:
    """An index like the one at `path`, of files that hold `size` bytes of tensors."""
    content = parse_json(path.read_text())
    content.setdefault("metadata", {})["total_size"] = size
    return json.dumps(content, indent=2) + "\n"
