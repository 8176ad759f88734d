"""Where packed blocks go: a part file for each block as it is done, a few whole files at the end.

How large a packed block is shows when it is done, so its file is made then. The parts of a run that
is interrupted stay, and say in their headers what they hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor

from symprune.checkpoint.output_files import (
    index_of,
    mask_header,
    plain_headers,
    read_moved,
    to_stored,
)
from symprune.checkpoint.packed_shards import (
    MANIFEST,
    Manifest,
    PackedShards,
    Place,
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
    TensorEntry,
    make_header,
    parse_header,
)
from symprune.engine.blocks import PrunedBlock
from symprune.errors import SympruneError
from symprune.machine import durable
from symprune.machine.checksums import checksum, digest_file
from symprune.maskset import FILE_NAME
from symprune.runtime import blob
from symprune.runtime.packable import BLOCKS, Packing, guard_name, packable
from symprune.validation import parse_json
from symprune.values.grid import Grid, OnGrid
from symprune.values.scales import round_to_grid

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
        head: Grid | None = None,
    ) -> None:
        """head: the grid that embedding and head are rounded to, if any."""
        self.folder = folder
        self.parts = parts
        self.streamed = streamed
        self.source = source
        self.head = head
        self.packings = packable(streamed.model)
        raw = plain_headers(source, streamed, keep_types)
        self.headers = {name: parse_header(raw[name], name) for name in source.files}
        self.entries = {e.name: e for header in self.headers.values() for e in header.entries}

    @property
    def size(self) -> int:
        """Bytes the files take at most: none is larger packed than plain, and parts are copied."""
        return sum(header.file_size for header in self.headers.values())

    def bits_per_weight(self) -> float:
        """What a prunable weight takes, once all are written, masks and scales included."""
        written = self.open_parts()
        bits = weights = 0
        for name, packing in self.packings.items():
            if packing.part == BLOCKS:
                keys = self.streamed.names.keys_of([name])
                stored = {written.stored_name(key) for key in keys}
                bits += 8 * sum(written.stored.entries[key].size for key in stored)
                weights += math.prod(packing.shape)
        return bits / weights

    def create(self) -> None:
        for folder in (self.folder, self.parts):
            folder.mkdir(exist_ok=True)
            for path in filter(Path.is_file, folder.iterdir()):
                path.unlink()

    def take_up(self, finished: int, digests: Mapping[str, str]) -> int:
        """How many of the `finished` parts of an earlier attempt are still there as they were
        written, from the first one on. Others are removed."""
        kept: list[Path] = []
        for part in map(self._part, range(finished)):
            if not part.is_file() or digest_file(part) != digests.get(part.name):
                break
            kept.append(part)
        for path in {*self.parts.glob("*")} - {*kept}:
            path.unlink()
        return len(kept)

    def open_written(self) -> Shards:
        """The tensors written so far."""
        if (self.folder / MANIFEST).is_file():
            return open_shards(self.folder)
        return self.open_parts()

    def open_computed(self) -> Shards:
        """The tensors written so far, as the blocks were computed with them: values on a grid are
        more precise than the type of the plain files."""
        written = self.open_parts()
        written.exact = True
        return written

    def open_parts(self) -> PackedShards:
        """The tensors of the parts that are there."""
        paths = sorted(self.parts.glob("block-*.safetensors"))
        stored = Shards(self.parts, [path.name for path in paths])
        places: dict[str, Place] = {}
        checksums: dict[str, int] = {}
        for header in stored.headers.values():
            about = {name: parse_json(text) for name, text in header.metadata.items()}
            places |= {key: Place(*place) for key, place in about["places"].items()}
            checksums |= about["checksums"]
        return PackedShards(stored, self.headers, places, checksums)

    def write_block(self, index: int, pruned: PrunedBlock) -> dict[str, str]:
        """The block that is in memory, packed, on the disk when this returns; the digest of what
        was written, for `take_up`."""
        blobs, plain = dict[str, Tensor](), dict[str, Tensor]()
        for name in pruned.masks:
            packing, keep = self.packings[name], pruned.masks[name]
            if any(matrix in pruned.values for matrix in packing.matrices):
                blobs[name] = _encode_codes(packing, keep, pruned.values)
                continue
            weight = to_stored(self.streamed, name, keep, pruned.moves)
            packed = pack_floats(packing, weight)
            if packed is None:
                plain[name] = weight
            else:
                blobs[name] = packed
        plain |= read_moved(self.streamed, self.streamed.names_of_block(index), pruned)
        self.write_part(index, blobs, plain)
        return {self._part(index).name: digest_file(self._part(index))}

    def write_part(
        self, index: int, blobs: Mapping[str, Tensor], plain: Mapping[str, Tensor] | None = None
    ) -> None:
        """A block with these parameters packed, these plain, and the others as in the source."""
        keys = self.streamed.keys_of_block(index)
        self._write(self._part(index), keys, blobs, self.streamed.names.take_apart(plain or {}))

    def write_rest(self) -> None:
        """What belongs to no block; then everything in few files, and what the folder is."""
        header = parse_header(mask_header(self.streamed), FILE_NAME)
        self.write_whole(text_of(header))

    def write_whole(self, masks: str | None) -> None:
        """As `write_rest`. masks is the header of the plain folder's file of masks, if it has one
        that the blobs tell."""
        blocks = range(len(self.streamed))
        done = {key for index in blocks for key in self.streamed.keys_of_block(index)}
        rest = [key for key in self.source if key not in done]
        moved = read_moved(self.streamed, self.streamed.names_around())
        moved = self.streamed.names.take_apart(moved)
        self._write(self._part(len(blocks)), rest, self._pack_head(), moved)
        written = self.open_parts()
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
        config = parse_json(manifest.config)
        config[QUANTIZATION] = {"quant_method": "symprune", "format": blob.VERSION}
        durable.write_text(path, json.dumps(config, indent=2) + "\n")
        durable.write_text(self.folder / MANIFEST, manifest.to_json())

    def _part(self, index: int) -> Path:
        return self.parts / f"block-{index:05}.safetensors"

    def _write(
        self,
        path: Path,
        keys: list[str],
        blobs: Mapping[str, Tensor],
        changed: Mapping[str, Tensor],
    ) -> None:
        places: dict[str, Place] = {}
        tensors: dict[str, Tensor] = {}
        for name, packed in blobs.items():
            places |= self._find_places(name, packed)
            tensors[blob.packed_name(name)] = packed
        for key in keys:
            if key not in places:
                tensor = changed[key] if key in changed else self.source.read(key)
                tensors[key] = tensor.to("cpu", DTYPES[self.entries[key].dtype]).contiguous()
        about = {
            "places": {key: list(astuple(place)) for key, place in places.items()},
            "checksums": {name: checksum(tensor) for name, tensor in tensors.items()},
        }
        metadata = {name: json.dumps(content) for name, content in about.items()}
        durable.write_tensors(path, tensors, metadata)

    def _find_places(self, name: str, packed: Tensor) -> dict[str, Place]:
        """Which tensors of the plain checkpoint a packed parameter holds, and where in it."""
        names, packing = self.streamed.names, self.packings[name]
        found: dict[str, Place] = {}
        for same in (name, *packing.tied):
            sources = names.sources.get(same, [])
            if len(sources) == 1 and sources[0][1] is None:
                found[sources[0][0]] = Place(name)
            elif sources:
                dense = blob.decode(packed, self.streamed.dtype).view(packing.shape)
                apart = names.take_apart({same: dense})
                found |= {key: locate(name, dense, part) for key, part in apart.items()}
        return found

    def _pack_head(self) -> dict[str, Tensor]:
        """The embedding and the head, rounded; where they are one, the embedding alone."""
        if self.head is None:
            return {}
        blobs, names = dict[str, Tensor](), self.streamed.names
        for name, packing in self.packings.items():
            known = next((n for n in (name, *packing.tied) if n in names.sources), None)
            if packing.part != BLOCKS and known is not None:
                found = round_to_grid(self.streamed.read(known), self.head)
                kind = self.head.name
                blobs[name] = blob.encode_codes([(found.codes, found.scales, None)], kind)
        return blobs

    def _gather(self, parts: Shards) -> None:
        """The parts' tensors in files of a convenient size, and the index of these."""
        groups: list[list[TensorEntry]] = [[]]
        room = LARGEST_FILE
        # What several blocks share is in the part of each.
        first = {
            entry.name: part
            for part in reversed(parts.files)
            for entry in parts.headers[part].entries
        }
        for part, header in parts.headers.items():
            own = [entry for entry in header.entries if first[entry.name] == part]
            size = sum(entry.size for entry in own)
            if groups[-1] and size > room:
                groups.append([])
                room = LARGEST_FILE
            groups[-1] += own
            room -= size
        packed = [name for name in self.packings if blob.packed_name(name) in parts]
        guards = [guard_name(packed)] if packed else []
        count, index = len(groups), dict[str, str]()
        for number, entries in enumerate(groups, 1):
            name = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else SINGLE
            described = [(e.name, DTYPES[e.dtype], e.shape) for e in entries]
            described += [(guard, torch.float32, (0,)) for guard in guards]
            file = OutputFile(self.folder / name, make_header(described, {"format": "pt"}))
            file.create()
            for entry in entries:
                file.copy(entry.name, parts)
            file.sync()
            file.close()
            index |= dict.fromkeys((tensor for tensor, *_ in described), name)
            guards = []
        if count > 1:
            total = sum(entry.size for entries in groups for entry in entries)
            content = {"metadata": {"total_size": total}, "weight_map": index}
            durable.write_text(self.folder / INDEX, json.dumps(content, indent=2) + "\n")


