"""What the machine has: memory, with the limits a container sets, room on a disk, and a device."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

GROUPS = Path("/sys/fs/cgroup")
OF_PROCESS = Path("/proc/self/cgroup")
UNLIMITED = 2**60  # what version 1 says where there is no limit is near 2^63


@dataclass(frozen=True)
class Capacity:
    """Bytes that can still be had: of memory, where the model is computed and of the machine, and
    of the disk."""

    memory: int
    disk: int
    accelerator: int | None = None

    @classmethod
    def of(cls, place: Path, device: torch.device) -> Capacity:
        """place: a file or folder that will be written."""
        found = None
        if device.type == "cuda":
            found = int(torch.cuda.mem_get_info(device)[0])
        return cls(free_memory(), free_disk(place), found)


def free_memory() -> int:
    """What the system has, or less where a control group says so."""
    free, room = int(psutil.virtual_memory().available), room_in_group()
    return free if room is None else min(free, room)


def free_disk(place: Path) -> int:
    """Room on the disk of a file or folder, which need not exist yet."""
    there = place.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def room_in_group(groups: Path = GROUPS, of_process: Path = OF_PROCESS) -> int | None:
    """What the limits of the process's control group and of those around it leave; None without a
    limit. Pages of files count as used there, but those not in use are given back."""
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, _, rest = line.partition(":")
        kind, _, path = rest.partition(":")
        if kind not in ("", "memory"):
            continue
        folder, names = groups, ("memory.max", "memory.current", "inactive_file")
        if kind == "memory":
            folder = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        own = folder / path.strip().lstrip("/")
        for each in (own, *own.parents):
            if not each.is_relative_to(folder):
                break
            room = _room(each, *names)
            rooms += [] if room is None else [room]
    return min(rooms, default=None)


def _room(folder: Path, limit: str, used: str, given_back: str) -> int | None:
    try:
        most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        idle = sum(int(line.split()[1]) for line in lines if line.split()[0] == given_back)
        found = None if most == "max" or int(most) > UNLIMITED else int(most)
    except (OSError, ValueError, IndexError):
        return None
    return None if found is None else max(0, found - now + idle)
