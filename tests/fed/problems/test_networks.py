"""The papers' networks have the papers' sizes, and every client can train one of its own."""

from __future__ import annotations

import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.problems.flops import layer_macs
from symprune.fed.problems.losses import Module
from symprune.fed.problems.networks import network
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.simulate import simulate

# FedSpa's gigabytes and FedP3's tables fix these counts.
SIZES = [
    ("lenet5", (784,), 26, 439_096),
    ("vgg11", (3, 32, 32), 10, 9_231_114),
    ("resnet18", (3, 32, 32), 100, 11_220_132),
    ("resnet20", (3, 32, 32), 10, 272_474),
    ("cnn", (3, 32, 32), 10, 4_864 + 102_464 + 1_638_400 + 1_048_576 + 10_240 + 2 * 1024 + 10),
    ("mlp:1024-1024-1024", (784,), 10, 802_816 + 2 * 1_048_576 + 10_240 + 3 * 1024 + 10),
]
MACS = {"lenet5": 2_301_000, "vgg11": 152_769_536, "resnet18": 555_468_800}


@pytest.mark.parametrize(("name", "shape", "classes", "size"), SIZES)
def test_a_network_has_the_parameters_of_its_paper(
    name: str, shape: tuple[int, ...], classes: int, size: int
) -> None:
    module = network(name)(shape, classes)
    assert sum(p.numel() for p in module.parameters()) == size
    assert module(torch.zeros(2, *shape)).shape == (2, classes)
    if name in MACS:
        assert sum(layer_macs(module, shape).values()) == MACS[name]


@pytest.mark.parametrize("name", ["mlp:12-8", "lenet5", "vgg11", "resnet18"])
def test_clients_of_a_stack_get_the_gradients_they_would_get_alone(name: str) -> None:
    x = torch.rand(2, 3, 784, generator=torch.Generator().manual_seed(0)).double()
    y = torch.tensor([[0.0, 1, 2], [2, 1, 1]]).double()
    loss = Module(lambda: network(name)((784,), 3))
    problem = Problem(loss, stack_rows(list(zip(x, y, strict=True))))
    w = torch.stack([problem.initial(0), problem.initial(1)])
    for client, gradient in enumerate(problem.gradient(w)):
        for p, value in zip(
            loss.module.parameters(), loss.layout.split(w[client]).values(), strict=True
        ):
            p.data = value
            p.grad = None
        output = loss.module(x[client])
        torch.nn.functional.cross_entropy(output, y[client].long()).backward()
        alone = torch.cat([p.grad.flatten() for p in loss.module.parameters()])  # type: ignore[union-attr]
        assert torch.allclose(gradient, alone, atol=1e-9)


def test_flat_rows_become_padded_images() -> None:
    assert network("vgg11")((64,), 10)(torch.zeros(1, 64)).shape == (1, 10)
    with pytest.raises(SympruneError, match="65 values"):
        network("lenet5")((65,), 10)


def test_a_network_that_does_not_exist_is_named() -> None:
    with pytest.raises(SympruneError, match="alexnet"):
        network("alexnet")
    with pytest.raises(SympruneError, match="mlp:a"):
        network("mlp:a")


def test_the_character_network_learns_a_rhyme() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 4, (12, 1), generator=generator)
    rows = ((start + torch.arange(9)) % 4).float()
    parts = [(rows[i::2, :-1], rows[i::2, -1]) for i in range(2)]
    problem = Problem(Module(lambda: network("character-lstm")((8,), 4)), stack_rows(parts))
    result = simulate(build("fedavg", gamma=1.0, p=0.2), problem, 15, evaluate_every=15)
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]
    with pytest.raises(SympruneError, match="no sequences"):
        network("character-lstm")((1, 8, 8), 4)
