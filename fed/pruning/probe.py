"""The server's own few tokens, which show what inputs matrices share and how long channels are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TOKENS = 8


def own_tokens(model: nn.Module) -> Tensor:
    """From all over the vocabulary, `[1, tokens]`: the first ones may be of no use."""
    table = getattr(model, "get_input_embeddings", lambda: None)()
    size = int(getattr(table, "num_embeddings", TOKENS))
    return ((torch.arange(TOKENS) * 2 + 1) * size // (2 * TOKENS)).unsqueeze(0)
