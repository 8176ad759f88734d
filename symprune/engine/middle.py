"""Where the hidden states stand in the middle of a block, behind its attention and before its MLP.

Found by what one sample shows, not by names: it is what goes into the last direct child of the
block that runs after the first child with matrices and before the next (the norm of the MLP, in
most models). A block whose parts stand side by side, or that has one part, has no middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from symprune.engine.forward import Activations
from symprune.models.matrices import Matrix


class _Reached(Exception):
    """Raised out of a block's forward once its middle is known."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


@dataclass(frozen=True)
class Middle:
    """A child of a block whose input are the states in the middle, and the names of the children
    with matrices that ran before it."""

    child: nn.Module
    before: frozenset[str]

    def holds(self, name: str) -> bool:
        """Whether a parameter, by its name in the block, is used before the middle."""
        return _child(name) in self.before

    def reach(self, run: Callable[[], Tensor]) -> Tensor:
        """The states in the middle of a run of the block, which ends there."""

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            raise _Reached(_first(args, kwargs))

        with _hooked({"": self.child}, lambda _: stop):
            try:
                run()
            except _Reached as reached:
                return reached.states
        raise AssertionError("the block passed over its middle")

    @contextmanager
    def watch(self, see: Callable[[Tensor], None]) -> Iterator[None]:
        """see(states) is called with the states in the middle of every run meanwhile."""

        def look(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            see(_first(args, kwargs))

        with _hooked({"": self.child}, lambda _: look):
            yield


@torch.enable_grad()
def find_middle(
    activations: Activations, index: int, block: nn.Module, found: list[Matrix], prefix: str
) -> Middle | None:
    """The middle of block `index`, or None; prefix is the beginning of its matrices' names."""
    names = {matrix.parameter_name.removeprefix(prefix) for matrix in found}
    owners = {_child(name) for name in names}
    children, ran = dict(block.named_children()), list[tuple[str, Tensor]]()

    def note(name: str) -> Callable[..., None]:
        def seen(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            ran.append((name, _first(args, kwargs)))

        return seen

    weights = {name: each.detach() for name, each in block.named_parameters()}
    weights |= {name: weights[name].requires_grad_() for name in names}
    with _hooked(children, note):
        output = activations.run(index, block, range(1), weights)
    order = dict.fromkeys(name for name, _ in ran if name in owners)
    places = [max(place for place, (own, _) in enumerate(ran) if own == name) for name in order]
    if len(places) < 2 or places[1] - places[0] < 2:
        return None
    name, states = ran[places[1] - 1]
    first = ran[places[0]][0]
    used = [weights[own] for own in names if _child(own) == first]
    if name in owners or states.shape != output.shape or not _depends(states, used):
        return None
    return Middle(children[name], frozenset({first}))


def _depends(states: Tensor, weights: list[Tensor]) -> bool:
    """Whether any of the weights has a part in the states: not where parts stand side by side."""
    if not states.requires_grad:
        return False
    found = torch.autograd.grad(states.sum(), weights, allow_unused=True)
    return any(each is not None for each in found)


def _child(name: str) -> str:
    """The direct child of a block that a parameter belongs to."""
    return name.partition(".")[0]


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor a module is given: its first argument, however it is passed."""
    given: Tensor = args[0] if args else next(iter(kwargs.values()))
    return given


@contextmanager
def _hooked(
    modules: Mapping[str, nn.Module], hook: Callable[[str], Callable[..., None]]
) -> Iterator[None]:
    """hook(name) runs before every forward of the module of that name, as long as this lasts."""
    with ExitStack() as hooks:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(hook(name), with_kwargs=True)
            hooks.callback(handle.remove)
        yield
