"""A packed checkpoint read as the plain one it stands for: every tensor under its own name, dense.

Packed parameters are blobs (`runtime.blob`) in ordinary safetensors files. A manifest beside them
says what the plain files look like, which rows of which parameter each of their tensors is, and the
checksum of all that is stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symprune.checkpoint.tensor_files import (
    CHUNK,
    DTYPES,
    ENDING,
    INDEX,
    Header,
    Shards,
    parse_header,
)
from symprune.errors import SympruneError
from symprune.machine.checksums import check_listed, checksum
from symprune.machine.foreign_files import check_file_names
from symprune.maskset import FILE_NAME, PACKED
from symprune.runtime import blob
from symprune.validation import parse_json

CONFIG = "config.json"
MANIFEST = PACKED
FORMAT = "symprune-packed"
VERSION = 1


@dataclass(frozen=True)
class Place:
    """Where a plain tensor is: in a packed parameter, as a whole or as some rows of a piece."""

    parameter: str
    piece: int | None = None
    first: int = 0
    rows: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.piece is None and self.rows is None

    def cut(self, parameter: Tensor) -> Tensor:
        """The plain tensor, a view."""
        found = parameter if self.piece is None else parameter[self.piece]
        return found if self.rows is None else found[self.first : self.first + self.rows]


@dataclass
class Manifest:
    """What a packed folder says about itself; its fields are `packed.json`.

    files: the plain files' headers. places: where their tensors are, if they are packed.
    checksums: of every stored tensor's bytes. config, index and masks: the plain folder's
    configuration, the index of its files, and the header of its masks where the blobs tell them.
    """

    files: dict[str, str]
    places: dict[str, Place] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    config: str = ""
    index: str | None = None
    masks: str | None = None

    def to_json(self) -> str:
        plain: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        plain["places"] = {key: list(astuple(place)) for key, place in self.places.items()}
        return json.dumps(plain, indent=1) + "\n"

    def _check_kinds(self) -> None:
        """Fail where something is not of its kind."""
        texts = [*self.files, *self.files.values(), self.config, *self.places, *self.checksums]
        texts += [said for said in (self.index, self.masks) if said is not None]
        texts += [place.parameter for place in self.places.values()]
        counts = [*self.checksums.values(), *(place.first for place in self.places.values())]
        for place in self.places.values():
            counts += [n for n in (place.piece, place.rows) if n is not None]
        if not all(isinstance(said, str) for said in texts) or not all(map(_is_count, counts)):
            raise ValueError("a value is not of its kind")
        for said in (self.config, self.index):
            if said is not None and not isinstance(parse_json(said), dict):
                raise ValueError("the configuration or the index is not one")
        if self.masks is not None:
            _check_masks(header_of(FILE_NAME, self.masks), self.files.values())
        if self.index is not None:
            named = set(parse_json(self.index)["weight_map"].values())
            if not named <= self.files.keys():
                raise ValueError("the index names other files")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST
        if not path.is_file():
            raise SympruneError(f"{folder} is not a packed checkpoint.")
        try:
            plain = parse_json(path.read_text())
            if plain.pop("format") != FORMAT:
                raise ValueError("it is no manifest")
            version = plain.pop("version")
            if version != VERSION:
                raise SympruneError(
                    f"{folder} is packed in version {version!r} of the format; this symprune reads "
                    f"version {VERSION}."
                )
            places = {key: Place(*place) for key, place in plain.pop("places").items()}
            found = cls(places=places, **plain)
            found._check_kinds()
            check_file_names(found.files, ENDING, path)
            return found
        except SympruneError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SympruneError(f"{path} is corrupt: {error}.") from error


def _check_masks(masks: Header, files: Iterable[str]) -> None:
    """Fail where masks are not those of the plain files: bits for tensors of these sizes."""
    plain = (entry for text in files for entry in header_of("", text).entries)
    most = sum(math.prod(entry.shape) for entry in plain)
    shapes = parse_json(masks.metadata["shapes"])
    for entry in masks.entries:
        shape = shapes.pop(entry.name)
        if not all(map(_is_count, shape)) or entry.shape != ((math.prod(shape) + 7) // 8,):
            raise ValueError(f"the mask of {entry.name} is not one")
        most -= math.prod(shape)
    if shapes or most < 0:
        raise ValueError("the masks are another model's")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_packed(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def open_shards(folder: Path) -> Shards:
    """The tensors of a folder, packed or not.

    Of a packed one, what decides about its weights must be as it was written. Files of tensors are
    compared by their headers: a packed tensor's own checksum is compared when it is read.
    """
    if not is_packed(folder):
        return Shards(folder)
    found = open_packed(folder)
    check_listed(folder, [*found.stored.files, FILE_NAME], _decides_about_weights)
    return found


def _decides_about_weights(name: str) -> bool:
    return name.endswith(ENDING) or name in (MANIFEST, CONFIG, INDEX)


def open_packed(folder: Path) -> PackedShards:
    """The tensors of a packed folder, if what it says of itself makes sense."""
    manifest = Manifest.read(folder)
    try:
        headers = {name: header_of(name, text) for name, text in manifest.files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SympruneError(f"{folder / MANIFEST} is corrupt: {error}.") from error
    return PackedShards(Shards(folder), headers, manifest.places, manifest.checksums)


def header_of(file: str, text: str) -> Header:
    """A plain file's header from its text in a manifest."""
    raw = text.encode()
    return parse_header(len(raw).to_bytes(8, "little") + raw, file)


