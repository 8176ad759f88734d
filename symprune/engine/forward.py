"""Running a model block by block: embed the tokens, then pass them through one block at a time.

One copy of the hidden states exists, `[samples, tokens, width]`, overwritten in place as the walk
goes on. Unless told otherwise samples pass one at a time, so a result never depends on how they
were batched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from symprune.engine.arguments import Allocate, Arguments, BlockInputs
from symprune.errors import SympruneError
from symprune.models.layout import Layout, device_of
from symprune.models.matrices import is_experts

KEEP = "logits_to_keep"  # what transformers calls the positions of a window that are predicted from

Tick = Callable[[int], None]
Watch = Callable[[str, int, int, int, int, str], None]
"""watch(stage, block, blocks, done, total, layer): called as the work goes on. What is done are
samples, or, in the stage `mask`, matrices: then `layer` is the name of the next."""


class _Captured(Exception):
    """Raised out of the model's forward once the blocks' inputs are known."""


class Activations:
    """The hidden states in front of the next block, and what else each block's forward takes.

    apart: a sample's hidden states have no leading dimension for samples (models with several
    streams of them lead with those), so each is an entry of its own. at_once is how many samples
    pass a block together.
    """

    def __init__(
        self,
        hidden: Tensor,
        arguments: Arguments,
        blocks_return_tuples: bool = False,
        at_once: int = 1,
        apart: bool = False,
    ) -> None:
        self.hidden = hidden
        self.arguments = arguments
        self.blocks_return_tuples = blocks_return_tuples
        self.apart = apart
        self.at_once = at_once if arguments.stack and not apart else 1

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def run(
        self,
        index: int,
        block: nn.Module,
        samples: range,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The output of block `index` for consecutive samples; weights, by their names in the
        block, stand in the place of its own."""
        device = device_of(block)
        args, kwargs = self.arguments.of(index, samples, device)
        given = (self.of(samples).to(device), *args)
        if weights is None:
            out = block(*given, **kwargs)
        else:
            out = torch.func.functional_call(block, dict(weights), given, kwargs)
        return out[0] if isinstance(out, tuple | list) else out

    def of(self, samples: range) -> Tensor:
        """The hidden states of consecutive samples, as a block takes them."""
        return self.hidden[samples.start] if self.apart else self.hidden[_slice(samples)]

    def batches(self, samples: range | None = None) -> Iterator[range]:
        """The samples, as many together as pass a block at once."""
        samples = range(len(self)) if samples is None else samples
        for start in range(samples.start, samples.stop, self.at_once):
            yield range(start, min(start + self.at_once, samples.stop))

    def advance(
        self,
        index: int,
        block: nn.Module,
        tick: Tick = lambda _: None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Replace the hidden states by what the block makes of them, with its weights or others."""
        for samples in self.batches():
            self.replace(samples, self.run(index, block, samples, weights))
            tick(samples[-1])

    def replace(self, samples: range, output: Tensor) -> None:
        """What a block made of samples becomes their hidden states."""
        self.of(samples).copy_(output)

    def only(self, samples: range) -> Activations:
        """Some of the samples, on the same memory; what blocks leave for later ones is its own."""
        hidden, arguments = self.hidden[_slice(samples)], self.arguments.only(samples)
        settings = (self.blocks_return_tuples, self.at_once, self.apart)
        return Activations(hidden, arguments, *settings)

    def copy(self) -> Activations:
        """The same on memory of its own."""
        made, hidden = self.only(range(len(self))), self.hidden
        made.hidden = self.arguments.allocate(tuple(hidden.shape), hidden.dtype, hidden.device)
        made.hidden.copy_(hidden)
        return made


def _slice(samples: range) -> slice:
    return slice(samples.start, samples.stop)


@contextmanager
def ready(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, experts computed one by one; all put back afterwards."""
    training = model.training
    found: list[Any] = [m.config for m in model.modules() if is_experts(m) and hasattr(m, "config")]
    if found and hasattr(model, "config"):
        found.append(model.config)
    configs = list({id(config): config for config in found}.values())
    before = [getattr(config, "_experts_implementation", None) for config in configs]
    model.eval()
    try:
        for config in configs:
            config._experts_implementation = "eager"
        with torch.no_grad():
            yield
    finally:
        for config, experts in zip(configs, before, strict=True):
            config._experts_implementation = experts
        model.train(training)


def embed(
    layout: Layout,
    tokens: Tensor,
    tick: Tick = lambda _: None,
    allocate: Allocate | None = None,
    at_once: int = 1,
) -> Activations:
    """Run everything in front of the first block on `tokens` (`[samples, length]`).

    allocate(shape, dtype, device) makes the room for the hidden states, if not in memory.
    """
    first, inputs, as_tuples = _capture_first(layout, tokens[:1])
    apart = first.shape[0] != 1
    shape = (len(tokens), *first.shape[0 if apart else 1 :])
    arguments = Arguments(inputs, len(tokens), allocate)
    hidden = arguments.allocate(shape, first.dtype, first.device)
    activations = Activations(hidden, arguments, as_tuples, at_once, apart)
    activations.replace(range(1), first)
    tick(0)
    for sample in range(1, len(tokens)):
        captured = _capture(layout, tokens[sample : sample + 1], as_tuples)
        activations.replace(range(sample, sample + 1), captured.hidden[0])
        arguments.compare(captured.inputs)
        tick(sample)
    if arguments.differ():
        for sample in range(len(tokens)):
            captured = _capture(layout, tokens[sample : sample + 1], as_tuples)
            arguments.keep(sample, captured.inputs)
    return Activations(hidden, arguments, as_tuples, at_once, apart)


def logits(
    layout: Layout,
    tokens: Tensor,
    activations: Activations,
    sample: int,
    positions: range | None = None,
) -> Tensor:
    """What the model makes of one sample's hidden states behind the last block, at some positions
    or all."""
    last = activations.of(range(sample, sample + 1))
    return predict(layout, tokens, last, activations.blocks_return_tuples, positions)


def predict(
    layout: Layout,
    tokens: Tensor,
    last: Tensor,
    blocks_return_tuples: bool,
    positions: range | None = None,
) -> Tensor:
    """The logits that belong to a sample's hidden states `last`; gradients pass.

    The model's own forward runs, with every block passed over and the last giving those states.
    Positions that are not asked for are not computed, if the model can leave them out.
    """
    passed = 0

    def pass_over(*args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        passed += 1
        given = _split(args, kwargs)[0]
        out = last.to(given.device) if passed == len(layout.blocks) else given
        return (out, None) if blocks_return_tuples else out

    stand_ins = dict.fromkeys(layout.blocks, pass_over)
    if positions is None:
        return _forward(layout, tokens, stand_ins).logits
    wanted = torch.arange(positions.start, positions.stop, positions.step)
    if KEEP not in inspect.signature(layout.model.forward).parameters:
        return _forward(layout, tokens, stand_ins).logits[:, wanted]
    return _forward(layout, tokens, stand_ins, **{KEEP: wanted}).logits


class _Capture:
    """What the blocks were given in a forward that passed them over, in the order they came."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.hidden: list[Tensor] = []
        self.inputs: list[BlockInputs] = []

    @property
    def shapes_agree(self) -> bool:
        return all(hidden.shape == self.hidden[0].shape for hidden in self.hidden)

    @property
    def passed_on(self) -> bool:
        """Whether every block was given what the one before it, passed over, gave back."""
        first = self.hidden[0]
        return all(hidden is first or torch.equal(hidden, first) for hidden in self.hidden)


def _capture_first(layout: Layout, tokens: Tensor) -> tuple[Tensor, list[BlockInputs], bool]:
    """The hidden state in front of the first block, every block's other arguments, and whether
    the model takes tuples from its blocks.

    Most models take a block's output as it is, some index or unpack the tuple it returns: where
    that has eaten a dimension of a tensor, or failed, the pass is repeated with tuples.
    """
    once = list(range(len(layout.blocks)))
    failed: ValueError | None = None
    for as_tuple in (False, True):
        try:
            captured = _capture(layout, tokens, as_tuple)
        except ValueError as error:
            failed = error
            continue
        if captured.order == once and captured.shapes_agree:
            if not captured.passed_on:
                raise SympruneError(
                    f"{type(layout.model).__name__} computes something between the blocks of "
                    f"{layout.prefix}, so its blocks cannot be run one by one."
                )
            return captured.hidden[0], captured.inputs, as_tuple
        if captured.shapes_agree and len(captured.order) > len(once):
            raise SympruneError(
                f"{type(layout.model).__name__} runs the blocks of {layout.prefix} more than once "
                "in a forward pass; models that loop cannot be pruned."
            )
    raise SympruneError(
        f"{type(layout.model).__name__} does not pass its hidden states through {layout.prefix} "
        "one block after the other, so it cannot be walked."
    ) from failed


def _capture(layout: Layout, tokens: Tensor, as_tuple: bool) -> _Capture:
    """Run the model with its blocks passed over, up to its head."""
    captured = _Capture()

    def stand_in(index: int) -> Callable[..., Any]:
        def pass_over(*args: Any, **kwargs: Any) -> Any:
            hidden, rest, kwargs = _split(args, kwargs)
            captured.order.append(index)
            captured.hidden.append(hidden)
            captured.inputs.append((rest, kwargs))
            if not captured.shapes_agree:
                raise _Captured
            return (hidden, None) if as_tuple else hidden

        return pass_over

    def stop(*_: Any, **__: Any) -> Any:
        raise _Captured

    stand_ins = {block: stand_in(index) for index, block in enumerate(layout.blocks)}
    head = getattr(layout.model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        stand_ins[head] = stop
    _forward(layout, tokens, stand_ins)
    return captured


def _forward(
    layout: Layout,
    tokens: Tensor,
    stand_ins: dict[nn.Module, Callable[..., Any]],
    **options: Any,
) -> Any:
    """Run the model with the forward of some modules replaced, until what was wanted is there."""
    for module, stand_in in stand_ins.items():
        module.forward = stand_in  # type: ignore[method-assign]
    try:
        device = layout.model.get_input_embeddings().weight.device  # type: ignore[operator,union-attr]
        return layout.model(input_ids=tokens.to(device), use_cache=False, **options)
    except _Captured:
        return None
    finally:
        for module in stand_ins:
            del module.forward


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest
