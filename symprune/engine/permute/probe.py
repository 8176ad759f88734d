"""What depends on what in a block, seen by running it on a few tokens.

The result of every product with a matrix can be replaced: by numbers that were drawn, the same in
every run, and for some output channels by others. What then changes in the inputs of later matrices
depends on these channels, directly, for in between no product has a say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from symprune.engine.collect import Collector
from symprune.engine.forward import Activations
from symprune.models.matrices import Matrix

TOKENS = 32
Replace = Callable[[str, Tensor, Tensor], None]
"""replace(name, x, y): change in place what came out of a matrix that was given x."""


class Products(Collector):
    """The inputs and outputs of a block's matrices, by name; outputs may be replaced."""

    def __init__(self, matrices: list[Matrix], block: nn.Module, replace: Replace) -> None:
        super().__init__(matrices, block=block)
        self.given: dict[str, Tensor] = {}
        self.made: dict[str, Tensor] = {}
        self.readers: dict[int, list[str]] = {}  # who was given the same tensor
        self._held: list[Tensor] = []
        self._replace = replace
        self._trace.stop()

    def _record(self, matrix: Matrix, x: Tensor, y: Tensor) -> None:
        if x.numel() == 0:
            return
        self._held.append(x)
        self.readers.setdefault(id(x), []).append(matrix.name)
        self.given.setdefault(matrix.name, x.clone())
        self.made.setdefault(matrix.name, y.clone())
        self._replace(matrix.name, x, y)


class Probe:
    """A block and a few tokens in front of it."""

    def __init__(
        self,
        activations: Activations,
        index: int,
        block: nn.Module,
        matrices: list[Matrix],
        prefix: str,
    ) -> None:
        """prefix: what the names of matrices have in front of those in the block."""
        self.prefix = prefix
        self.activations = activations
        self.index = index
        self.block = block
        self.matrices = matrices
        self._drawn: dict[tuple[str, int], Tensor] = {}

    def run(
        self, replace: Replace = lambda *_: None, hidden: Tensor | None = None
    ) -> tuple[Products, Tensor]:
        """What went into the matrices and came out of them before it was replaced, and the block's
        output. hidden: other hidden states in front of it."""
        products = Products(self.matrices, self.block, replace)
        one = self.activations.only(range(1)).copy()
        if hidden is not None:
            one.hidden.copy_(hidden)
        with products:
            out = one.run(self.index, self.block, range(1))
        return products, out

    @property
    def hidden(self) -> Tensor:
        """The hidden states in front of the block."""
        return self.activations.only(range(1)).hidden

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The block's, by the names they have in the model."""
        return {self.prefix + name: p for name, p in self.block.named_parameters()}

    @property
    def biases(self) -> dict[str, str]:
        """What is added behind a matrix, by the name of the matrix's parameter."""
        known = self.parameters
        places = {
            name: (f"{name.removesuffix('.weight')}.bias", f"{name}_bias")
            for name in {matrix.parameter_name for matrix in self.matrices}
        }
        return {n: bias for n, both in places.items() for bias in both if bias in known}

    @contextmanager
    def unbiased(self) -> Iterator[None]:
        """The block without what is added behind matrices, which moves with their rows."""
        biases = [self.parameters[name].data for name in self.biases.values()]
        kept = [bias.clone() for bias in biases]
        try:
            for bias in biases:
                bias.zero_()
            yield
        finally:
            for bias, before in zip(biases, kept, strict=True):
                bias.copy_(before)

    def inputs(
        self,
        other: Mapping[str, Tensor] | None = None,
        alike: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """What goes into each matrix, `[tokens, channels]`, when what comes out of all of them is
        drawn. The channels in `other` are drawn anew, those in `alike` are all the same."""

        def replace(name: str, _: Tensor, y: Tensor) -> None:
            y.copy_(self._draw(name, y))
            if other is not None and name in other:
                channels = other[name].to(y.device)
                y.index_copy_(-1, channels, self._draw(name, y, 1).index_select(-1, channels))
            if alike is not None and name in alike:
                channels = alike[name].to(y.device)
                same = self._draw(name, y, 2)[..., :1].expand(*y.shape[:-1], len(channels))
                y.index_copy_(-1, channels, same.contiguous())

        with self.unbiased():
            found, _ = self.run(replace)
        return {name: x.reshape(-1, x.shape[-1]) for name, x in found.given.items()}

    def _draw(self, name: str, like: Tensor, which: int = 0) -> Tensor:
        """Numbers that depend on the name alone: not on weights, nor on what was drawn before."""
        found = self._drawn.get((name, which))
        if found is None or found.shape != like.shape:
            digest = hashlib.blake2b(f"{which}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            found = torch.randn(like.shape, generator=generator).to(like)
            self._drawn[name, which] = found
        return found
