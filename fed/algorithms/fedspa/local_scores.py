"""What a client's own data says about its weights: which to keep and which to grow.

FedSpa, Algorithm 2, with any criterion of the pruning engine in place of the magnitude: every score
of `symprune.scores` rates the weights of a client's model from the activations of its local rows.
All is measured on one batch of them, the same for both questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from symprune import criteria
from symprune.errors import SympruneError
from symprune.fed.algorithms.shared.layer_masks import maskable
from symprune.fed.problems.losses import Module, Softmax
from symprune.fed.problems.problem import Problem, Rows
from symprune.fed.protocol import Turn
from symprune.fed.randomness import Stream
from symprune.stats import ChannelStats

Norms = Mapping[str, tuple[Tensor, Tensor]]
GROWTHS = ("gradient", "random")


def rates_locally(name: str) -> criteria.Criterion:
    """The criterion `name`, if rows and activations are all that it needs."""
    criterion = criteria.get(name)
    if "regional_gradient" in criterion.needs:
        raise SympruneError(
            f"Score {name} needs the gradients of a language model's blocks, which this model does "
            "not have."
        )
    return criterion


def weight_scores(
    name: str, problem: Problem, w: Tensor, rows: Rows | None, stream: Stream
) -> Tensor:
    """The criterion's score of every weight of every client, `[C, d]`; zero for the tensors that
    stay dense. `rows` are the clients' calibration rows; criteria that look at the weights alone
    do not need them, and `stream` feeds those that sample."""
    criterion = rates_locally(name)
    activations = {"input_norm", "output_norm"} & set(criterion.needs)
    if not activations:
        rows = None
    layout, whole = problem.layout, problem.unmasked()
    sparse = maskable(layout)
    out = []
    for i, flat in enumerate(layout.scatter(w)):
        norms = {} if rows is None else activation_norms(whole, flat, _own_rows(rows, i))
        generator = Stream(stream.key[i : i + 1]).generator()
        parts = []
        for (layer, weight), masked in zip(layout.split(flat).items(), sparse, strict=True):
            if not masked:
                parts.append(torch.zeros_like(weight).flatten())
                continue
            statistics: dict[str, object] = {"generator": generator}
            if activations:
                statistics["input_norm"], statistics["output_norm"] = _of(norms, layer, name)
            matrix = weight.view(1, -1) if weight.dim() == 1 else weight.flatten(1)
            parts.append(criterion(matrix, statistics).flatten().to(w.dtype))
        out.append(torch.cat(parts))
    return layout.gather(torch.stack(out))


def calibration_rows(problem: Problem, stream: Stream, size: int) -> Rows:
    """`size` different local rows of each client, or all it has."""
    rows, _ = next(problem.epoch(stream, size))
    return rows


@torch.no_grad()
def activation_norms(problem: Problem, w: Tensor, x: Tensor) -> Norms:
    """Input and output norms of every layer of one client's model `w [d]` on its rows `x`. A
    convolution is a matrix on patches, so its input channels are the patch's entries."""
    loss = problem.loss
    if isinstance(loss, Module):
        return _module_norms(loss, w, x)
    classes = loss.classes if isinstance(loss, Softmax) else 1
    output = x @ w.view(classes, -1).T
    return {problem.layout.names[0]: (_norm(x.unsqueeze(1)), _norm(output.unsqueeze(1)))}


def _module_norms(loss: Module, w: Tensor, x: Tensor) -> Norms:
    norms: dict[str, tuple[Tensor, Tensor]] = {}

    def collect(name: str, layer: nn.Module):  # type: ignore[no-untyped-def]
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            norms[f"{name}.weight"] = (_norm(_tokens(layer, inputs[0])), _norm(_places(output)))

        return hook

    hooks = [
        layer.register_forward_hook(collect(name, layer))
        for name, layer in loss.module.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    try:
        loss.outputs({**loss.fixed, **loss.layout.split(w)}, x)
    finally:
        for hook in hooks:
            hook.remove()
    return norms


def _tokens(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer's input as `[rows, tokens, channels of the matrix]`."""
    if isinstance(layer, nn.Conv2d):
        if isinstance(layer.padding, str) or layer.groups != 1:
            raise SympruneError("Activation scores know plain convolutions with numeric padding.")
        patches = nn.functional.unfold(
            x, layer.kernel_size, layer.dilation, layer.padding, layer.stride
        )
        return patches.transpose(1, 2)
    return x if x.dim() > 2 else x.unsqueeze(1)


def _places(output: Tensor) -> Tensor:
    """A layer's output as `[rows, tokens, channels]`."""
    if output.dim() == 4:
        return output.flatten(2).transpose(1, 2)
    return output if output.dim() > 2 else output.unsqueeze(1)


def _norm(batch: Tensor) -> Tensor:
    stats = ChannelStats(batch.shape[-1])
    stats.add(batch)
    return stats.norm


def _own_rows(rows: Rows, client: int) -> Tensor:
    return rows.x[client][rows.weights[client] != 0]


def _of(norms: Norms, layer: str, criterion: str) -> tuple[Tensor, Tensor]:
    if layer not in norms:
        raise SympruneError(
            f"Score {criterion} needs the activations of {layer}, "
            "which is not the weight of a linear layer or a convolution."
        )
    return norms[layer]


@dataclass(frozen=True)
class Calibration:
    """The criterion and the number of rows it sees."""

    score: str
    batch: int


def local_scores(w: Tensor, problem: Problem, turn: Turn, how: Calibration) -> Tensor:
    """Each client's score of every weight of its `w`, `[C, d]`."""
    rows = calibration_rows(problem, turn.stream("search"), how.batch)
    return weight_scores(how.score, problem, w, rows, turn.stream("score"))


def search_scores(
    w: Tensor, problem: Problem, turn: Turn, how: Calibration, grow: str
) -> tuple[Tensor, Tensor]:
    """The lowest of the first go, the highest of the second come: the criterion, and the size of
    the dense gradient (or chance)."""
    keep = local_scores(w, problem, turn, how)
    if grow == "random":
        return keep, turn.stream("grow").uniform(w.shape[1])
    plain = replace(problem, l2=0.0, nonconvex=0.0)  # the penalty must not choose weights
    rows = calibration_rows(problem, turn.stream("search"), how.batch)
    return keep, plain.gradient(w, rows).abs()
