"""A binary mask per client on one dense model: client k has `m_k * x`.

What FedSpa and Sub-FedAvg share: how many weights of every layer a mask keeps, and the criterion of
the pruning engine that judges them on a client's own rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from symprune.fed.algorithms.fedspa.local_scores import Calibration, rates_locally
from symprune.fed.algorithms.shared.layer_masks import layer_ones
from symprune.fed.algorithms.shared.local_epochs import LocalEpochs
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Received, State, Turn, check, filled


@dataclass(frozen=True)
class PersonalMasks(LocalEpochs):
    """Density and criterion of the masks; client state `mask [C, d]`, server state `masks`. A
    reply says in its field `flips`, if it has one, where the client's mask changed."""

    flips: ClassVar[str] = "changed"
    density: float = 0.5
    allocation: str = "erk"  # of the density to layers; or uniform
    mask_score: str = "magnitude"
    search_batch: int = 128
    layer_sizes: tuple[int, ...] = filled(())
    layer_ones: tuple[int, ...] = filled(())

    def prepare(self, constants: Constants) -> Algorithm:
        """How many weights of every tensor are kept in the end."""
        super().prepare(constants)
        check(self.search_batch > 0, f"{self.name}: search_batch must be positive.")
        rates_locally(self.mask_score)
        ones = layer_ones(constants.layout, self.density, self.allocation)
        return replace(self, layer_sizes=tuple(constants.layout.sizes), layer_ones=ones)

    @property
    def calibration(self) -> Calibration:
        return Calibration(self.mask_score, self.search_batch)

    def first_masks(self, turn: Turn, d: int) -> Tensor:
        """The masks at the start, which both sides make without a message: `[C, d]`."""
        raise TypeError(f"{type(self).__name__} has no first_masks.")

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, "masks": self.first_masks(turn, len(x0))}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return {"mask": self.first_masks(turn, problem.dimension)}

    def flip_masks(self, mask: Tensor, replies: Received) -> Tensor:
        """The masks after the turn, from those before it and the replies."""
        return mask ^ replies[self.flips] if self.flips in replies else mask

    def memory(self, server: State, turn: Turn) -> State:
        return {"mask": server["masks"]}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        return {"mask": self.flip_masks(memory["mask"], replies)}

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        return client["mask"] * server["x"]

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """Kept share of all weights, and how much of their masks two clients have in common."""
        mask = client["mask"].double()
        kept, held = mask.sum() / len(mask), mask.sum(0)
        pairs = (held * (held - 1)).sum() / max(len(mask) * (len(mask) - 1), 1)
        return {"density": float(kept / mask.shape[1]), "mask_overlap": float(pairs / kept)}
