"""How well a model predicts a window of text: what perplexity is made of, and what tells whether a
model needs its BOS token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def loss(logits: Tensor, window: Tensor, predicted: slice = slice(1, None)) -> float:
    """Mean negative log likelihood of a window's tokens, all but the first or some of them."""
    first, last, _ = predicted.indices(len(window))
    wanted = window[first:last].to(logits.device)
    return float(F.cross_entropy(logits[0, first - 1 : last - 1].float(), wanted))
