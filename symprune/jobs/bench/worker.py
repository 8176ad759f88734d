"""The process that holds one model of a bench: it loads it, takes turns and measures perplexity
when asked, one line of JSON for a question and one for its answer.

What libraries print goes to the error stream, so that the answers stay alone on theirs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from symprune.errors import SympruneError

Clock = Callable[[], float]


class Runner(Protocol):
    """A loaded model, whatever runs it."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, by the model's own tokenizer."""
        ...

    def generate(self, prompt: list[int], count: int, came: Callable[[], None]) -> None:
        """Continue a prompt by `count` tokens, the likeliest each; `came` is called at each."""
        ...

    def memory(self) -> int:
        """Bytes held by the process or the accelerator."""
        ...

    def finish(
        self, data: str | None, windows: int | None, seqlen: int, tick: Callable[[int, int], None]
    ) -> dict[str, Any]:
        """What is measured once: the file, the bits, the perplexity window by window."""
        ...


class Bench:
    """What the process knows: its model and the prompt it continues."""

    def __init__(self, runner: Runner, before: int, about: dict[str, Any], clock: Clock) -> None:
        self.runner, self.before, self.clock = runner, before, clock
        self.text, self.new_tokens = str(about["prompt"]), int(about["new_tokens"])
        wanted = int(about["prompt_tokens"])
        self.prompt = runner.encode(self.text)[:wanted]
        if len(self.prompt) < wanted:
            raise SympruneError(
                f"The built-in text has {len(self.prompt)} tokens, too few for --prompt-tokens "
                f"{wanted}."
            )

    def take_turn(self) -> dict[str, float]:
        """One prompt, continued: how fast it was read, how soon a token came, how fast others."""
        begun = self.clock()
        self.runner.encode(self.text)
        encoded = self.clock()
        stamps: list[float] = []
        self.runner.generate(self.prompt, self.new_tokens, lambda: stamps.append(self.clock()))
        if len(stamps) != self.new_tokens:
            raise SympruneError(f"{len(stamps)} tokens came, not {self.new_tokens}.")
        held = self.runner.memory()
        return {
            "prefill_tokens_per_second": len(self.prompt) / (stamps[0] - encoded),
            "decode_tokens_per_second": (len(stamps) - 1) / (stamps[-1] - stamps[0]),
            "first_token_seconds": stamps[0] - begun,
            "memory_bytes": held - self.before,
            "process_bytes": held,
        }


def load(about: dict[str, Any]) -> tuple[Runner, int]:
    """The model, and the memory held before it: Python and the libraries."""
    if about["engine"] == "llama.cpp":
        from symprune.jobs.bench import in_llama

        return in_llama.load(about)
    from symprune.jobs.bench import in_torch

    return in_torch.load(about)


def serve(
    lines: Any, answer: Callable[[dict[str, Any]], None], clock: Clock = time.perf_counter
) -> None:
    """Answer questions until there are no more."""
    bench: Bench | None = None
    for line in lines:
        about = json.loads(line)
        do = about.pop("do")
        try:
            if do == "load":
                runner, before = load(about)
                bench = Bench(runner, before, about, clock)
                answer({})
            elif bench is not None and do == "turn":
                answer(bench.take_turn())
            elif bench is not None and do == "finish":
                answer(bench.runner.finish(**about, tick=lambda *done: answer({"tick": done})))
        except SympruneError as error:
            answer({"error": str(error)})


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    serve(sys.stdin, answer)


if __name__ == "__main__":
    main()
