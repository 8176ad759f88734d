"""A checkpoint's safetensors files, one tensor at a time: read and written in place.

A file's header says where every tensor lies, so an output file can be made at its full size before
the first tensor is known, and tensors arrive in any order. What is read or written leaves the
process's memory at once; only tensors asked for stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.machine import durable
from symprune.machine.foreign_files import check_file_names
from symprune.maskset import FILE_NAME
from symprune.validation import parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ENDING = ".safetensors"
CHUNK = 8 * 2**20
ADVICE = 2 * 2**20
LARGEST_HEADER = 100 * 2**20
LARGEST_SIZE = 2**40
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `size` bytes from `start` of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """The beginning of a safetensors file, as its bytes and as what they say."""

    raw: bytes
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]

    @property
    def file_size(self) -> int:
        return len(self.raw) + sum(entry.size for entry in self.entries)


def read_header(path: Path) -> Header:
    """The header of a file, checked against the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(LARGEST_HEADER, size - 8):
                raise ValueError("its header is not one")
            raw = length.to_bytes(8, "little") + file.read(length)
        header = parse_header(raw, path.name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SympruneError(f"{path} is a corrupt safetensors file: {error}.") from error
    except OSError as error:
        raise SympruneError(f"{path} cannot be read: {error.strerror}.") from error
    if header.file_size != size:
        raise SympruneError(
            f"{path} is a corrupt safetensors file: it has {size} bytes, not {header.file_size}."
        )
    return header


def parse_header(raw: bytes, file: str) -> Header:
    """What the first bytes of a file say; `ValueError` and the like when they make no sense."""
    described = parse_json(raw[8:])
    metadata = described.pop("__metadata__", {})
    if not all(isinstance(said, str) for said in metadata.values()):
        raise ValueError("its metadata is not text")
    entries = []
    for name, about in described.items():
        begin, end = about["data_offsets"]
        shape = tuple(about["shape"])
        if not all(type(size) is int and 0 <= size <= LARGEST_SIZE for size in shape):
            raise ValueError(f"the shape {list(shape)} of {name} is not one")
        if type(begin) is not int or type(end) is not int:
            raise ValueError(f"the place of {name} is not one")
        if about["dtype"] not in DTYPES:
            raise ValueError(f"the type {about['dtype']} of {name} is unknown")
        if end - begin != int(np.prod(shape, dtype=object)) * DTYPES[about["dtype"]].itemsize:
            raise ValueError(f"the size of {name} is wrong")
        entries.append(
            TensorEntry(name, about["dtype"], shape, file, len(raw) + begin, end - begin)
        )
    entries.sort(key=lambda entry: (entry.start, entry.size))
    place = len(raw)
    for entry in entries:
        if entry.start != place:
            raise ValueError(f"{entry.name} does not begin where the tensor before it ends")
        place += entry.size
    return Header(raw, tuple(entries), metadata)


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The first bytes of a file that holds these tensors in this order."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name, dtype, shape in tensors:
        end = place + int(np.prod(shape, dtype=object)) * dtype.itemsize
        described[name] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Witness(Protocol):
    """Who is told a digest of what is read: of the tensors asked for, when they were read whole."""

    def wants(self, name: str) -> bool: ...
    def tell(self, entry: TensorEntry, found: str) -> None: ...


class Shards:
    """The tensors of a folder's safetensors files, read one at a time."""

    witness: Witness | None = None

    def __init__(self, folder: Path, names: Iterable[str] | None = None) -> None:
        self.folder = folder
        self.files = list(shard_names(folder) if names is None else names)
        self.headers = {name: read_header(folder / name) for name in self.files}
        self.entries: dict[str, TensorEntry] = {}
        for header in self.headers.values():
            self.entries |= {entry.name: entry for entry in header.entries}
        self._opened: dict[str, BinaryIO] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.entries[name].dtype]

    def read(self, name: str) -> Tensor:
        """A tensor of its own memory."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        into = tensor.reshape(-1).view(torch.uint8).numpy()
        places = range(0, entry.size, CHUNK)
        for _ in self._filled(entry, (into[place : place + CHUNK] for place in places)):
            pass
        return tensor

    def is_exact(self, name: str) -> bool:
        """Whether it is read as it is computed with, whatever the checkpoint's type."""
        return False

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """A tensor's bytes, a few at a time; a piece is valid until the next is asked for."""
        entry = self.entries[name]
        buffer = np.empty(min(CHUNK, entry.size), np.uint8)
        places = range(0, entry.size, CHUNK)
        yield from self._filled(entry, (buffer[: entry.size - place] for place in places))

    def digest(self, name: str) -> str:
        """What tells a tensor from any other: its name, type, shape and bytes."""
        found = begin_digest(self.entries[name])
        for chunk in self.chunks(name):
            found.update(chunk.data)
        return found.hexdigest()

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the system to bring these tensors into its file cache while other work goes on."""
        wanted = [self.entries[name] for name in names if name in self.entries]
        if wanted and hasattr(os, "posix_fadvise"):
            threading.Thread(target=self._will_need, args=(wanted,), daemon=True).start()

    def _will_need(self, wanted: list[TensorEntry]) -> None:
        """In pieces: the system reads so much ahead for one advice and forgets the rest."""
        for entry in wanted:
            end = entry.start + entry.size
            with suppress(OSError), (self.folder / entry.file).open("rb") as file:
                for start in range(entry.start, end, ADVICE):
                    size = min(ADVICE, end - start)
                    os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)

    def _filled(self, entry: TensorEntry, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """These pieces of memory, each with the next bytes of a tensor in it."""
        witness, place = self.witness, 0
        found = begin_digest(entry) if witness and witness.wants(entry.name) else None
        for piece in pieces:
            self._fill(piece, entry, place)
            if found is not None:
                found.update(piece.data)
            place += len(piece)
            yield piece
        if witness is not None and found is not None:
            witness.tell(entry, found.hexdigest())

    def _fill(self, into: np.ndarray, entry: TensorEntry, place: int) -> None:
        """Bytes of a tensor, from `place` on. A file that is cut short meanwhile is told; behind a
        memory map it would end the process."""
        path, rest = self.folder / entry.file, into.data
        start = entry.start + place
        try:
            if entry.file not in self._opened:
                self._opened[entry.file] = path.open("rb", buffering=0)
            opened = self._opened[entry.file].fileno()
            while rest:
                count = os.preadv(opened, [rest], start)
                if count == 0:
                    raise SympruneError(f"{path} became shorter while it was read.")
                rest, start = rest[count:], start + count
        except OSError as error:
            raise SympruneError(f"{path} cannot be read: {error.strerror}.") from error


def begin_digest(entry: TensorEntry) -> hashlib._Hash:
    """A digest of a tensor that its bytes are still missing in."""
    return hashlib.sha256(f"{entry.name} {entry.dtype} {entry.shape} ".encode())


def shard_names(folder: Path) -> list[str]:
    """The files that hold a checkpoint's weights; none where they are not safetensors."""
    index = folder / INDEX
    if index.is_file():
        try:
            found = sorted(set(parse_json(index.read_text())["weight_map"].values()), key=str)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise SympruneError(f"{index} is not a readable index.") from error
        check_file_names(found, ENDING, index)
        if FILE_NAME in found:
            raise SympruneError(f"{index} names {FILE_NAME}, which is where masks are kept.")
        for name in found:
            if not (folder / name).is_file():
                raise SympruneError(f"{folder} is not complete: {name} is missing.")
        return found
    return [SINGLE] if (folder / SINGLE).is_file() else []


