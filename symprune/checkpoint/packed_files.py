"""Where packed blocks go: a part file for each block as it is done, a few whole files at the end.

How large a packed block is shows when it is done, so its file is made then. The parts of a run that
is interrupted stay, and say in their headers what they hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune.checkpoint.output_files import index_of, mask_header, plain_headers
from symprune.checkpoint.packed_shards import (
    MANIFEST,
    Manifest,
    PackedShards,
    Place,
    checksum,
    open_shards,
    text_of,
)
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.checkpoint.tensor_files import (
    DTYPES,
    INDEX,
    SINGLE,
    OutputFile,
    Shards,
    make_header,
    parse_header,
)
from symprune.errors import SympruneError
from symprune.machine import durable
from symprune.maskset import FILE_NAME, MaskSet
from symprune.models.matrices import Matrix
from symprune.runtime import blob
from symprune.values.grid import GRIDS, OnGrid
from symprune.values.nearest import round_to_grid

QUANTIZATION = "quantization_config"
LARGEST_FILE = 4 * 2**30


class PackedFiles:
    """The files of a packed output folder."""

    def __init__(
        self,
        folder: Path,
        parts: Path,
        streamed: StreamedModel,
        source: Shards,
        keep_types: bool,
        head: str | None = None,
    ) -> None:
        """head: the grid that embedding and head are rounded to, if any."""
        self.folder = folder
        self.parts = parts
        self.streamed = streamed
        self.source = source
        self.head = head
        raw = plain_headers(source, streamed, keep_types)
        self.headers = {name: parse_header(raw[name], name) for name in source.files}
        self.entries = {e.name: e for header in self.headers.values() for e in header.entries}

    @property
    def size(self) -> int:
        """Bytes the files take at most: none is larger packed than plain, and parts are copied."""
        return sum(header.file_size for header in self.headers.values())

    def create(self) -> None:
        for folder in (self.folder, self.parts):
            folder.mkdir(exist_ok=True)
            for path in filter(Path.is_file, folder.iterdir()):
                path.unlink()

    def is_there(self, finished: int) -> bool:
        """Whether the parts an earlier attempt made are still there."""
        return all(self._part(index).is_file() for index in range(finished))

    def open_written(self) -> Shards:
        """The tensors written so far."""
        if (self.folder / MANIFEST).is_file():
            return open_shards(self.folder)
        return self._open_parts(range(len(self.streamed)))

    def write_block(self, index: int, kept: MaskSet, values: Mapping[str, OnGrid]) -> None:
        """The block that is in memory, on the disk when this returns. What has values is packed,
        anything else is as it is in the source."""
        blobs = {}
        for name, pieces in matrices_by_parameter(self.streamed.layout.matrices(index)).items():
            if any(matrix.name in values for matrix in pieces):
                blobs[name] = _encode_codes(pieces, kept[name], values)
        self.write_part(index, blobs)

    def write_part(self, index: int, blobs: Mapping[str, Tensor]) -> None:
        """A block whose parameters are packed as in `blobs`, or else are as in the source."""
        self._write(self._part(index), blobs, self.streamed.keys_of_block(index))

    def write_rest(self) -> None:
        """What belongs to no block; then everything in few files, and what the folder is."""
        header = parse_header(mask_header(self.streamed), FILE_NAME)
        self.write_whole(text_of(header))

    def write_whole(self, masks: str | None) -> None:
        """As `write_rest`. masks is the header of the plain folder's file of masks, if it has one
        that the blobs tell."""
        blocks = range(len(self.streamed))
        done = {key for index in blocks for key in self.streamed.keys_of_block(index)}
        self._write(
            self._part(len(blocks)),
            self._pack_head() if self.head else {},
            [key for key in self.source if key not in done],
        )
        written = self._open_parts(range(len(blocks) + 1))
        manifest = Manifest(
            files={name: text_of(header) for name, header in self.headers.items()},
            places=dict(written.places),
            checksums=dict(written.checksums),
            masks=masks,
        )
        self._gather(written.stored)
        index = self.source.folder / INDEX
        if index.is_file():
            manifest.index = index_of(index, sum(entry.size for entry in self.entries.values()))
        self._finish(manifest)

    def _finish(self, manifest: Manifest) -> None:
        """The configuration says that the folder is packed, the manifest what it is packed from."""
        path = self.folder / "config.json"
        manifest.config = path.read_text()
        config = json.loads(manifest.config)
        config[QUANTIZATION] = {"quant_method": "symprune", "format": blob.VERSION}
        durable.write_text(path, json.dumps(config, indent=2) + "\n")
        durable.write_text(self.folder / MANIFEST, manifest.to_json())

    def _part(self, index: int) -> Path:
        return self.parts / f"block-{index:05}.safetensors"

    def _open_parts(self, indices: Iterable[int]) -> PackedShards:
        names = [self._part(index).name for index in indices if self._part(index).is_file()]
        stored = Shards(self.parts, names)
        places: dict[str, Place] = {}
        checksums: dict[str, int] = {}
        for header in stored.headers.values():
            about = {name: json.loads(text) for name, text in header.metadata.items()}
            places |= {key: Place(*place) for key, place in about["places"].items()}
            checksums |= about["checksums"]
        return PackedShards(stored, self.headers, places, checksums)

    def _write(self, path: Path, blobs: Mapping[str, Tensor], keys: list[str]) -> None:
        places: dict[str, Place] = {}
        tensors: dict[str, Tensor] = {}
        for name, packed in blobs.items():
            places |= self._find_places(name, packed)
            tensors[blob.packed_name(name)] = packed
        for key in keys:
            if key not in places:
                tensors[key] = self.source.read(key).to(DTYPES[self.entries[key].dtype])
        about = {
            "places": {key: list(vars(place).values()) for key, place in places.items()},
            "checksums": {name: checksum(tensor) for name, tensor in tensors.items()},
        }
        metadata = {name: json.dumps(content) for name, content in about.items()}
        durable.write_tensors(path, tensors, metadata)

    def _find_places(self, name: str, packed: Tensor) -> dict[str, Place]:
        """Which tensors of the plain checkpoint a packed parameter holds, and where in it."""
        names = self.streamed.names
        sources = names.sources[name]
        if len(sources) == 1 and sources[0][1] is None:
            return {sources[0][0]: Place(name)}
        dense = blob.decode(packed, self.streamed.dtype)
        apart = names.take_apart({name: dense})
        return {key: locate(name, dense, part) for key, part in apart.items()}

    def _pack_head(self) -> dict[str, Tensor]:
        """The embedding and the head, rounded; where they are one, the embedding alone."""
        assert self.head is not None
        model, names, blobs = self.streamed.model, self.streamed.names, dict[str, Tensor]()
        modules = (model.get_input_embeddings(), model.get_output_embeddings())
        seen: set[int] = set()
        for name, parameter in model.named_parameters():
            inside = any(parameter is getattr(module, "weight", None) for module in modules)
            if inside and name in names.sources and id(parameter) not in seen:
                seen.add(id(parameter))
                found = round_to_grid(names.read(self.source, name), GRIDS[self.head])
                blobs[name] = blob.encode_codes([(found.codes, found.scales, None)], self.head)
        return blobs

    def _gather(self, stored: Shards) -> None:
        """The parts' tensors in files of a convenient size, and the index of these."""
        groups: list[list[Any]] = [[]]
        room = LARGEST_FILE
        for header in stored.headers.values():
            size = sum(entry.size for entry in header.entries)
            if groups[-1] and size > room:
                groups.append([])
                room = LARGEST_FILE
            groups[-1] += header.entries
            room -= size
        count = len(groups)
        index: dict[str, str] = {}
        for number, entries in enumerate(groups, 1):
            name = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else SINGLE
            described = [(e.name, DTYPES[e.dtype], e.shape) for e in entries]
            file = OutputFile(self.folder / name, make_header(described, {"format": "pt"}))
            file.create()
            for entry in entries:
                file.copy(entry.name, stored)
                index[entry.name] = name
            file.sync()
            file.close()
        if count > 1:
            total = sum(entry.size for entries in groups for entry in entries)
            content = {"metadata": {"total_size": total}, "weight_map": index}
            durable.write_text(self.folder / INDEX, json.dumps(content, indent=2) + "\n")


