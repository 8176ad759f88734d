"""The same prompts continued by several models: what a perplexity means, in words.

Always the likeliest token, so that equal models write equal text. A model writes as a whole, in
memory; one that takes too much of it is not asked, and the reason is told instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import torch

from symprune.checkpoint.streamed_model import Source, StreamedModel
from symprune.engine import forward
from symprune.errors import SympruneError
from symprune.machine import memory
from symprune.models import hub
from symprune.models.layout import device_of

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "def add(a, b):\n    return",
)
NEW_TOKENS = 32
MOST_PROMPTS = 16
MOST_CHARACTERS = 4000
ROOM = 2  # times what the weights take must be free


@dataclass(frozen=True)
class Continuation:
    """What a model wrote behind a prompt, as tokens and as text."""

    tokens: list[int]
    text: str


def check_prompts(prompts: Sequence[str]) -> None:
    """Fail before any work where a prompt cannot be continued."""
    if len(prompts) > MOST_PROMPTS:
        raise SympruneError(f"{len(prompts)} prompts are too many: at most {MOST_PROMPTS}.")
    for prompt in prompts:
        if not prompt.strip():
            raise SympruneError("A prompt is empty; give --prompt a text to continue.")
        if len(prompt) > MOST_CHARACTERS:
            raise SympruneError(
                f"The prompt {prompt[:40]!r}... has {len(prompt):,} characters; at most "
                f"{MOST_CHARACTERS:,}."
            )
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise SympruneError(f"The prompt {prompt[:40]!r} is not text.") from None


def fitting(prompts: tuple[str, ...], tokenizer: Any, config: Any) -> tuple[str, ...]:
    """The prompts: a user's must all fit the model; of the built-in ones, those that do stay."""
    if prompts != PROMPTS:
        for prompt in prompts:
            encode(tokenizer, prompt, config)
        return prompts
    kept = []
    for prompt in prompts:
        with suppress(SympruneError):
            encode(tokenizer, prompt, config)
            kept.append(prompt)
    return tuple(kept)


def encode(tokenizer: Any, prompt: str, config: Any, bos: int | None = None) -> list[int]:
    """A prompt's tokens; bos stands in front of them where windows of text begin with it."""
    ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
    if bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    room = hub.max_length(config)
    if not ids:
        raise SympruneError(f"The tokenizer makes nothing of the prompt {prompt[:40]!r}.")
    if room is not None and len(ids) + NEW_TOKENS > room:
        raise SympruneError(
            f"The model has room for {room} tokens: the prompt {prompt[:40]!r} has {len(ids)}, and "
            f"{NEW_TOKENS} are to follow."
        )
    return ids


def why_not(model: Any, size: int, device: torch.device) -> str | None:
    """Why a model whose weights take `size` bytes is not asked to write; None if it is."""
    if not getattr(model, "can_generate", lambda: False)():
        return f"{type(model).__name__} cannot write text."
    return lacks_room(size, device)


def lacks_room(size: int, device: torch.device) -> str | None:
    """The sentence for weights of `size` bytes that are too many; None if they are not."""
    free = memory.free(device)
    if ROOM * size > free:
        return (
            f"to write, a model must be in memory as a whole: its weights take {size / 1e9:.1f} GB "
            f"of the {free / 1e9:.1f} GB that are free."
        )
    return None


def continue_prompts(
    model: Any, tokenizer: Any, prompts: Iterable[str], bos: int | None = None
) -> list[Continuation]:
    """What a model in memory makes of each prompt."""
    with forward.ready(model):
        return [
            _continue(model, tokenizer, encode(tokenizer, prompt, model.config, bos))
            for prompt in prompts
        ]


def _continue(model: Any, tokenizer: Any, ids: list[int]) -> Continuation:
    """The likeliest tokens, whatever settings the model's makers ship."""
    from transformers import GenerationConfig

    ends = tokenizer.eos_token_id
    plain = GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, repetition_penalty=1.0, eos_token_id=ends,
        pad_token_id=0 if ends is None else ends,
    )  # fmt: skip
    row = torch.tensor([ids], device=device_of(model))
    found = model.generate(row, attention_mask=torch.ones_like(row), generation_config=plain)
    tokens = found[0, len(ids) :].tolist()
    return Continuation(tokens, tokenizer.decode(tokens, skip_special_tokens=True))


def put_together(
    prompts: Sequence[str], written: Mapping[str, Sequence[Continuation]]
) -> list[dict[str, Any]]:
    """What each model, by its name, wrote behind each prompt, as a record has it; with how many
    tokens in a row, from the first on, it wrote as the first model did."""
    names = list(written)
    samples = []
    for number, prompt in enumerate(prompts):
        first = written[names[0]][number].tokens
        entries = []
        for name in names:
            mine = written[name][number]
            pairs = zip(first, mine.tokens, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            entry = {"by": name, "text": mine.text, "tokens": len(mine.tokens), "same": same}
            entries.append(entry)
        samples.append({"prompt": prompt, "continuations": entries})
    return samples


class Asked(Protocol):
    """A job that is to show samples."""

    @property
    def dtype(self) -> str: ...
    @property
    def access(self) -> hub.Access: ...


def of_run(
    job: Asked,
    prompts: tuple[str, ...],
    streamed: StreamedModel,
    sources: Mapping[str, tuple[Source, Any]],
    tokenizer: Any,
    bos: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """What a model with the weights and the configuration of each source makes of the prompts, and
    notes. It is in memory as a whole while it writes. Where it cannot there are no samples: nothing
    hangs on them."""
    if not prompts:
        return [], ["No prompts were continued: the model has too few positions for them."]
    written: dict[str, Sequence[Continuation]] = {}
    weights = sum(parameter.numel() for parameter in streamed.model.parameters())
    for name, (source, config) in sources.items():
        reason = why_not(streamed.model, weights * streamed.compute.itemsize, streamed.device)
        if reason is not None:
            return [], [f"No prompts were continued: {reason}"]
        tell(f"Continuing {len(prompts)} prompts with the {name} model")
        try:
            whole = StreamedModel(
                source, config, job.dtype, streamed.device,
                job.access.trust_remote_code, streamed.compute,
            )  # fmt: skip
            written[name] = continue_prompts(whole.load_all(), tokenizer, prompts, bos)
        except Exception as error:  # of code that comes with a model, whatever it may be
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            return [], [f"No prompts were continued: the {name} model cannot: {why}"]
        del whole
        memory.return_free_pages()
    return put_together(prompts, written), []
