"""Running a model block by block: embed the tokens, measure a block while dense, move on once
pruned.

One copy of the hidden states exists, `[samples, tokens, width]`, overwritten in place as the walk
goes on. Samples pass one at a time, so a result never depends on how they were batched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from symprune.errors import SympruneError
from symprune.models import Layout, Matrix, device_of, is_experts
from symprune.stats import SQUARE, ChannelStats, Needs, limited

Tick = Callable[[int], None]
BlockInputs = tuple[tuple[Any, ...], dict[str, Any]]
Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


class _Captured(Exception):
    """Raised out of the model's forward once the blocks' inputs are known."""


class Activations:
    """The hidden states in front of the next block, and what else each block's forward takes."""

    def __init__(
        self, hidden: Tensor, inputs: list[BlockInputs], blocks_return_tuples: bool = False
    ) -> None:
        self.hidden = hidden
        self.inputs = inputs
        self.blocks_return_tuples = blocks_return_tuples

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def run(self, index: int, block: nn.Module, sample: int) -> Tensor:
        """The output of block `index` for one sample."""
        device = device_of(block)
        args, kwargs = _to(self.inputs[index], device)
        out = block(self.hidden[sample : sample + 1].to(device), *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def advance(self, index: int, block: nn.Module, tick: Tick = lambda _: None) -> None:
        """Replace the hidden states by what the block makes of them."""
        for sample in range(len(self)):
            self.replace(sample, self.run(index, block, sample))
            tick(sample)

    def replace(self, sample: int, output: Tensor) -> None:
        """What a block made of a sample becomes its hidden state."""
        self.hidden[sample : sample + 1] = output.to(self.hidden.device)


@contextmanager
def ready(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, experts computed one by one; all put back afterwards."""
    training = model.training
    config = getattr(model, "config", None)
    experts = getattr(config, "_experts_implementation", None)
    fused = any(is_experts(module) for module in model.modules())
    model.eval()
    try:
        if fused and config is not None:
            config._experts_implementation = "eager"
        with torch.no_grad():
            yield
    finally:
        if fused and config is not None:
            config._experts_implementation = experts
        model.train(training)


def embed(
    layout: Layout, tokens: Tensor, tick: Tick = lambda _: None, allocate: Allocate | None = None
) -> Activations:
    """Run everything in front of the first block on `tokens` (`[samples, length]`).

    allocate(shape, dtype, device) makes the room for the hidden states, if not in memory.
    """
    activations, first = frame(layout, tokens, allocate)
    activations.hidden[:1] = first
    tick(0)
    for sample in range(1, len(tokens)):
        found = _capture_first(layout, tokens[sample : sample + 1])
        activations.hidden[sample : sample + 1] = found
        tick(sample)
    return activations


def frame(
    layout: Layout, tokens: Tensor, allocate: Allocate | None = None
) -> tuple[Activations, Tensor]:
    """Room for the hidden states of `tokens`, not yet filled, and those of the first sample."""
    first, inputs, as_tuples = _capture_all(layout, tokens[:1])
    shape = (len(tokens), *first.shape[1:])
    if allocate is None:
        hidden = torch.empty(shape, dtype=first.dtype, device=first.device)
    else:
        hidden = allocate(shape, first.dtype, first.device)
    return Activations(hidden, inputs, as_tuples), first


def logits(layout: Layout, tokens: Tensor, activations: Activations, sample: int) -> Tensor:
    """What the model makes of one sample's hidden states behind the last block.

    The model's own forward runs, with every block passed over and the last giving those states.
    """
    last, passed = activations.hidden[sample : sample + 1], 0

    def passed_over(*args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        passed += 1
        given = _split(args, kwargs)[0]
        out = last.to(given.device) if passed == len(layout.blocks) else given
        return (out, None) if activations.blocks_return_tuples else out

    return _forward(layout, tokens, passed_over, list(layout.blocks)).logits


def _capture_all(layout: Layout, tokens: Tensor) -> tuple[Tensor, list[BlockInputs], bool]:
    """The hidden state in front of the first block, every block's other arguments, and whether
    the model takes tuples from its blocks.

    The blocks are passed over, not run. Most models take a block's output as it is, some index the
    tuple it returns or unpack it: where indexing a tensor has eaten a dimension, or unpacking it
    has failed, the pass is repeated with tuples.
    """
    failed: ValueError | None = None
    for as_tuple in (False, True):
        seen: list[Tensor] = []
        inputs: list[BlockInputs] = []

        def passed_over(
            *args: Any,
            seen: list[Tensor] = seen,
            inputs: list[BlockInputs] = inputs,
            as_tuple: bool = as_tuple,
            **kwargs: Any,
        ) -> Any:
            hidden, rest, kwargs = _split(args, kwargs)
            seen.append(hidden)
            inputs.append((rest, kwargs))
            if len(seen) == len(layout.blocks) or hidden.shape != seen[0].shape:
                raise _Captured
            return (hidden, None) if as_tuple else hidden

        try:
            _forward(layout, tokens, passed_over, list(layout.blocks))
        except ValueError as error:
            failed = error
            continue
        if len(seen) == len(layout.blocks) and seen[-1].shape == seen[0].shape:
            return seen[0], inputs, as_tuple
    raise SympruneError(
        f"{type(layout.model).__name__} does not pass its hidden states through {layout.prefix} "
        "one block after the other, so it cannot be walked."
    ) from failed


def _capture_first(layout: Layout, tokens: Tensor) -> Tensor:
    caught: list[Tensor] = []

    def stop(*args: Any, **kwargs: Any) -> Any:
        caught.append(_split(args, kwargs)[0])
        raise _Captured

    _forward(layout, tokens, stop, [layout.blocks[0]])
    return caught[0]


def _forward(
    layout: Layout, tokens: Tensor, stand_in: Callable[..., Any], blocks: list[nn.Module]
) -> Any:
    """Run the model with the forward of `blocks` replaced, until it has captured what it wanted."""
    for block in blocks:
        block.forward = stand_in  # type: ignore[method-assign]
    try:
        device = layout.model.get_input_embeddings().weight.device  # type: ignore[operator,union-attr]
        return layout.model(input_ids=tokens.to(device), use_cache=False)
    except _Captured:
        return None
    finally:
        for block in blocks:
            del block.forward


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_to(item, device) for item in value)
    if type(value) is dict:
        return {key: _to(item, device) for key, item in value.items()}
    return value


class Collector(TorchFunctionMode):
    """Measures the inputs (and outputs) of a block's matrices as its forward multiplies with them.

    Products are recognised by the weight's address, so plain layers, `Conv1D` and experts' slices
    are one case. Matrices that are given the same tensor (q/k/v, gate/up) share one object.
    """

    def __init__(
        self,
        matrices: Iterable[Matrix] = (),
        needs: Needs | None = None,
        gram_device: str = "auto",
    ) -> None:
        super().__init__()
        self.needs = needs or Needs()
        self.gram_device = gram_device
        matrices = list(matrices)
        self.matrices = {matrix.weight.data_ptr(): matrix for matrix in matrices}
        self.device = next((m.parameter.device for m in matrices), torch.device("cpu"))
        self.inputs: dict[str, ChannelStats] = {}
        self.outputs: dict[str, ChannelStats] = {}
        self._fed: list[tuple[Tensor, ChannelStats]] = []

    def next_sample(self) -> None:
        self._fed.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        place = _OPERANDS.get(func)
        if place is not None and len(args) > place[1]:
            x, weight = args[place[0]], args[place[1]]
            matrix = self.matrices.get(weight.data_ptr())
            if matrix is not None:
                with torch._C.DisableTorchFunction():
                    self._record(matrix, x, result)
        return result

    def _record(self, matrix: Matrix, x: Tensor, y: Tensor) -> None:
        collect_in, collect_out = self.needs.inputs, self.needs.outputs
        if collect_in:
            stats = self.inputs.get(matrix.name)
            if stats is None:
                stats = next((s for tensor, s in self._fed if tensor is x), None)
                if stats is None:
                    stats = ChannelStats(x.shape[-1], collect_in, x.device, self.gram_device)
                self.inputs[matrix.name] = stats
            if all(s is not stats for _, s in self._fed):
                stats.add(self._measured(x))
                self._fed.append((x, stats))
        if collect_out:
            if matrix.name not in self.outputs:
                self.outputs[matrix.name] = ChannelStats(y.shape[-1], collect_out, y.device)
            self.outputs[matrix.name].add(self._measured(y))

    def _measured(self, x: Tensor) -> Tensor:
        limit = self.needs.token_limit
        return x if limit is None else limited(x, limit)


# function -> positions of (input, weight) among its arguments
_OPERANDS: dict[Any, tuple[int, int]] = {
    F.linear: (0, 1),
    torch.addmm: (1, 2),
    torch.matmul: (0, 1),
    torch.Tensor.matmul: (0, 1),
    torch.Tensor.__matmul__: (0, 1),
}


def collect(
    activations: Activations,
    index: int,
    block: nn.Module,
    matrices: list[Matrix],
    needs: Needs,
    tick: Tick = lambda _: None,
    samples: range | None = None,
    gram_device: str = "auto",
    advance: bool = False,
) -> Collector:
    """Run a block over the samples, measuring what goes into and out of its matrices.

    With advance, its outputs become the hidden states: for a block that will stay as it is.
    """
    collector = Collector(matrices, needs, gram_device)
    for sample in range(len(activations)) if samples is None else samples:
        collector.next_sample()
        with collector:
            output = activations.run(index, block, sample)
        if advance:
            activations.replace(sample, output)
        tick(sample)
    collector.next_sample()  # lets go of the last one's tensors
    return collector


def distinct_inputs(
    activations: Activations, index: int, block: nn.Module, matrices: list[Matrix]
) -> list[int]:
    """The widths of the inputs a block's matrices are given; a shared input counts once."""
    inputs = Needs(frozenset({SQUARE}))
    found = collect(activations, index, block, matrices, inputs, samples=range(1))
    return [stats.channels for stats in {id(s): s for s in found.inputs.values()}.values()]
