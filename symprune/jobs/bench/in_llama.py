"""A GGUF file that llama.cpp runs, through llama-cpp-python, as a bench measures it.

torch and transformers are imported after the turns only: the memory is llama.cpp's own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from symprune.errors import SympruneError

Tick = Callable[[int, int], None]
BLOCK = "blk."


class LlamaRunner:
    """`worker.Runner` by the library's `Llama`."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.model = self._open(about["prompt_tokens"] + about["new_tokens"])

    def _open(self, context: int, logits_all: bool = False) -> Any:
        from llama_cpp import Llama

        threads = self.about["threads"]
        try:
            return Llama(
                self.about["path"], n_ctx=context, n_batch=min(context, 512), n_threads=threads,
                n_threads_batch=threads, logits_all=logits_all, verbose=False,
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            raise SympruneError(f"llama.cpp cannot load {self.about['path']}: {error}") from error

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.model.tokenize(text.encode())
        return found

    def generate(self, prompt: list[int], count: int, came: Callable[[], None]) -> None:
        self.model.reset()  # it would know the prompt from the last turn
        for _ in islice(self.model.generate(prompt, temp=0.0), count):
            came()

    def memory(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def finish(
        self, data: str | None, windows: int | None, seqlen: int, tick: Tick
    ) -> dict[str, Any]:
        from gguf import GGUFReader, LlamaFileType

        path = Path(self.about["path"])
        reader = GGUFReader(path)
        tensors = [t for t in reader.tensors if t.name.startswith(BLOCK) and len(t.shape) > 1]
        field = reader.get_field("general.file_type")
        kind = LlamaFileType(field.contents()).name if field else "GGUF"
        found: dict[str, Any] = {
            "dtype": kind.removeprefix("MOSTLY_").removeprefix("ALL_"),
            "packed": [],
            "bits_per_weight": sum(8 * int(t.n_bytes) for t in tensors)
            / sum(int(t.n_elements) for t in tensors),
            "file_bytes": path.stat().st_size,
        }
        return found if data is None else found | self._perplexity(data, windows, seqlen, tick)

    def _perplexity(
        self, data: str, windows: int | None, seqlen: int, tick: Tick
    ) -> dict[str, Any]:
        """By the tokens of transformers' tokenizer, as for every other model."""
        import torch
        from torch import Tensor

        from symprune.jobs.measures import measure_perplexity
        from symprune.models import hub
        from symprune.token_loss import loss

        self.model.close()
        origin = hub.resolve(self.about["name"], hub.Access(**self.about["access"]))
        config, tokenizer = hub.load_config(origin), hub.load_tokenizer(origin)

        opened: dict[int, Any] = {}

        def losses(windows: Tensor, predicted: list[slice]) -> list[float]:
            length, found = windows.shape[1], []
            if length not in opened:
                opened[length] = self._open(length, logits_all=True)
            model = opened[length]
            for window, part in zip(windows, predicted, strict=True):
                model.reset()
                model.eval(window.tolist())
                found.append(loss(torch.from_numpy(model.scores)[None], window, part))
            return found

        return measure_perplexity(origin, config, tokenizer, losses, data, windows, seqlen, tick)


def load(about: dict[str, Any]) -> tuple[LlamaRunner, int]:
    """The model, and what the process held before it came."""
    import llama_cpp  # noqa: F401 - part of what was there before

    before = int(psutil.Process().memory_info().rss)
    runner = LlamaRunner(about)
    known, wanted = runner.model.metadata, about["prompt_tokens"] + about["new_tokens"]
    room = int(known.get(f"{known.get('general.architecture')}.context_length", 0))
    if room and wanted > room:
        raise SympruneError(f"The model has room for {room} tokens, not for {wanted}.")
    return runner, before