def matrices_by_parameter(matrices: Iterable[Matrix]) -> dict[str, list[Matrix]]:
    """The matrices that each parameter is, or is stacked of."""
    found: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        found.setdefault(matrix.parameter_name, []).append(matrix)
    return found


def _encode_codes(
    pieces: list[Matrix], keep: Tensor, values: Mapping[str, OnGrid]
) -> Tensor:
    """A parameter's blob. A piece that no calibration token came by has no values: it is rounded."""
    grid = next(values[matrix.name].grid for matrix in pieces if matrix.name in values)
    found = []
    for matrix in pieces:
        value = values.get(matrix.name) or round_to_grid(matrix.weight, grid)
        kept = matrix.slice_of(keep)
        found.append((value.codes.cpu(), value.scales.cpu(), None if kept.all() else kept))
    first = pieces[0]
    stacked = first.piece is not None
    return blob.encode_codes(found, grid.name, transposed=first.transposed, stacked=stacked)


def locate(name: str, parameter: Tensor, part: Tensor) -> Place:
    """Where in a stacked parameter a tensor of the plain checkpoint is: rows of one piece."""
    rows = part.shape[0]
    pieces = parameter if parameter.dim() == part.dim() + 1 else parameter[None]
    for piece in range(len(pieces)):
        for first in range(0, pieces[piece].shape[0] - rows + 1, rows):
            place = Place(name, piece if pieces is parameter else None, first, rows)
            there = place.cut(parameter)
            if there.shape == part.shape and torch.equal(there[:1], part[:1]):
                if torch.equal(there, part):
                    return place
    raise SympruneError(f"{name} is not made of rows of the checkpoint's tensors; it is not packed.")
