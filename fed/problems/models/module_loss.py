"""Any `nn.Module` as a loss of stacked clients, its trained parameters one flat vector.

Plain networks compute all clients at once through `torch.func`. Where that cannot be (an LSTM), or
would not give a client the bits it has alone (attention), they go one after the other with
autograd; a client's rows of weight zero are then left out, so padding changes nothing.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from symprune.errors import SympruneError
from symprune.fed.problems.layout import FlatLayout

Parameters = dict[str, Tensor]
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
# Layers that give a client the same bits in a stack as alone, under `torch.func`. Convolutions do,
# too, but with weights of each client's own they are slower in a stack, up to twice on a CPU.
STACKED = (
    *(nn.Linear, nn.GroupNorm, nn.Flatten, nn.Unflatten, nn.ZeroPad2d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Dropout, nn.Identity),
    *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sequential),
)


class ModuleLoss:
    """The base: a subclass calls `adopt` and gives `row_losses` and `outputs`."""

    module: nn.Module
    layout: FlatLayout
    fixed: Parameters  # what is not trained
    rows_at_once: int | None = None  # None: all rows of a client in one pass

    def adopt(self, module: nn.Module, exempt: Sequence[str] = ()) -> None:
        """Take the module for this loss: what it trains, and what stays."""
        refuse_running_statistics(module)
        trained = trained_parameters(module, exempt)
        fixed = {n: p.detach() for n, p in module.named_parameters() if n not in trained}
        layout = FlatLayout(tuple(trained), tuple(tuple(p.shape) for p in trained.values()))
        found = {"module": module.eval(), "layout": layout, "fixed": fixed, "_stackable": {}}
        for name, value in found.items():
            object.__setattr__(self, name, value)  # a subclass is a frozen dataclass

    def to(self, device: str | torch.device) -> ModuleLoss:
        """The same with a copy of the module on this device."""
        moved = copy.copy(self)
        module = copy.deepcopy(self.module).to(device)
        fixed = {name: tensor.to(device) for name, tensor in self.fixed.items()}
        for name, value in {"module": module, "fixed": fixed, "_stackable": {}}.items():
            object.__setattr__(moved, name, value)
        return moved

    def outputs(self, parameters: Parameters, x: Tensor) -> Tensor:
        """What the module says about rows `x [m, ...]`."""
        raise NotImplementedError

    def row_losses(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        """The loss of every row, `[m]`."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @cached_property
    def digest(self) -> str:
        """Tells models apart by all that training leaves alone: names, shapes, fixed values."""
        check = zlib.crc32(f"{self.layout.names} {self.layout.shapes}".encode())
        held = {**self.fixed, **dict(self.module.named_buffers())}
        for name, tensor in held.items():
            check = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), check)
            content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            check = zlib.crc32(content.numpy().data, check)
        return f"{check:08x}"

    def own_start(self) -> Tensor:
        """The module's own values of what is trained, in main memory."""
        own = dict(self.module.named_parameters())
        return self.layout.join({name: own[name].detach().cpu() for name in self.layout.names})

    def value(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        if self._stacks(w, x, y, weights):
            return vmap(self._one)(w, x, y, weights)
        with torch.no_grad():
            values = [self._value(*client) for client in zip(w, x, y, weights, strict=True)]
        return torch.stack(values)

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        if self._stacks(w, x, y, weights):
            return vmap(grad(self._one))(w, x, y, weights)
        return self._gradients(w, x, y, weights)

    def noisy_gradient(
        self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor, seeds: Tensor
    ) -> Tensor:
        """The gradient as in training, dropout and all, each client from a seed of its own."""
        self.module.train()
        try:
            return self._gradients(w, x, y, weights, seeds.tolist())
        finally:
            self.module.eval()

    def draws(self, row: Tensor) -> bool:
        """Whether training draws random numbers, found out by trying it on `row [1, ...]`."""
        if "_draws" not in self.__dict__:
            self.module.train()
            try:
                with torch.no_grad(), own_randomness(0, self.device):
                    before = random_states(self.device)
                    self.outputs(self._placed(self.own_start()), row.to(self.device))
                    after = random_states(self.device)
            finally:
                self.module.eval()
            same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            object.__setattr__(self, "_draws", not same)
        return bool(self.__dict__["_draws"])

    def _stacks(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> bool:
        one = (w[:1], x[:1, :1], y[:1, :1], weights[:1, :1])
        return self.can_stack("loss", grad(self._one), one)

    def can_stack(
        self, what: str, function: Callable[..., Tensor], one: tuple[Tensor, ...]
    ) -> bool:
        """Whether all clients can be computed at once, tried the first time with `one` of them."""
        found: dict[str, bool] = self.__dict__["_stackable"]
        if what not in found:
            found[what] = self.rows_at_once is None and all(map(_known, self.module.modules()))
            try:
                _ = vmap(function)(*one) if found[what] else None
            except (RuntimeError, ValueError, NotImplementedError):
                found[what] = False  # a fault of the module itself is met again without vmap
        return found[what]

    def _placed(self, w: Tensor) -> Parameters:
        """All parameters by name, those that are trained from `w [d]`, where the module is."""
        device = self.device
        return {**self.fixed, **{n: p.to(device) for n, p in self.layout.split(w).items()}}

    def _one(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        parameters = {**self.fixed, **self.layout.split(w)}
        return (weights * self.row_losses(parameters, x, y)).sum()

    def _value(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        parameters, total = self._placed(w), weights.new_zeros(())
        for rows, targets, share in self._passes(x, y, weights):
            losses = self.row_losses(parameters, rows, targets)
            total = total + (share * losses).sum().to(total)
        return total

    def _gradients(
        self,
        w: Tensor,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        seeds: Sequence[int | None] | None = None,
    ) -> Tensor:
        out = torch.zeros(w.shape, dtype=w.dtype, device=w.device)
        clients = zip(out, w, x, y, weights, seeds or [None] * len(w), strict=True)
        for into, own, *rows, seed in clients:
            with torch.enable_grad(), own_randomness(seed, self.device):
                self._add_gradient(into, own, *rows)
        return out

    def _add_gradient(self, into: Tensor, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> None:
        placed = self._placed(w.detach())
        trained = [placed[name].requires_grad_() for name in self.layout.names]
        for rows, targets, share in self._passes(x, y, weights):
            total = (share * self.row_losses(placed, rows, targets)).sum()
            parts = torch.autograd.grad(total, trained, allow_unused=True)
            for where, part in zip(self.layout.slices().values(), parts, strict=True):
                if part is not None:
                    into[where] += part.flatten().to(into)

    def _passes(
        self, x: Tensor, y: Tensor, weights: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """A client's rows that count, some at a time, where the module is."""
        used = (weights != 0).nonzero().squeeze(1)
        for rows in used.split(self.rows_at_once or len(used)) if len(used) else ():
            yield tuple(t[rows].to(self.device) for t in (x, y, weights))  # type: ignore[misc]


def refuse_running_statistics(module: nn.Module) -> None:
    """Buffers are constants here; those that training changes have no place in a message."""
    for name, _ in module.named_buffers():
        if name.rpartition(".")[2] in RUNNING:
            owner = name.rpartition(".")[0]
            kind = type(module.get_submodule(owner)).__name__
            raise SympruneError(
                f"{type(module).__name__} keeps running statistics ({name} of a {kind}), which "
                "clients cannot share as parameters; use GroupNorm or LayerNorm in its place."
            )


def trained_parameters(module: nn.Module, exempt: Sequence[str]) -> dict[str, nn.Parameter]:
    """What is trained: all that wants a gradient and is not exempt, tied weights once."""
    named = dict(module.named_parameters())
    for pattern in exempt:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise SympruneError(f"No parameter of {type(module).__name__} is called {pattern!r}.")
    trained = {
        name: parameter
        for name, parameter in named.items()
        if parameter.requires_grad and not any(fnmatchcase(name, each) for each in exempt)
    }
    if not trained:
        raise SympruneError(f"{type(module).__name__} has no parameter left to train.")
    dtypes = {parameter.dtype for parameter in trained.values()}
    if not dtypes <= {torch.float32} and not dtypes <= {torch.float64}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise SympruneError(
            f"The parameters of {type(module).__name__} that are trained are {names}; "
            "they must all be float32, or all float64."
        )
    return trained


def _known(module: nn.Module) -> bool:
    return type(module) in STACKED or any(True for _ in module.children())


@contextmanager
def own_randomness(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw from this seed, and leave the generators as they were. None: do nothing."""
    if seed is None:
        yield
        return
    there = _generators(device)
    before, beyond = torch.get_rng_state(), getattr(torch, there) if there else None
    before_beyond = None if beyond is None else beyond.get_rng_state(device)
    try:
        torch.default_generator.manual_seed(seed)
        if beyond is not None:
            with beyond.device(device):
                beyond.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(before)
        if beyond is not None:
            beyond.set_rng_state(before_beyond, device)


def random_states(device: torch.device) -> list[Tensor]:
    """The generators' states, here and on the device."""
    there = _generators(device)
    return [
        torch.get_rng_state(),
        *([getattr(torch, there).get_rng_state(device)] if there else []),
    ]


def _generators(device: torch.device) -> str | None:
    """The kind of device, if it is one with generators of its own."""
    kind = device.type
    return kind if kind != "cpu" and hasattr(getattr(torch, kind, None), "get_rng_state") else None
