"""Several processes, one model: each has a share of the calibration samples, all do the same.

Every process walks the same blocks over its own samples; `engine.reduce` adds up what they measure,
and `engine.visit.shared_work` divides what is to be decided.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from symprune.errors import SympruneError

Answer = TypeVar("Answer")
_apart = False  # this process does something that the others do not


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


@contextmanager
def alone() -> Iterator[None]:
    """Within, this process is the only one: what it does there waits for no other."""
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


def is_first() -> bool:
    """Whether this is the process that speaks and writes, also before `start`."""
    return (dist.get_rank() if _running() else int(os.environ.get("RANK", "0"))) == 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _running() and not _apart else 1


def rank() -> int:
    """Which of them this is; 0 writes the files."""
    return dist.get_rank() if _running() and not _apart else 0


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


def agree(answer: Answer) -> Answer:
    """The first process's answer, in all of them."""
    return tell(answer, 0)


def tell(answer: Answer | None, owner: int) -> Answer:
    """What one process says, in all of them; the others give None."""
    told = [answer]
    if size() > 1:
        dist.broadcast_object_list(told, src=owner)
    return told[0]  # type: ignore[return-value]


def all_agree(answer: bool) -> bool:
    """Whether all processes say yes, in all of them."""
    return all(gather({rank(): float(answer)}).values())


def wait() -> None:
    """Until all processes are here."""
    if size() > 1:
        dist.barrier()


def gather(mine: dict[int, float]) -> dict[int, float]:
    """All processes' entries, in all of them."""
    return {number: value for part in everyone(mine) for number, value in part.items()}


def everyone(mine: Answer) -> list[Answer]:
    """Every process's answer, in all of them."""
    if size() == 1:
        return [mine]
    answers: list[Answer] = [mine] * size()
    dist.all_gather_object(answers, mine)
    return answers


def send(
    tensor: Tensor | None, owner: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor of one process, in all of them; the others give None."""
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor = tensor.contiguous()
    dist.broadcast(tensor.view(torch.uint8) if dtype == torch.bool else tensor, src=owner)
    return tensor