def text_of(header: Header) -> str:
    """What a manifest keeps of a plain file's header; its length is known from it."""
    return header.raw[8:].decode()


class PackedShards(Shards):
    """The tensors of a packed checkpoint, as if it were not: under their names, in their files.

    exact: what is packed comes in fp32, as it is computed with, not in the plain file's type.
    """

    exact = False

    def __init__(
        self,
        stored: Shards,
        headers: Mapping[str, Header],
        places: Mapping[str, Place],
        checksums: Mapping[str, int],
    ) -> None:
        self.folder = stored.folder
        self.stored = stored
        self.headers = dict(headers)
        self.files = list(headers)
        self.entries = {e.name: e for header in headers.values() for e in header.entries}
        self.places = places
        self.checksums = checksums
        # Tensors that are parts of one parameter are asked for in a row.
        self._last: tuple[str, torch.dtype, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        entry, place = self.entries[name], self.places.get(name)
        if place is None:
            tensor = self._stored(name)
            if tensor.dtype != DTYPES[entry.dtype] or tuple(tensor.shape) != entry.shape:
                raise SympruneError(f"{name} in {self.folder} is stored in another shape or type.")
            return tensor
        dtype = torch.float32 if self.exact else DTYPES[entry.dtype]
        if place.is_whole:
            tensor = self._decode(place.parameter, dtype)
        else:
            if self._last is None or self._last[:2] != (place.parameter, dtype):
                self._last = None
                self._last = place.parameter, dtype, self._decode(place.parameter, dtype)
            tensor = self._cut(name, place, self._last[2])
        if tensor.numel() != math.prod(entry.shape):
            raise SympruneError(f"{name} in {self.folder} is packed in another shape.")
        return tensor.view(entry.shape)

    def is_exact(self, name: str) -> bool:
        return self.exact and name in self.places

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        whole = self.read(name).contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(whole), CHUNK):
            yield whole[start : start + CHUNK]

    def prefetch(self, names: Iterable[str]) -> None:
        self.stored.prefetch({self.stored_name(name) for name in names})

    def stored_name(self, name: str) -> str:
        """What a plain tensor is stored under, or in."""
        place = self.places.get(name)
        return name if place is None else blob.packed_name(place.parameter)

    def packed(self, parameter: str) -> Tensor:
        """A packed parameter as it is stored."""
        return self._stored(blob.packed_name(parameter))

    def check(self) -> None:
        """Compare the checksum of everything that is stored; a sentence where one is wrong."""
        for name in self.checksums:
            self._stored(name)

    def find_damage(self) -> Iterator[str]:
        """A sentence for every tensor that is stored wrong or makes no sense, in the order of the
        plain files, and for each that is stored without belonging there."""
        seen: set[str] = set()
        for name in self.entries:
            stored = self.stored_name(name)
            try:
                self.read(name)
            except SympruneError as error:
                if stored not in seen:
                    yield str(error)
            seen.add(stored)
        for name in self.stored:
            if name not in seen and self.stored.entries[name].size:
                yield f"{name} in {self.folder} is stored, but belongs to no file of the model."

    def _cut(self, name: str, place: Place, parameter: Tensor) -> Tensor:
        try:
            return place.cut(parameter).clone()
        except IndexError:
            raise SympruneError(
                f"{name} in {self.folder} is piece {place.piece} of a parameter without it."
            ) from None

    def _decode(self, parameter: str, dtype: torch.dtype) -> Tensor:
        packed = self.packed(parameter)
        blob.check(packed)
        return blob.decode(packed, dtype)

    def _stored(self, name: str) -> Tensor:
        try:
            tensor = self.stored.read(name)
        except KeyError:
            raise SympruneError(f"{self.folder} is not complete: {name} is missing.") from None
        if checksum(tensor) != self.checksums.get(name):
            file = self.folder / self.stored.entries[name].file
            raise SympruneError(f"{name} in {file} is corrupt: its checksum does not match.")
        return tensor
