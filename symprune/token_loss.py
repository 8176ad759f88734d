"""How well a model predicts a window of text: what perplexity is made of, and what tells whether a
model needs its BOS token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from symprune.errors import SympruneError


def loss(logits: Tensor, window: Tensor, predicted: slice = slice(1, None)) -> float:
    """Mean negative log likelihood of a window's tokens, all but the first or some of them."""
    first, last, _ = predicted.indices(len(window))
    wanted = window[first:last].to(logits.device)
    return float(F.cross_entropy(logits[0, first - 1 : last - 1].float(), wanted))


def check_vocabulary(ids: Tensor, embeddings: Tensor) -> None:
    """Fail where tokens are no ids of a model's: an accelerator would not say why."""
    if not ids.numel():
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= len(embeddings):
        wrong = lowest if lowest < 0 else highest
        raise SympruneError(
            f"Token {wrong} of the text is not in the model's vocabulary of {len(embeddings):,}; "
            "is the tokenizer that of another model?"
        )
