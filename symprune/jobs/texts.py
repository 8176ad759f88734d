"""The texts a pruning job reads, as tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from symprune import calibration
from symprune.checkpoint.resume import digest
from symprune.engine import decide
from symprune.engine.text.bos import Bos
from symprune.engine.text.tokens import draw_tokens, reads_text
from symprune.jobs.preparation import Tell, read_held_out
from symprune.recipe import Recipe


@dataclass(frozen=True)
class Texts:
    """What a run reads: tokens to calibrate on (the tokenizer if there are none), others that watch
    the steps that fit them, one row to measure perplexity on, the token windows begin with, and
    windows that the model wrote."""

    data: Any
    watched: Tensor | None = None
    held_out: Tensor | None = None
    bos: int | None = None
    written: Tensor | None = None

    def begin_with(self, found: Bos | None) -> Texts:
        """The same with BOS in front of every window, if that was found to be right."""
        if found is None or found.token is None:
            return self
        data, watched = (
            calibration.begin_with(tokens, found.token) if isinstance(tokens, Tensor) else tokens
            for tokens in (self.data, self.watched)
        )
        return Texts(data, watched, self.held_out, found.token)

    def add_written(self, windows: list[list[int]]) -> Texts:
        """The same with windows that the model wrote."""
        return replace(self, written=torch.tensor(windows))


def read_texts(
    recipe: Recipe,
    tokenizer: Any,
    seqlen: int,
    held_out: str | None,
    report_error: bool,
    tell: Tell,
) -> Texts:
    """held_out: the text perplexity is measured on, if any."""
    data, watched, ids = tokenizer, None, None
    needs = decide.needs(recipe, report_error)
    if reads_text(recipe, needs):
        tell(f"Drawing calibration text from {recipe.calibration}")
        data, watched = draw_tokens(tokenizer, recipe, needs, seqlen)
    if held_out is not None:
        ids = read_held_out(held_out, tokenizer, seqlen)
    return Texts(data, watched, ids)


def describe_sources(recipe: Recipe, texts: Texts) -> list[dict[str, Any]]:
    """What was calibrated on: each source, its weight, how many windows it gave and their hash."""
    if not isinstance(texts.data, Tensor):
        return []
    return [
        {"source": name, "weight": weight, "windows": len(own), "digest": digest(texts.data[own])}
        for name, weight, own in calibration.windows_by_source(recipe.calibration, recipe.nsamples)
    ]
