"""What models take on disk: the files of their weights, and the bits of one weight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from symprune.checkpoint.packed import weight_files
from symprune.checkpoint.packed_shards import PackedShards, is_packed
from symprune.checkpoint.parameter_names import skeleton
from symprune.checkpoint.streamed_model import StreamedModel, without_packing
from symprune.checkpoint.tensor_files import Shards
from symprune.models import hub

OTHERS = ("*.bin", "*.pt")  # weights in another form than safetensors


def weight_bytes(origin: hub.Origin, folder: Path | None = None) -> int | None:
    """Bytes of the files with a model's weights; None where they are not on this machine. folder is
    where they are, if not where the model's name says."""
    if origin.gguf_file:
        return Path(str(origin)).stat().st_size
    place = folder or Path(origin.path)
    if not place.is_dir():
        return None
    files = {place / name for name in weight_files(place)}
    files = files or {path for pattern in OTHERS for path in place.glob(pattern)}
    return sum(path.stat().st_size for path in files) or None


def of_run(origin: hub.Origin, folder: Path, shards: Shards, output: Path) -> dict[str, Any]:
    """What the weights took before, in `folder`, and take now, and the bits of a dense weight,
    where that is told by the type of all of them."""
    copied = not origin.gguf_file and origin.is_local and folder != Path(origin.path)
    found: dict[str, Any] = {
        "dense_bytes": weight_bytes(origin, None if copied else folder),
        "pruned_bytes": sum((output / name).stat().st_size for name in weight_files(output)),
    }
    kinds = {shards.dtype(name) for name in shards}
    if not origin.gguf_file and not isinstance(shards, PackedShards) and len(kinds) == 1:
        found["dense_bits_per_weight"] = 8 * kinds.pop().itemsize
    return found


def bits_per_weight(streamed: StreamedModel, shards: Shards) -> float:
    """What a weight of the blocks' matrices takes in the files, masks and scales included."""
    bits = weights = 0
    for matrix in streamed.layout.all_matrices():
        keys = streamed.names.keys_of([matrix.parameter_name])
        weights += sum(math.prod(shards.entries[key].shape) for key in keys)
        if isinstance(shards, PackedShards):
            stored = {shards.stored_name(key) for key in keys}
            bits += 8 * sum(shards.stored.entries[key].size for key in stored)
        else:
            bits += 8 * sum(shards.entries[key].size for key in keys)
    return bits / weights


def bits_of_gguf(path: Path) -> float:
    """The same of a GGUF file."""
    from gguf import GGUFReader

    tensors = [
        t for t in GGUFReader(path).tensors if t.name.startswith("blk.") and len(t.shape) > 1
    ]
    return sum(8 * int(t.n_bytes) for t in tensors) / sum(int(t.n_elements) for t in tensors)


def size_in_memory(config: Any, origin: hub.Origin) -> int:
    """Bytes of a model's weights in memory, at most: in fp32, as a CPU may compute them; a packed
    one stays as it is stored."""
    place = Path(origin.path)
    if origin.is_local and origin.gguf_file is None and is_packed(place):
        return weight_bytes(origin) or 0
    model = skeleton(without_packing(config), torch.float32, origin.access.trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()) * 4