class OutputFile:
    """A safetensors file of known header, at its full size from the start, filled in any order."""

    def __init__(self, path: Path, raw_header: bytes) -> None:
        self.path = path
        self.header = parse_header(raw_header, path.name)
        self.entries = {entry.name: entry for entry in self.header.entries}
        self._file: int | None = None

    def create(self) -> None:
        """Take the room on the disk, so that it is known now whether there is enough."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        durable.take_room(self._file, self.header.file_size)
        self.write_header()

    def write_header(self) -> None:
        self._put(0, memoryview(self.header.raw))

    def write(self, name: str, tensor: Tensor) -> str:
        """Put a tensor into its place; its digest."""
        entry = self.entries[name]
        if tuple(tensor.shape) != entry.shape or CODES[tensor.dtype] != entry.dtype:
            raise SympruneError(f"{name} changed its shape or type while it was pruned.")
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return self._put_tensor(entry, [plain.numpy()])

    def copy(self, name: str, source: Shards) -> str:
        """Take over a tensor's bytes, or its values where the type differs; its digest."""
        entry = self.entries[name]
        if source.entries[name].dtype != entry.dtype:
            return self.write(name, source.read(name).to(DTYPES[entry.dtype]))
        return self._put_tensor(entry, source.chunks(name))

    def sync(self) -> None:
        """Have everything written so far on the disk, and out of the system's file cache."""
        if self._file is not None:
            os.fsync(self._file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _put_tensor(self, entry: TensorEntry, pieces: Iterable[np.ndarray]) -> str:
        found, place = begin_digest(entry), entry.start
        for piece in pieces:
            found.update(piece.data)
            self._put(place, piece.data)
            place += len(piece)
        return found.hexdigest()

    def _put(self, place: int, data: memoryview) -> None:
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR)
        while len(data):
            written = os.pwrite(self._file, data[:CHUNK], place)
            data, place = data[written:], place + written
