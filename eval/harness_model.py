"""A HuggingFace model as lm-evaluation-harness sees it, with batches that suit a CPU.

The harness finds its automatic batch size by running the longest request in batches of 64 until
one fits, five times. A CPU never reports that a batch does not fit until memory is gone, and gains
nothing from large batches, so there a batch is a fixed amount of work instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from lm_eval.models.huggingface import HFLM

from symprune.errors import SympruneError

# Of 32 to 512 MiB the fastest for a model of 135M parameters on one core; 512 took twice as long.
CPU_LOGITS_BYTES = 64 * 2**20


AT_ONCE = 8  # requests that are timed where the size of a batch is not known


@dataclass(frozen=True)
class Ahead:
    """What the harness is about to ask, how many there are, and how long all take, from some."""

    kind: str
    count: int
    seconds: float


Foresee = Callable[[Ahead], bool]


class HarnessModel(HFLM):
    """`HFLM` around a loaded model; only the progress of the forward passes is shown. foresee is
    told of all requests of a kind before the first of them, and says whether to go on: if not,
    their answers are empty."""

    def __init__(
        self, model: Any, tokenizer: Any, batch_size: int | str, foresee: Foresee | None = None
    ) -> None:
        # A copy, because the harness gives tokenizers without a padding token one of its choice.
        super().__init__(pretrained=model, tokenizer=deepcopy(tokenizer), batch_size=batch_size)
        self._terminal: TextIO = sys.stderr
        self._batch_plan: list[int] = []
        self._foresee = foresee

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        longest = max((len(continuation) for *_, continuation in requests), default=0)
        if longest > self.max_length:
            raise SympruneError(
                f"An answer of {longest} tokens is too long for a model with a context of "
                f"{self.max_length} tokens."
            )
        # Answers of one token to one question are read off the same pass; rolling comes in batches.
        rows = {(*context, *answer[:-1]) for _, context, answer in requests}
        if override_bs is None and not self._may_go_on("answers", len(requests), rows):
            return [(0.0, False)] * len(requests)
        with redirect_stderr(self._terminal):
            return super()._loglikelihood_tokens(
                requests, disable_tqdm or not self._terminal.isatty(), override_bs
            )

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        rows = {tuple(self.tok_encode(request.args[0])) for request in requests}
        if not self._may_go_on("texts to read", len(requests), rows):
            return [0.0] * len(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        rows = {tuple(self.tok_encode(request.args[0])) for request in requests}
        asked = (dict(request.args[1]).get("max_gen_toks") for request in requests)
        new = sum(int(each or self.max_gen_toks) for each in asked)
        if not self._may_go_on("texts to write", len(requests), rows, new):
            return [""] * len(requests)
        with redirect_stderr(self._terminal):
            return super().generate_until(requests, disable_tqdm or not self._terminal.isatty())

    def _may_go_on(
        self, kind: str, count: int, rows: set[tuple[int, ...]], new_tokens: int = 0
    ) -> bool:
        """rows: what the model reads; new_tokens: those it writes at most."""
        rows.discard(())
        if self._foresee is None or not rows:
            return True
        ordered = sorted(rows, key=len)
        middle = ordered[len(ordered) // 2][: self.max_length - 1]
        size = self._cpu_tokens() // max(1, len(middle)) if self.device.type == "cpu" else AT_ONCE
        size = max(1, min(size, len(ordered)))
        with torch.no_grad():
            ids = torch.tensor([middle] * size, device=self.device)
            token = self._time(lambda: self._model_call(ids)) / ids.numel()
            seconds = token * sum(len(row) for row in ordered)
            if new_tokens:
                known = self.model(ids[:1], use_cache=True).past_key_values
                one = ids[:1, :1]
                seconds += new_tokens * self._time(
                    lambda: self.model(one, past_key_values=known, use_cache=True)
                )
        with redirect_stderr(self._terminal):
            return self._foresee(Ahead(kind, count, seconds))

    def _time(self, work: Callable[[], object]) -> float:
        """The second time, when all is set up."""
        work()
        begun = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer, of which a short context has no room for as many as usual."""
        return min(super().max_gen_toks, self.max_length // 2)

    def _batch_scheduler(self, pos: int, n_reordered_requests: Sequence[Any]) -> int:
        if self.device.type != "cpu":
            return super()._batch_scheduler(pos, n_reordered_requests)
        if pos == 0:
            lengths = [
                min(len(context) + len(continuation), self.max_length)
                for _, context, continuation in n_reordered_requests
            ]
            self._batch_plan = plan_batches(lengths, self._cpu_tokens())
        return self._batch_plan[pos]

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        if self.device.type != "cpu":
            return super()._detect_batch_size(requests, pos)
        return max(1, self._cpu_tokens() // self.max_length)

    def _cpu_tokens(self) -> int:
        """Tokens per batch; the logits, in float32, are the largest tensor of a forward pass."""
        return CPU_LOGITS_BYTES // (4 * max(1, len(self.tokenizer)))


def plan_batches(lengths: Sequence[int], tokens: int) -> list[int]:
    """For each request, the size of its batch, when a batch holds up to `tokens` with padding.

    `lengths` fall, so the first request of a batch is the one the others are padded to. A request
    that alone exceeds `tokens` is a batch of one.
    """
    plan: list[int] = []
    while len(plan) < len(lengths):
        size = max(1, tokens // lengths[len(plan)])
        plan += [size] * min(size, len(lengths) - len(plan))
    return plan
