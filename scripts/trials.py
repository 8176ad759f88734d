"""One model pruned again and again in memory, and measured after each: what tables of recipes and
of values share. The dense weights are put back before the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from symprune import Recipe, calibration, prune
from symprune.checkpoint.load import load_with_tokenizer
from symprune.engine.blocks import Blocks
from symprune.engine.report import Report
from symprune.eval.perplexity import perplexity
from symprune.models.layout import find_layout


@dataclass(frozen=True)
class Trial:
    """What one prune did and cost: seconds of the processor's, and shares of the stages in the time
    on the wall, of which other work takes as much from each."""

    report: Report
    perplexities: dict[str, float]
    seconds: float
    shares: dict[str, float]


class Trials:
    """texts: what perplexity is measured on, by name. stored: the type weights are written in."""

    def __init__(
        self, name: str, texts: dict[str, str], seqlen: int, windows: int | None,
        stored: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer = load_with_tokenizer(name)
        self.layout, self.seqlen, self.windows = find_layout(self.model), seqlen, windows
        self.stored = stored
        self.texts = {
            kind: calibration.encode(self.tokenizer, calibration.text(source, "test"))
            for kind, source in texts.items()
        }

    def measure(self) -> dict[str, float]:
        return {
            kind: perplexity(self.model, ids, self.seqlen, self.windows).perplexity
            for kind, ids in self.texts.items()
        }

    @contextmanager
    def pruned(self, recipe: Recipe) -> Iterator[Trial]:
        """The model is pruned as long as this lasts."""
        changing = list(self.model.parameters())
        dense = [parameter.detach().clone() for parameter in changing]
        busy, start = time.process_time(), time.perf_counter()
        blocks = Blocks(self.layout, stored=self.stored)
        report = prune(self.model, self.tokenizer, recipe, blocks=blocks)
        busy, spent = time.process_time() - busy, time.perf_counter() - start
        shares = {stage: seconds / spent for stage, seconds in report.seconds.items()}
        yield Trial(report, self.measure(), busy, shares)
        with torch.no_grad():
            for parameter, weights in zip(changing, dense, strict=True):
                parameter.copy_(weights)
