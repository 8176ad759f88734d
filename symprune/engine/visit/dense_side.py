"""A block as it was, beside the one that is being pruned: what the dense model gives to a group of
matrices while those before it are pruned already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from symprune.engine.collect import Beside, Collector, Enough
from symprune.engine.forward import Activations
from symprune.models.matrices import Matrix
from symprune.update.targets import TOKENS_A_CHANNEL


class _Inputs(Collector):
    """Keeps the inputs of some matrices instead of measuring them."""

    def __init__(self, matrices: list[Matrix], only: frozenset[str]) -> None:
        super().__init__(matrices, only=only)
        self.stopping = True
        self._trace.stop()
        self.found: dict[str, Tensor] = {}

    def _record(self, matrix: Matrix, x: Tensor, y: Tensor) -> None:
        if self.only is not None and matrix.name in self.only:
            self._met[matrix.name] += 1
            self.found[matrix.name] = x


@dataclass
class DenseSide:
    """Of one block: the dense model's hidden states in front of it, the block, its matrices and the
    beginning of their names. What is pruned of it is kept here as it was. compared: the names of
    the matrices whose inputs can be held against the dense model's."""

    states: Activations
    index: int
    block: nn.Module
    matrices: list[Matrix]
    prefix: str
    compared: frozenset[str] = frozenset()
    _kept: dict[str, nn.Parameter] = field(default_factory=dict)

    def keep(self, group: list[Matrix]) -> None:
        """These are about to be pruned."""
        for matrix in group:
            if matrix.parameter_name not in self._kept:
                copy = nn.Parameter(matrix.parameter.detach().clone(), requires_grad=False)
                self._kept[matrix.parameter_name] = copy

    @property
    def weights(self) -> Mapping[str, Tensor] | None:
        """What stands in the place of pruned weights, by the names these have in the block."""
        return {name.removeprefix(self.prefix): kept for name, kept in self._kept.items()} or None

    def inputs_of(self, group: list[Matrix]) -> Beside | None:
        """What the dense model gives to these matrices; None where nothing can be compared."""
        names = frozenset(matrix.name for matrix in group) & self.compared
        if not names:
            return None
        matrices = [
            replace(m, parameter=self._kept.get(m.parameter_name, m.parameter))
            for m in self.matrices
        ]

        def run(samples: range) -> Mapping[str, Tensor]:
            seen = _Inputs(matrices, names)
            with suppress(Enough), seen:
                self.states.run(self.index, self.block, samples, self.weights)
            return seen.found

        return run


def comparable(found: list[Matrix], repeated: frozenset[str], tokens: int) -> frozenset[str]:
    """The matrices of a block that the dense model gives the same tokens to, once, and of which
    there are enough. Its router may send other tokens to an expert."""
    kinds = Counter(matrix.kind for matrix in found)
    return frozenset(
        matrix.name
        for matrix in found
        if matrix.piece is None
        and kinds[matrix.kind] == 1
        and matrix.name not in repeated
        and tokens >= TOKENS_A_CHANNEL * matrix.weight.shape[1]
    )
