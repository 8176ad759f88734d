"""Modules of users' own as problems: what is trained, what is drawn, and the same bits however
clients are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.problems.losses import Module
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.protocol import Turn
from symprune.fed.simulate import Result, simulate

SIZES, LENGTH, VOCABULARY = (5, 9, 7), 6, 11
FEDAVG = {"gamma": 0.1, "p": 0.5, "random_steps": False}


class LastState(nn.Module):
    """An LSTM that says from a word's letters what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(VOCABULARY, 4)
        self.memory = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(self.letters(x))[0][:, -1])


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(LENGTH, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def rows(tokens: bool) -> list[tuple[Tensor, Tensor]]:
    generator, parts = torch.Generator().manual_seed(0), []
    for size in SIZES:
        x = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
        y = torch.randint(3, (size,), generator=generator)
        parts.append((x if tokens else x / VOCABULARY, y.float()))
    return parts


def problem(kind: str) -> Problem:
    parts = rows(tokens=kind == "lstm")
    loss = Module(LastState if kind == "lstm" else dropping)
    return Problem(loss, stack_rows(parts), l2=0.01, test=stack_rows(parts[:1]), name=kind)


def same(a: Result, b: Result) -> bool:
    return a.history == b.history and torch.equal(a.model, b.model)


@pytest.mark.parametrize("kind", ["lstm", "dropout"])
@pytest.mark.parametrize("batch", [None, 4])
def test_together_alone_over_the_wire_and_resumed_are_the_same_bits(
    kind: str, batch: int | None, tmp_path: Path
) -> None:
    algorithm, file = build("fedavg", batch=batch, **FEDAVG), tmp_path / "run.safetensors"
    together = simulate(algorithm, problem(kind), 3, seed=1)
    assert together.history[-1]["loss"] < together.history[0]["loss"]
    simulate(algorithm, problem(kind), 1, seed=1, clients_at_once=1, wire=True, checkpoint=file)
    torch.rand(7)  # what else the process draws is no matter
    again = simulate(
        algorithm, problem(kind), 3, seed=1, clients_at_once=1, wire=True, checkpoint=file
    )
    assert same(again, together)


@pytest.mark.parametrize("kind", ["lstm", "dropout"])
def test_masks_keep_zeros_in_modules_without_vmap(kind: str) -> None:
    whole = problem(kind)
    name = "head.weight" if kind == "lstm" else "3.weight"
    keep = torch.rand(whole.layout.split(whole.initial())[name].shape) < 0.5
    runs = [
        simulate(build("fedavg", **FEDAVG), whole, 2, masks={name: keep}, clients_at_once=size)
        for size in (None, 1)
    ]
    assert same(*runs)
    assert not runs[0].parameters[name][~keep].any() and runs[0].parameters[name][keep].all()


def test_dropout_is_drawn_from_the_turn_and_is_off_in_evaluation() -> None:
    dropped = problem("dropout")
    w = dropped.initial().expand(len(SIZES), -1)
    streams = [Turn(number, 0, 3, torch.arange(3)).stream("batch") for number in (0, 0, 1)]
    first, again, later = (dropped.gradient(w, dropped.step_rows(s, None)) for s in streams)
    assert torch.equal(first, again) and not torch.equal(first, later)
    assert torch.equal(dropped.gradient(w), dropped.gradient(w))
    assert not torch.equal(first, dropped.gradient(w))
    assert not bool(first.eq(0).all(1).any())
    plain = problem("lstm")
    assert plain.batch(streams[0], 2).seeds is None


def test_the_mean_of_gradients_with_dropout_is_that_of_the_layers_it_averages() -> None:
    """A linear module: dropout at the input, so the expected output is the output without it."""
    x, y = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(1)
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1, bias=False))
    loss = Module(net, lambda output, target: output.squeeze(-1), "regression")
    alone = Problem(loss, stack_rows([(x, y)]))
    draws = 200
    stream = Turn(0, 0, 1, torch.arange(1)).stream("batch")
    w = alone.initial().unsqueeze(0)
    mean = sum(alone.gradient(w, alone.step_rows(stream, None)) for _ in range(draws)) / draws
    assert torch.allclose(mean, x, atol=4 * float(x.abs().max()) / draws**0.5)


def test_what_wants_no_gradient_is_not_in_the_vector_and_stays() -> None:
    def frozen() -> nn.Module:
        net = nn.Sequential(nn.Linear(LENGTH, 4), nn.Tanh(), nn.Linear(4, 3))
        net[0].requires_grad_(False)
        return net

    loss = Module(frozen)
    assert loss.layout.names == ("2.weight", "2.bias")
    part = Problem(loss, stack_rows(rows(False)))
    result = simulate(build("fedavg", **FEDAVG), part, 2)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    sent = 2 * len(SIZES) * 4 * loss.layout.dimension
    assert sent < result.history[-1]["bytes_up"] < sent + 20 * 2 * len(SIZES)
    assert torch.equal(Module(frozen).fixed["0.weight"], loss.fixed["0.weight"])  # seeded
    assert repr(loss) == repr(Module(frozen))


def test_exempt_names_are_patterns_and_a_pattern_for_nothing_is_refused() -> None:
    assert Module(LastState, exempt=("letters.*", "memory.*")).layout.names == (
        "head.weight",
        "head.bias",
    )
    with pytest.raises(SympruneError, match=r"No parameter of LastState is called '\*norm\*'"):
        Module(LastState, exempt=("*norm*",))
    with pytest.raises(SympruneError, match="no parameter left to train"):
        Module(LastState, exempt=("*",))
    with pytest.raises(SympruneError, match=r"are bfloat16; they must all be float32"):
        Module(lambda: nn.Linear(2, 2).bfloat16())


def test_tied_weights_are_one_part_of_the_vector_and_get_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, LENGTH)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    tied = Problem(Module(Tied), stack_rows(rows(False)))
    assert tied.layout.names == ("first.weight", "first.bias", "second.bias")
    net = Tied()
    flat = tied.layout.join(dict(net.named_parameters())).detach()
    x, y = rows(False)[0]
    nn.functional.cross_entropy(net(x), y.long()).backward()
    assert torch.allclose(
        tied.layout.split(tied.gradient(flat)[0])["first.weight"], net.first.weight.grad, atol=1e-6
    )


def test_buffers_are_constants_and_tell_models_apart() -> None:
    def scaled(by: float) -> nn.Module:
        net = nn.Linear(LENGTH, 3)
        net.register_buffer("scale", torch.tensor(by))
        return net

    assert repr(Module(lambda: scaled(1.0))) != repr(Module(lambda: scaled(2.0)))
    with pytest.raises(SympruneError, match=r"1.running_mean of a BatchNorm1d.*use GroupNorm"):
        Module(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    Module(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)))


def test_a_module_itself_starts_from_its_own_weights() -> None:
    net = nn.Linear(LENGTH, 3)
    start = Problem(Module(net), stack_rows(rows(False))).initial(5)
    assert torch.equal(start, torch.cat([net.weight.detach().flatten(), net.bias.detach()]))


def test_a_frozen_parameter_must_be_pruned_before_its_mask_is_given() -> None:
    net = nn.Sequential(nn.Linear(LENGTH, 4), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    part = Problem(Module(net), stack_rows(rows(False)))
    keep = torch.rand(4, LENGTH) < 0.5
    with pytest.raises(SympruneError, match=r"0.weight is not trained.*prune it first"):
        part.masked({"0.weight": keep})
    net[0].weight.mul_(keep)
    assert part.masked({"0.weight": keep, "1.weight": torch.ones(3, 4) > 0}).dimension == 15
