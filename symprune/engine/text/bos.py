"""Whether every window of text begins with the token that marks a beginning (BOS).

The papers cut one long text into windows, and a tokenizer puts BOS before the whole text only. Most
models do not mind. Some do: Gemma's were trained with it before every text, and without it their
hidden states are ones they never had to deal with. For these, calibration and evaluation windows
must begin with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from symprune import calibration
from symprune.errors import SympruneError
from symprune.models.hub import max_length
from symprune.recipe import BOS
from symprune.token_loss import check_vocabulary, loss
from symprune.validation import check_choice

AS_PUBLISHED = ("llama", "opt")
"""Families whose published tables were made without: by name, not by measurement, so that a figure
for one of their models can always be compared with those tables."""
WINDOWS, LENGTH = 4, 512
MARGIN = 0.1
"""Nats a token. SmolLM2-135M, which does not need BOS, gains 0.003 from it, with a standard error
of 0.007 over these 2,040 tokens; Gemma 3, which does, loses 0.95 without (perplexity 72.5 instead
of 27.9)."""

Losses = Callable[[Tensor, list[slice]], list[float]]
"""losses(windows, predicted): the mean loss of each window's tokens in its slice."""


@dataclass(frozen=True)
class Bos:
    """What was decided: the token every window begins with, or None, and why."""

    setting: str
    token: int | None
    why: str
    loss_without: float | None = None
    loss_with: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def notes(self) -> list[str]:
        """What the user should know of it."""
        return [] if self.token is None else [f"Every window begins with BOS: {self.why}."]


def decide(setting: str, tokenizer: Any, config: Any, losses: Losses) -> Bos:
    """Whether windows for a model begin with BOS, and with which token.

    `auto`: where the tokenizer adds one by itself, the family is not one with published tables, and
    the model predicts clearly better with it. That is measured on the calibration part of the
    built-in text whatever the recipe calibrates on, so it is the same in every command.
    """
    check_choice("bos", setting, BOS)
    token = getattr(tokenizer, "bos_token_id", None)
    if setting == "never":
        return Bos(setting, None, "not asked for")
    if setting == "always":
        if token is None:
            raise SympruneError("The tokenizer has no BOS token that --bos always could add.")
        return Bos(setting, token, "asked for")
    if token is None or not _adds(tokenizer, token):
        return Bos(setting, None, "the tokenizer adds none")
    family = config.get_text_config().model_type
    if family in AS_PUBLISHED:
        return Bos(setting, None, f"the published tables for {family} were made without")
    without, with_it = _measure(tokenizer, token, config, losses)
    why = f"the loss is {without:.3f} a token without and {with_it:.3f} with it"
    return Bos(setting, token if without - with_it > MARGIN else None, why, without, with_it)


def _adds(tokenizer: Any, token: int) -> bool:
    return tokenizer("x")["input_ids"][:1] == [token]


def _measure(tokenizer: Any, token: int, config: Any, losses: Losses) -> tuple[float, float]:
    """The mean loss of the same tokens behind the same text, without BOS and with it."""
    length = min(LENGTH, max_length(config) or LENGTH)
    text = calibration.text("builtin", "train")[: 16 * WINDOWS * length]
    ids = calibration.encode(tokenizer, text)[1:]
    length = min(length, len(ids) // WINDOWS)
    plain = ids[: WINDOWS * length].view(WINDOWS, length)
    # Both sorts are as long, so that they can go through a model together; the last token of the
    # one is not in the other.
    both = torch.cat([plain, calibration.begin_with(plain, token)])
    parts = [slice(1, length - 1)] * WINDOWS + [slice(2, length)] * WINDOWS
    found = losses(both, parts)
    return sum(found[:WINDOWS]) / WINDOWS, sum(found[WINDOWS:]) / WINDOWS


def in_memory(model: Any) -> Losses:
    """The losses of a loaded model."""

    @torch.no_grad()
    def losses(windows: Tensor, predicted: list[slice]) -> list[float]:
        embeddings = model.get_input_embeddings().weight
        check_vocabulary(windows, embeddings)
        training, device = model.training, embeddings.device
        model.eval()
        try:
            rows = (row[None].to(device) for row in windows)
            logits = (model(input_ids=row, use_cache=False).logits for row in rows)
            return [loss(*of) for of in zip(logits, windows, predicted, strict=True)]
        finally:
            model.train(training)

    return losses
