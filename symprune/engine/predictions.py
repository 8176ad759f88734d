"""The last block, trained on what the head makes of it: the dense model's predictions.

In front of the head nothing comes that could make up for an error, and not every direction of the
hidden states counts the same there. So the last block is trained once more, on the mean over
positions of KL(dense || pruned).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symprune.engine import forward
from symprune.engine.forward import Activations
from symprune.models.layout import Layout
from symprune.reconstruct.fit import Run

PREDICTED = 2**23  # numbers that one step predicts: of a window it takes as many positions
COPIES = 7  # of these numbers in fp32: logits, their logarithms and exponentials, the way back


@dataclass(frozen=True)
class Predictions:
    """run(weights, sample) is the last block's output with these weights in the place of its own,
    dense the dense model's states behind that block, tokens the samples."""

    layout: Layout
    tokens: Tensor
    run: Run
    dense: Activations
    vocabulary: int

    @property
    def scale(self) -> float:
        """As if errors were added up over positions."""
        return float(len(self._positions(0)))

    def loss(self, weights: Mapping[str, Tensor], sample: int) -> Tensor:
        """KL(dense || pruned), in nats a token, at positions of equal distance."""
        with torch.no_grad():
            aim = self._predict(self.dense.of(range(sample, sample + 1)), sample)
        own = self._predict(self.run(weights, sample), sample)
        return (aim.exp() * (aim - own)).sum(-1).mean()

    def _predict(self, states: Tensor, sample: int) -> Tensor:
        window = self.tokens[sample : sample + 1]
        as_tuples, positions = self.dense.blocks_return_tuples, self._positions(sample)
        logits = forward.predict(self.layout, window, states, as_tuples, positions)
        return logits[0].float().log_softmax(-1)

    def _positions(self, sample: int) -> range:
        """Every so many, beginning elsewhere in each sample."""
        length = self.tokens.shape[1]
        step = step_between(length, self.vocabulary)
        return range(sample % step, length, step)


def step_between(length: int, vocabulary: int) -> int:
    """Of how many positions of a window one is predicted."""
    return -(-length // max(1, min(length, PREDICTED // vocabulary)))


def size_of_predictions(length: int, vocabulary: int) -> int:
    """Bytes of a window's predictions in training, with their way back."""
    return COPIES * 4 * vocabulary * -(-length // step_between(length, vocabulary))


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter of the model itself takes part in gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
