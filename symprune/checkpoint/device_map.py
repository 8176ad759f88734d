"""Which device computes which block: accelerate's automatic device map, for a model on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from symprune.checkpoint.streamed_model import StreamedModel
from symprune.errors import SympruneError

CHOICES = ("auto", "balanced", "balanced_low_0", "sequential")


def check_device_map(how: str | None) -> None:
    """Refuse, before any work, a way to divide blocks that is unknown or has nothing to divide."""
    if how is None or how == "auto":
        return
    if how not in CHOICES:
        raise SympruneError(f"Unknown device map {how!r}; choose {', '.join(CHOICES)}.")
    if torch.accelerator.device_count() < 2:
        raise SympruneError(f"Device map {how!r} needs several accelerators; use auto.")


def choose_devices(
    streamed: StreamedModel, how: str, max_memory: Mapping[Any, int | str] | None = None
) -> list[torch.device]:
    """A device for every block, as accelerate divides the model; blocks it would leave on the disk
    or in main memory are computed on the model's own device.

    max_memory (device -> bytes) is what may be used; all there is by default.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, get_max_memory

    if how not in CHOICES:
        raise SympruneError(f"Unknown device map {how!r}; choose {', '.join(CHOICES)}.")
    whole = [type(block).__name__ for block in streamed.layout.blocks]
    options: dict[str, Any] = {"no_split_module_classes": sorted(set(whole))}
    options["dtype"] = streamed.compute
    room = dict(max_memory) if max_memory else get_max_memory()
    if how != "sequential":
        room = get_balanced_memory(
            streamed.model, room, low_zero=how == "balanced_low_0", **options
        )
    found = infer_auto_device_map(streamed.model, max_memory=room, **options)
    devices = []
    for index in range(len(streamed)):
        name = f"{streamed.layout.prefix}.{index}"
        parts = [where for part, where in found.items() if f"{name}.".startswith(f"{part}.")]
        where = parts[0] if parts else found.get("", "cpu")
        devices.append(streamed.device if where in ("cpu", "disk") else _device(where))
    return devices


def _device(where: int | str) -> torch.device:
    """accelerate numbers the devices of the machine's accelerator."""
    if isinstance(where, str):
        return torch.device(where)
    kind = torch.accelerator.current_accelerator()
    return torch.device("cuda" if kind is None else kind.type, where)
