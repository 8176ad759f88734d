"""A model opened for pruning: its safetensors files, itself without weights, and the output's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from symprune.checkpoint import resume
from symprune.checkpoint.device_map import choose_devices
from symprune.checkpoint.load import local_folder, make_dense_copy
from symprune.checkpoint.output_files import OutputFiles
from symprune.checkpoint.packed import PARTS
from symprune.checkpoint.packed_files import PackedFiles
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.streamed_model import StreamedModel, stored_dtype
from symprune.checkpoint.tensor_files import Shards
from symprune.engine import walk
from symprune.jobs.preparation import Request, Tell
from symprune.machine import distributed
from symprune.models import hub
from symprune.recipe import Recipe


@dataclass(frozen=True)
class Opened:
    """A model's folder, its files and the model without weights."""

    folder: Path
    shards: Shards
    streamed: StreamedModel


def find_stored_dtype(job: Request, origin: hub.Origin, config: Any) -> torch.dtype:
    """The type of the output's weights."""
    if origin.gguf_file:
        return torch.float32 if job.dtype == "auto" else getattr(torch, job.dtype)
    folder = local_folder(origin)
    return stored_dtype(job.dtype, config, open_shards(folder) if folder else None)


def open_model(
    job: Request,
    origin: hub.Origin,
    computed: torch.dtype,
    device: torch.device,
    work: Path,
    device_map: str | None,
    tell: Tell,
) -> Opened:
    """The model's safetensors folder; what comes as something else is made one, in memory."""
    folder = local_folder(origin)
    if folder is None:
        folder = work / "dense"
        if distributed.rank() == 0:
            tell(f"Loading {job.model}")
            make_dense_copy(origin, job.dtype, folder)
    return open_folder(job, folder, computed, device, device_map)


def open_folder(
    job: Request,
    folder: Path,
    computed: torch.dtype,
    device: torch.device,
    device_map: str | None,
) -> Opened:
    """A folder of safetensors files."""
    shards = open_shards(folder)
    config = hub.load_config(hub.Origin(job.model, str(folder), access=job.access))
    trusted = job.access.trust_remote_code
    streamed = StreamedModel(shards, config, job.dtype, device, trusted, computed)
    if device_map is not None:
        streamed.place(choose_devices(streamed, device_map))
    return Opened(folder, shards, streamed)


def choose_files(
    recipe: Recipe, opened: Opened, work: Path, keep_types: bool
) -> OutputFiles | PackedFiles:
    """The output's, none of them there yet: plain ones; packed where values are on a grid."""
    place = (opened.streamed, opened.shards, keep_types)
    walk.check_pattern(opened.streamed.layout, recipe)
    if recipe.rounding is None and recipe.head_grid is None:
        return OutputFiles(work / resume.OUTPUT, *place)
    return PackedFiles(work / resume.OUTPUT, work / PARTS, *place, recipe.head_grid)