def pack_floats(packing: Packing, weight: Tensor) -> Tensor | None:
    """A parameter's blob, if it is smaller than the parameter."""
    if weight.dtype not in blob.FLOATS.values():
        return None
    how = {"transposed": packing.transposed, "stacked": packing.stacked}
    packed = blob.encode_floats(packing.pieces(weight), **how)
    return packed if packed.numel() < weight.numel() * weight.element_size() else None


def _encode_codes(packing: Packing, keep: Tensor, values: Mapping[str, OnGrid]) -> Tensor:
    """A parameter's blob, from its matrices on a grid."""
    pieces = []
    for name, kept in zip(packing.matrices, packing.pieces(keep), strict=True):
        pieces.append((values[name].codes, values[name].scales, None if kept.all() else kept))
    kind = values[packing.matrices[0]].grid.name
    how = {"transposed": packing.transposed, "stacked": packing.stacked}
    return blob.encode_codes(pieces, kind, **how)


def locate(name: str, parameter: Tensor, part: Tensor) -> Place:
    """Where in a stacked parameter a tensor of the plain checkpoint is: rows of one piece."""
    rows = part.shape[0]
    pieces = parameter if parameter.dim() == part.dim() + 1 else parameter[None]
    for piece in range(len(pieces)):
        for first in range(0, pieces[piece].shape[0] - rows + 1, rows):
            place = Place(name, piece if pieces is parameter else None, first, rows)
            there = place.cut(parameter)
            if all(torch.equal(there[some], part[some]) for some in (slice(1), slice(None))):
                return place
    raise SympruneError(f"{name} is put together in a way that packing does not know.")
