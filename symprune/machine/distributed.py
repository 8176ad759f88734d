"""Several processes, one model: each has a share of the calibration samples, all get the same sums.

Every process walks the same blocks over its own samples. After a block is measured, the statistics
are added up over the processes, so all of them score the same numbers and make the same masks.
Per-channel sums are exact (`stats`), so their order does not show in a bit. The Gram matrix is
summed in fp32, so masks refined and weights updated from it agree to rounding (1e-6), not in every
bit.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from symprune.engine.collect import Collector
from symprune.errors import SympruneError
from symprune.stats import ChannelStats


def start(device: torch.device) -> torch.device:
    """Join the processes a launcher (accelerate, torchrun) has started; the device of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _running():
        return device
    cuda = device.type == "cuda"
    if cuda and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device


def stop() -> None:
    """Leave the other processes."""
    if _running():
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this is the process that speaks and writes, also before `start`."""
    return (rank() if _running() else int(os.environ.get("RANK", "0"))) == 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _running() else 1


def rank() -> int:
    """Which of them this is; 0 writes the files."""
    return dist.get_rank() if _running() else 0


def _running() -> bool:
    return dist.is_available() and dist.is_initialized()


def share(tokens: Tensor, every: bool = True) -> Tensor:
    """This process's samples: consecutive ones, as many as others have or one more.

    every: each process must get one.
    """
    if size() == 1 or len(tokens) == 0:
        return tokens
    if every and len(tokens) < size():
        raise SympruneError(
            f"{len(tokens)} calibration samples are too few for {size()} processes; "
            "raise --nsamples."
        )
    return torch.tensor_split(tokens, size())[rank()]


def agree(answer: bool) -> bool:
    """The first process's answer, in all of them."""
    if size() == 1:
        return answer
    told = [answer]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def wait() -> None:
    """Until all processes are here."""
    if size() > 1:
        dist.barrier()


def reduce(measured: Collector) -> None:
    """Add up the statistics of a block over all processes."""
    if size() == 1:
        return
    for table in (measured.inputs, measured.outputs):
        _reduce(table, measured.device, measured.gram_device)
    seen: list[tuple[set[str], set[str]]] = [(set(), set())] * size()
    dist.all_gather_object(seen, (measured.choosing, measured.unknown))
    for choosing, unknown in seen:
        measured.choosing |= choosing
        measured.unknown |= unknown


def _reduce(table: dict[str, ChannelStats], device: torch.device, gram_device: str) -> None:
    """The processes may have met different experts: first they agree on what there is."""
    groups: dict[int, tuple[ChannelStats, list[str]]] = {}
    for name, stats in table.items():
        groups.setdefault(id(stats), (stats, []))[1].append(name)
    mine = [(names, s.channels, sorted(s.collect)) for s, names in groups.values()]
    everyone: list[list[tuple[list[str], int, list[str]]]] = [[] for _ in range(size())]
    dist.all_gather_object(everyone, mine)
    agreed: dict[str, tuple[list[str], int, list[str]]] = {}
    for group in (group for process in everyone for group in process):
        if not any(name in agreed for name in group[0]):
            agreed |= dict.fromkeys(group[0], group)
    done: set[str] = set()
    for names, channels, collect in agreed.values():
        if names[0] in done:
            continue
        done.update(names)
        met = [table[name] for name in names if name in table]
        stats = met[0] if met else ChannelStats(channels, collect, device, gram_device)
        stats.all_reduce()
        table |= dict.fromkeys(names, stats)


def gather(mine: dict[int, float]) -> dict[int, float]:
    """All processes' entries, in all of them."""
    if size() == 1:
        return mine
    everyone: list[dict[int, float]] = [{} for _ in range(size())]
    dist.all_gather_object(everyone, mine)
    return {number: value for part in everyone for number, value in part.items()}
