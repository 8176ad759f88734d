"""The device the other tests pretend to have fails and waits where CUDA does."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from pretend_device import DEVICE, OnDevice, PretendDevice


@pytest.mark.parametrize(
    "meet",
    [
        lambda there, here: there + here,
        lambda there, here: there @ here.T,
        lambda there, here: here.mul_(there),
        lambda there, here: here.sum().add_(there.sum()),
        lambda there, here: torch.cat([there, here]),
        lambda there, here: torch.stack([there.sum(), here.sum()]),
        lambda there, here: there.gather(1, here.long()),
        lambda there, here: here[there[0].long()],
        lambda there, here: there.masked_fill(here > 0, 0),
        lambda there, here: there.numpy(),
    ],
)
def test_the_pretend_device_fails_where_cuda_does(meet: Any) -> None:
    here = torch.ones(3, 4)
    with PretendDevice(), pytest.raises((RuntimeError, TypeError)):
        meet(here.to(DEVICE), here)


@pytest.mark.parametrize(
    "meet",
    [
        lambda there, here: there + here.sum(),
        lambda there, here: there[here[0].long()],
        lambda there, here: there[here[:, 0] > 0],
        lambda there, here: there.where(there > 0, here.sum()),
        lambda there, here: there.masked_fill(there > 0, here.sum()),
        lambda there, here: there.copy_(here),
    ],
)
def test_the_pretend_device_takes_from_the_host_what_cuda_takes(meet: Any) -> None:
    here = torch.ones(3, 4)
    with PretendDevice() as device:
        assert isinstance(meet(here.to(DEVICE), here), OnDevice)
    assert not device.waits


@pytest.mark.parametrize(
    "ask",
    [
        lambda there: there.sum().item(),
        lambda there: bool(there.any()),
        lambda there: float(there.sum()),
        lambda there: there.cpu(),
        lambda there: there.to("cpu"),
        lambda there: there.tolist(),
        lambda there: there.nonzero(),
        lambda there: there[there > 0],
        lambda there: torch.equal(there, there),
        lambda there: torch.ones(3, 4).copy_(there),
    ],
)
def test_the_pretend_device_counts_every_wait(ask: Any) -> None:
    with PretendDevice() as device:
        there = torch.ones(3, 4).to(DEVICE)
        assert not device.waits
        ask(there)
    assert sum(device.waits.values()) == 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_models_run_on_the_pretend_device_with_the_numbers_of_the_cpu(family: str) -> None:
    """To the bit: it computes with the same kernels."""
    model, tokens = families.model(family), families.tokens(2, 8)
    with PretendDevice() as device, torch.no_grad():
        found = device.take(model)(input_ids=tokens.to(DEVICE)).logits
    with torch.no_grad():
        assert torch.equal(found.inner, model(input_ids=tokens).logits)
