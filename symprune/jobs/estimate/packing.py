"""The forecast of packing a checkpoint: its first block packed, in memory."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from symprune.checkpoint.packed import PARTS, open_plain, pack_block
from symprune.checkpoint.packed_files import PackedFiles
from symprune.jobs.estimate.forecast import Forecast
from symprune.jobs.estimate.room import MASKING
from symprune.jobs.estimate.timed import Clock, why
from symprune.machine import memory
from symprune.machine.capacity import Capacity

HASHED = 2**24  # bytes


def forecast_packing(
    folder: Path, output: Path, force: bool = False, clock: Clock = time.perf_counter
) -> Forecast:
    """What `pack` takes; nothing is written."""
    begun = clock()
    streamed, source = open_plain(folder, output, force)
    files = PackedFiles(output, output / PARTS, streamed, source, keep_types=True)
    spent, held = clock() - begun, memory.now()
    with streamed.block(0) as block:
        largest = max(parameter.numel() for parameter in block.parameters())
    begun = clock()
    pack_block(streamed, files, 0)
    seconds = (clock() - begun) * len(streamed)
    begun = clock()
    hashlib.sha256(bytes(HASHED)).digest()
    hashing = (clock() - begun) / HASHED
    need = streamed.block_size + 4 * MASKING * largest
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return Forecast(
        f"Packing {size / 1e9:.2f} GB, {len(streamed)} blocks",
        why(streamed.at, "cpu", streamed.compute, streamed.dtype),
        Capacity.of(output, streamed.at),
        {"packing": seconds, "checksums": size * hashing},
        spent, max(memory.peak(), held + need), held, files.size,
    )  # fmt: skip
