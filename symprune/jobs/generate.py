"""A prompt continued by a model, shown as it comes. What `symprune generate` calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from symprune.checkpoint.load import load_model
from symprune.errors import SympruneError
from symprune.jobs.measures import check_room
from symprune.models import hub

Write = Callable[[str], None]
TEMPERATURES = (0.001, 1000.0)  # beyond these, chances are infinite or all alike


@dataclass(frozen=True)
class Request:
    """What is to be continued, and how. temperature 0: the likeliest token, always."""

    prompt: str
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    chat: bool = False
    device: str = "auto"

    def check(self) -> None:
        if not self.prompt.strip():
            raise SympruneError("The prompt is empty; give --prompt a text to continue.")
        if self.max_new_tokens < 1:
            raise SympruneError(f"--max-new-tokens must be 1 or more, not {self.max_new_tokens}.")
        coldest, hottest = TEMPERATURES
        if self.temperature != 0 and not coldest <= self.temperature <= hottest:
            raise SympruneError(
                f"--temperature must be 0 or from {coldest} to {hottest:g}, not {self.temperature}."
            )


@dataclass(frozen=True)
class Continuation:
    """What came, and how fast. Decoding needs two tokens to be timed."""

    model: str
    text: str
    tokens: int
    first_token_seconds: float
    tokens_per_second: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to continue a prompt."""

    name: str
    model: Any
    tokenizer: Any
    ids: list[int]


def load(
    given: str, request: Request, dtype: str = "auto", access: hub.Access | None = None
) -> Loaded:
    """`MODEL` or `MODEL:TYPE`, and the prompt in its tokens; what can fail cheaply comes first."""
    request.check()
    name, asked = hub.split_dtype(given, dtype)
    hub.check_dtype(asked)
    origin, device = hub.resolve(name, access), hub.pick_device(request.device)
    tokenizer = hub.load_tokenizer(origin)
    ids = encode(tokenizer, request, given)
    if not origin.gguf_file:  # whose configuration takes seconds to read
        check_room(hub.load_config(origin), len(ids), request.max_new_tokens)
    model = load_model(origin, asked, dequantize=False).to(device).eval()
    check_room(model.config, len(ids), request.max_new_tokens)
    return Loaded(given, model, tokenizer, ids)


def encode(tokenizer: Any, request: Request, name: str) -> list[int]:
    """The prompt's tokens; for a chat, as the model was taught to be spoken to."""
    if not request.chat:
        ids: list[int] = tokenizer(request.prompt, verbose=False)["input_ids"]
        return ids
    if not getattr(tokenizer, "chat_template", None):
        raise SympruneError(f"{name} has no chat template; leave --chat out.")
    said = [{"role": "user", "content": request.prompt}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def continue_prompt(
    loaded: Loaded,
    request: Request,
    write: Write = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Continuation:
    """What a loaded model makes of its prompt; `write` gets the text in pieces, as it comes."""
    model, tokenizer = loaded.model, loaded.tokenizer
    row = torch.tensor([loaded.ids], device=model.device)
    ends = model.generation_config.eos_token_id
    drawn: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if request.temperature > 0:
        # The whole distribution at this temperature, whatever the model's makers would cut off.
        drawn = {"do_sample": True, "temperature": request.temperature, "top_p": 1.0, "top_k": 0}
        torch.manual_seed(request.seed)
    streamer = _streamer(tokenizer, write, clock)
    begun = clock()
    model.generate(
        row, attention_mask=torch.ones_like(row), max_new_tokens=request.max_new_tokens,
        pad_token_id=_pad(tokenizer, ends), streamer=streamer, **drawn,
    )  # fmt: skip
    stamps = streamer.stamps
    decoding = stamps[-1] - stamps[0]
    return Continuation(
        loaded.name, "".join(streamer.pieces), len(stamps), stamps[0] - begun,
        (len(stamps) - 1) / decoding if decoding > 0 else None,
    )  # fmt: skip


def _pad(tokenizer: Any, ends: int | list[int] | None) -> int:
    """A token for batches, which there are none of; without one transformers warns."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return int((ends if isinstance(ends, int) else ends[0]) if ends else 0)


def _streamer(tokenizer: Any, write: Write, clock: Callable[[], float]) -> Any:
    from transformers import TextStreamer

    class Timed(TextStreamer):  # type: ignore[misc]
        """Text in whole words as tokens come, and when each came."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.stamps: list[float] = []
            self.pieces: list[str] = []

        def put(self, value: Tensor) -> None:
            if not self.next_tokens_are_prompt:
                self.stamps.append(clock())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                self.pieces.append(text)
                write(text)

    return Timed()
