"""Processes that each have an accelerator. Neither is here: `pretend_device` stands in for the
accelerator, and the other process has what this one has. As NCCL does, the group takes tensors on
the accelerator only."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
import torch.distributed as dist
from pretend_device import DEVICE, OnDevice, PretendDevice
from torch import Tensor

import symprune
from symprune import Recipe, gram, stats
from symprune.engine.collect import Collector
from symprune.engine.reduce import reduce
from symprune.engine.visit import shared_work
from symprune.stats import GRAM, MOMENTS, SQUARE, ChannelStats


class Group:
    """Two processes; objects are what the other one says next, if not the same as this one."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.sent: list[int] = []

    def check(self, tensor: Tensor) -> None:
        if not isinstance(tensor, OnDevice) or not tensor.is_contiguous():
            raise RuntimeError("Tensors must be on the accelerator and dense.")
        self.sent.append(tensor.numel())

    def broadcast(self, tensor: Tensor, src: int) -> None:
        assert src == 0
        self.check(tensor)

    def all_reduce(self, tensor: Tensor) -> None:
        self.check(tensor)
        tensor += tensor.clone()

    def all_gather(self, parts: list[Tensor], part: Tensor) -> None:
        self.check(part)
        for each in parts:
            each.copy_(part)

    def broadcast_object_list(self, told: list[Any], src: int) -> None:
        """This is the first process, which tells the other."""
        assert src == 0

    def all_gather_object(self, everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine, self.objects.pop(0) if self.objects else mine]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group()
    for name in (
        "all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list",
    ):  # fmt: skip
        monkeypatch.setattr(dist, name, getattr(made, name))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return made


@pytest.mark.parametrize("gram_device", ["auto", "cpu", "disk"])
def test_gram_matrices_kept_elsewhere_are_added_up_on_the_accelerator(
    gram_device: str, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "SENT", 60)  # three rows of 20
    x = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
    with PretendDevice():
        found = ChannelStats(20, {SQUARE, MOMENTS, GRAM}, device=DEVICE, gram_device=gram_device)
        found.add(x.to(DEVICE))
        found.all_reduce()
        matrix, norm = found.gram.cpu(), found.norm.cpu()
    expected = ChannelStats(20, {SQUARE, MOMENTS, GRAM})
    expected.add(torch.cat([x, x]))
    assert (found.samples, found.tokens) == (4, 32)
    assert torch.equal(matrix, expected.gram)
    assert torch.equal(norm, expected.norm)
    assert isinstance(found.sums[GRAM], OnDevice) == (gram_device == "auto")
    assert max(group.sent) == 60


@pytest.mark.parametrize("gram_device", ["cpu", "disk"])
def test_an_expert_only_the_other_process_met_has_its_gram_matrix_where_it_was_asked_for(
    gram_device: str, group: Group
) -> None:
    group.objects = [[(["expert"], 6, [GRAM])], []]
    with PretendDevice():
        collector = Collector((), stats.Needs(frozenset({GRAM})), gram_device)
        collector.device = DEVICE
        reduce(collector)
    assert not isinstance(collector.inputs["expert"].sums[GRAM], OnDevice)
    assert collector.inputs["expert"].device == DEVICE


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("gram_device", ["auto", "cpu"])
def test_two_processes_with_an_accelerator_each_prune_as_one_without(
    gram_device: str, family: str, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, recipe = families.tokens(2, 8), Recipe(method="symwanda", update="lsq", allocate="owl")
    # The other process is not really there: this one decides everything, and tells it.
    monkeypatch.setattr(shared_work, "divide", lambda costs, _: [0] * len(costs))
    model = families.model(family)
    with PretendDevice() as device:
        copy = device.take(model)
        twice = tokens.repeat(2, 1)  # one half for each process
        found = symprune.prune(copy, twice, recipe, gram_device=gram_device)
    monkeypatch.undo()
    expected = symprune.prune(model, twice, recipe)
    for name, keep in found.masks.items():
        assert torch.equal(keep, expected.masks[name]), name
