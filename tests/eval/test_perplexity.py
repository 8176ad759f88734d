"""Perplexity: the papers' protocol, and models whose perplexity is known."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.eval.perplexity import cut, perplexity, summary


class Uniform(nn.Module):
    """Knows nothing: its perplexity is the size of its vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 1)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.embedding.num_embeddings))


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    result = perplexity(Uniform(50), torch.randint(0, 50, (1000,)), seqlen=64)
    assert result.perplexity == pytest.approx(50)
    assert (result.windows, result.seqlen) == (15, 64)


def test_it_is_the_mean_over_non_overlapping_windows() -> None:
    model = families.model()
    ids = families.tokens(1, 70).flatten()
    losses = []
    for start in (0, 32):
        window = ids[start : start + 32]
        logits = model(input_ids=window[None]).logits[0]
        losses += F.cross_entropy(logits[:-1], window[1:], reduction="none").tolist()
    result = perplexity(model, ids, seqlen=32)
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert result.windows == 2
    assert perplexity(model, ids, seqlen=32, max_windows=1).windows == 1


def test_training_mode_is_put_back_and_short_text_refused() -> None:
    model = families.model().train()
    perplexity(model, families.tokens(1, 40).flatten(), seqlen=8)
    assert model.training
    with pytest.raises(SympruneError, match="3 tokens, too few for one window of 8"):
        perplexity(model, torch.tensor([1, 2, 3]), seqlen=8)


def test_with_bos_every_token_of_the_text_is_predicted_once() -> None:
    ids = torch.arange(5, 19)
    plain, begun = cut(ids, 5), cut(ids, 5, bos=1)
    assert plain.tolist() == [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert begun.tolist() == [[1, 5, 6, 7, 8], [1, 9, 10, 11, 12], [1, 13, 14, 15, 16]]
    assert torch.equal(cut(torch.cat([torch.tensor([1]), ids]), 5, bos=1), begun)
    assert cut(ids, 5, max_windows=1).tolist() == [[5, 6, 7, 8, 9]]


def test_the_figure_is_the_exponential_of_the_mean_loss() -> None:
    found = summary([1.0, 3.0], 8)
    assert found.perplexity == pytest.approx(math.exp(2.0)) and (found.nll, found.windows) == (2, 2)
    assert summary([800.0], 8).perplexity == math.inf
