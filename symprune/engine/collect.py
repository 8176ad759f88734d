"""Measuring a block while it is dense: what goes into its matrices, and what comes out of them.

Products are recognised by the weight's address and shape, so plain layers, `Conv1D`, experts'
slices and weights that stand first are one case. A matrix that no product was seen of, or whose
output picks experts, is known by that afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from symprune.engine.forward import Activations, Tick
from symprune.engine.trace import Trace
from symprune.machine import distributed
from symprune.models.matrices import ROUTER_NAMES, Matrix
from symprune.stats import DRIFT, SQUARE, ChannelStats, Needs, limit_tokens, token_scales

# function -> where its two factors stand among its arguments
_PRODUCTS: dict[Any, tuple[int, int]] = {
    F.linear: (0, 1),
    torch.addmm: (1, 2),
    torch.baddbmm: (1, 2),
    **dict.fromkeys((torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm), (0, 1)),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), (0, 1)),
}


Take = Callable[[range, Tensor], None]
"""take(samples, output): called with what a block makes of consecutive samples."""
Beside = Callable[[range], Mapping[str, Tensor]]
"""beside(samples): what the dense model gives to matrices, by name, for consecutive samples."""


class Enough(Exception):
    """Raised out of a block's forward once all that is asked for was met."""


class Collector(TorchFunctionMode):
    """Measures the inputs (and outputs) of a block's matrices as its forward multiplies with them.

    Matrices that are given the same tensor (q/k/v, gate/up) share one object. `choosing` are the
    matrices whose output decided what is computed next, `unknown` the parameters that stood in a
    product and are none of the matrices, `repeated` the matrices met twice in a pass. `gradients`
    are measured elsewhere, in a pass of their own. only: the names of those to measure, if not all;
    then a pass that is told to stop ends when it has met each of them.
    """

    def __init__(
        self,
        matrices: Iterable[Matrix] = (),
        needs: Needs | None = None,
        gram_device: str = "auto",
        block: nn.Module | None = None,
        only: frozenset[str] | None = None,
        gram_scales: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.only = only
        self.stopping = False
        self.beside: Mapping[str, Tensor] = {}  # the dense model's inputs, by matrix
        self._met: Counter[str] = Counter()
        self.needs = needs or Needs()
        self.gram_device = gram_device
        matrices = list(matrices)
        self.matrices = {matrix.weight.data_ptr(): matrix for matrix in matrices}
        self.device = next((m.parameter.device for m in matrices), torch.device("cpu"))
        self.inputs: dict[str, ChannelStats] = {}
        self.outputs: dict[str, ChannelStats] = {}
        self.gradients: dict[str, ChannelStats] = {}
        self.choosing: set[str] = set()
        self.unknown: set[str] = set()
        self.repeated: set[str] = set()
        self.separable = True  # whether samples that pass together can be told apart everywhere
        self._others = _other_factors(block, matrices) if block is not None else {}
        self._gram_scales: Mapping[str, Tensor | None] | None = gram_scales
        self._fed: list[tuple[Tensor, ChannelStats]] = []
        self._trace = Trace()

    def next_sample(self) -> None:
        self._fed.clear()
        self._met.clear()

    def may_stop(self) -> bool:
        """Whether a pass that has met everything once has met it for the last time; asked after a
        whole one."""
        return bool(self.only) and bool(self._met) and not self.repeated

    def agree_on_scales(self) -> None:
        """What Gram matrices are rounded by is the very first sample's, in every process; where
        that one did not come by, they are not rounded."""
        mine = {name: stats.gram_scale for name, stats in self.inputs.items()}
        found = {name: None if scale is None else scale.cpu() for name, scale in mine.items()}
        self._gram_scales = distributed.agree(found)

    def stop_tracing(self) -> None:
        """What picks experts is known after one sample."""
        choosing = self._trace.choosing
        matrices = self.matrices.values()
        self.choosing |= {matrix.name for matrix in matrices if id(matrix.parameter) in choosing}
        self.unknown -= {self._others.get(parameter, "") for parameter in choosing}
        self._trace.stop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        place = _PRODUCTS.get(func)
        factors: tuple[Tensor, ...] = ()
        if place is not None and len(args) > place[1]:
            factors = args[place[0]], args[place[1]]
            self._product(*factors, result, func is F.linear)
        if self._trace.going:
            weights = self._trace.follow(func, factors, (args, kwargs), result)
            self.unknown |= {self._others[w] for w in weights if w in self._others}
        return result

    def _product(self, left: Tensor, right: Tensor, result: Tensor, linear: bool) -> None:
        """Record a product with a matrix on either side."""
        weight = right.mT if linear else right
        found = list(self._parts(left, weight, result))
        if not found and left.dim() > 1 and right.dim() > 1:
            found = list(self._parts(right.mT, left.mT, result.mT))
        with torch._C.DisableTorchFunction():
            for matrix, x, y in found:
                self._record(matrix, x, y)
        if found and self.stopping and self.only is not None and self._met.keys() >= self.only:
            raise Enough

    def _parts(
        self, x: Tensor, weight: Tensor, y: Tensor
    ) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """The matrices in x @ weight with their inputs and outputs: one, or one of each piece."""
        if weight.dim() == 2:
            matrix = self._find_matrix(weight)
            if matrix is not None:
                yield matrix, x, y
        elif weight.dim() == 3 and x.dim() == 3 and weight.data_ptr() in self.matrices:
            for number, piece in enumerate(weight):
                matrix = self._find_matrix(piece)
                if matrix is not None:
                    # A token that is not for this expert stands as zeros in its place.
                    there = x[number].any(1)
                    yield matrix, x[number][there], y[number][there]

    def _find_matrix(self, weight: Tensor) -> Matrix | None:
        """The matrix this factor, `[in, out]`, is, if it is one as a whole."""
        matrix = self.matrices.get(weight.data_ptr())
        if matrix is not None:
            mine = matrix.weight.mT
            if mine.shape == weight.shape and _strides(mine) == _strides(weight):
                return matrix
        return None

    def _record(self, matrix: Matrix, x: Tensor, y: Tensor) -> None:
        if x.numel() == 0:
            return
        self.separable = self.separable and x.dim() > 2
        if self.only is not None and matrix.name not in self.only:
            return
        self._met[matrix.name] += 1
        if self._met[matrix.name] > 1:
            self.repeated.add(matrix.name)
        if self.needs.inputs:
            stats = self.inputs.get(matrix.name)
            if stats is None:
                stats = next((s for tensor, s in self._fed if tensor is x), None)
                if stats is None:
                    stats = self._new_inputs(matrix.name, x)
                self.inputs[matrix.name] = stats
            if all(s is not stats or tensor is not x for tensor, s in self._fed):
                stats.add(*self._limit(x, self.beside.get(matrix.name)))
                self._fed.append((x, stats))
        if self.needs.outputs:
            if matrix.name not in self.outputs:
                out = ChannelStats(y.shape[-1], self.needs.outputs, device=y.device)
                self.outputs[matrix.name] = out
            self.outputs[matrix.name].add(*self._limit(y))

    def _new_inputs(self, name: str, x: Tensor) -> ChannelStats:
        channels, scale = x.shape[-1], None
        if self.needs.gram and self._gram_scales is not None:
            scale = self._gram_scales.get(name, torch.zeros(channels, dtype=torch.float64))
        drift = frozenset() if name in self.beside else frozenset({DRIFT})
        return ChannelStats(
            channels,
            self.needs.inputs - drift,
            device=x.device,
            gram_device=self.gram_device,
            gram_scale=scale,
        )

    def _limit(self, x: Tensor, dense: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`[samples, tokens, channels]`, with no token longer than it may be, and what the dense
        model has there, scaled alike."""
        if x.dim() > 3:
            x = x.reshape(x.shape[0], -1, x.shape[-1])
        limit = self.needs.token_limit
        if limit is None:
            return x, dense
        if dense is not None and dense.numel() == x.numel():
            scales = token_scales(torch.atleast_2d(x).float(), limit)
            dense = dense.float().reshape(x.shape) * scales
        return limit_tokens(x, limit), dense


def _other_factors(block: nn.Module, matrices: list[Matrix]) -> dict[int, str]:
    """The parameters, by identity, that may stand in a product and are neither a matrix nor part of
    a layer that is left dense on purpose."""
    known = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.modules.conv._ConvNd)
    found = {id(matrix.parameter) for matrix in matrices}
    return {
        id(parameter): f"{path}.{leaf}"
        for path, module in block.named_modules()
        if not isinstance(module, known) and not set(path.split(".")) & set(ROUTER_NAMES)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and id(parameter) not in found
    }


def _strides(matrix: Tensor) -> list[int]:
    """How far apart neighbours lie, where there are any."""
    return [s for s, size in zip(matrix.stride(), matrix.shape, strict=True) if size > 1]


def collect(
    activations: Activations,
    index: int,
    block: nn.Module,
    matrices: list[Matrix],
    needs: Needs,
    tick: Tick = lambda _: None,
    samples: range | None = None,
    gram_device: str = "auto",
    take: Take | None = None,
    only: frozenset[str] | None = None,
    beside: Beside | None = None,
    gram_scales: Mapping[str, Tensor] | None = None,
) -> Collector:
    """Run a block over the samples, measuring what goes into and out of its matrices.

    take is given its outputs. The first sample passes alone and shows whether samples that pass
    together could be told apart; where Gram matrices are summed, the other processes wait for the
    first one's, unless gram_scales says what all have agreed on. only: the matrices to measure; if
    nobody takes the outputs, the other samples pass no further than to the last of these. beside
    gives what drift is measured against.
    """
    collector = Collector(matrices, needs, gram_device, block, only, gram_scales)

    def pass_through(some: range) -> None:
        collector.next_sample()
        collector.beside = {} if beside is None else beside(some)
        output = None
        with suppress(Enough), collector:
            output = activations.run(index, block, some)
        if take is not None and output is not None:
            take(some, output)
        tick(some[-1])

    samples = range(len(activations)) if samples is None else samples
    agreeing = needs.gram and gram_scales is None
    leads = distributed.rank() == 0 or not agreeing
    if samples and leads:
        pass_through(samples[:1])
    if agreeing:
        collector.agree_on_scales()
    if samples and not leads:
        pass_through(samples[:1])
    collector.stop_tracing()
    collector.stopping = take is None and collector.may_stop()
    others = samples[1:]
    for some in activations.batches(others) if collector.separable else _one_by_one(others):
        pass_through(some)
    collector.next_sample()  # lets go of the last one's tensors
    collector.beside = {}
    return collector


def _one_by_one(samples: range) -> Iterator[range]:
    return (range(sample, sample + 1) for sample in samples)


def look(
    activations: Activations, index: int, block: nn.Module, matrices: list[Matrix]
) -> Collector:
    """What one sample shows of a block: the inputs its matrices are given are in the order they
    are, the same object for matrices that share one."""
    inputs = Needs(frozenset({SQUARE}))
    return collect(activations, index, block, matrices, inputs, samples=range(1))
