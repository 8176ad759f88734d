"""A model that PyTorch runs, dense or packed, as a bench measures it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symprune.checkpoint.load import load_model, local_folder
from symprune.checkpoint.packed import weight_files
from symprune.engine.text import bos
from symprune.jobs.measures import bits_per_weight, check_room, measure_perplexity
from symprune.machine import compute, memory
from symprune.models import hub

BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.py")
"""What a model's folder has beside its weights and needs to run."""


class TorchRunner:
    """`worker.Runner` by transformers' own `generate`, as a user calls it."""

    def __init__(self, origin: hub.Origin, dtype: str, device: str) -> None:
        self.origin = origin
        self.model = load_model(origin, dtype, dequantize=False).to(hub.pick_device(device)).eval()
        self.tokenizer = hub.load_tokenizer(origin)
        # A text that ends early could not be timed.
        self.model.generation_config.eos_token_id = None

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        return found

    def generate(self, prompt: list[int], count: int, came: Callable[[], None]) -> None:
        ids = torch.tensor([prompt], device=self.model.device)
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), streamer=_Bell(came), do_sample=False,
            max_new_tokens=count, pad_token_id=0,
        )  # fmt: skip

    def memory(self) -> int:
        memory.return_free_pages()
        return memory.now()

    def finish(
        self, data: str | None, windows: int | None, seqlen: int, tick: Callable[[int, int], None]
    ) -> dict[str, Any]:
        bits = bits_per_weight(self.model, self.origin.access.trust_remote_code)
        found: dict[str, Any] = {
            "dtype": compute.name_of(self.model.dtype),
            "packed": list(bits.packed),
            "bits_per_weight": bits.bits / bits.weights,
            "file_bytes": self._file_bytes(),
        }
        if data is None:
            return found
        return found | measure_perplexity(
            self.origin, self.model.config, self.tokenizer, bos.in_memory(self.model),
            data, windows, seqlen, tick,
        )  # fmt: skip

    def _file_bytes(self) -> int:
        """What the model takes on disk: weights, configuration, tokenizer."""
        if self.origin.gguf_file:
            return Path(str(self.origin)).stat().st_size
        folder = local_folder(self.origin)
        if folder is None:  # weights in another form than safetensors
            folder = Path(self.origin.path)
        files = {folder / name for name in weight_files(folder)} or set(folder.glob("*.bin"))
        files |= {path for pattern in BESIDE for path in folder.glob(pattern)}
        return sum(path.stat().st_size for path in files)


class _Bell:
    """As a streamer of transformers: the prompt comes first, then every token."""

    def __init__(self, came: Callable[[], None]) -> None:
        self.came, self.prompt = came, True

    def put(self, value: Tensor) -> None:
        if not self.prompt:
            self.came()
        self.prompt = False

    def end(self) -> None:
        pass


def load(about: dict[str, Any]) -> tuple[TorchRunner, int]:
    """The model, and what the process held before it came."""
    origin = hub.resolve(about["name"], hub.Access(**about["access"]))
    if not origin.gguf_file:  # whose configuration takes seconds to read
        check_room(hub.load_config(origin), about["prompt_tokens"], about["new_tokens"])
    torch.set_num_threads(about["threads"])
    nn.Linear(8, 8)(torch.ones(1, 8))  # what a first product takes
    before = memory.now()
    runner = TorchRunner(origin, about["dtype"], about["device"])
    check_room(runner.model.config, about["prompt_tokens"], about["new_tokens"])
    return runner, before
