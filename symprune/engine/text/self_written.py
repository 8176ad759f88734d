"""Calibration windows written by the dense model itself: more of them, or all, from nothing.

What is fitted to few tokens fits these tokens; text that the model goes on writing from the
calibration text's own beginnings shows it more of the states it passes through, and needs no data
(Williams et al., "Self-calibration for language model quantization and pruning", 2024).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from symprune.calibration import UNWRITTEN, begin_with
from symprune.engine import forward
from symprune.errors import SympruneError
from symprune.machine import memory
from symprune.models.layout import device_of
from symprune.recipe import Recipe

BEGINNING = 32  # tokens of calibration text that a window begins with, at most a quarter of it
TRIED = 8  # tokens, to say how long the others will take
AT_ONCE = 24  # windows at most, whatever the machine: another number would round otherwise
CACHE = 2**32  # bytes of keys and values at most, but for one window

Tell = Callable[[str], None]


def write_windows(
    model: Any, tokens: Tensor, count: int, seed: int, bos: int | None = None
) -> Tensor:
    """`[count, length]` windows that the model, in memory, writes from beginnings found in the
    calibration windows `tokens`, by sampling from its own distribution; a text never ends. bos is
    the token every window begins with, if any."""
    begun = begin_with(choose_beginnings(tokens, count), bos)
    return _write(model, begun, tokens.shape[1], seed)


def write_from_nothing(
    model: Any, first: int, count: int, length: int, seed: int, tell: Tell = lambda _: None
) -> Tensor:
    """The same with no text at all: each window begins with the token `first`. Said before is how
    long it will take, as the first steps took."""
    check_can_write(model)
    begun = torch.full((count, 1), first)
    at_once = windows_at_once(model, length)
    tried, batches = begun[:at_once], -(-count // at_once)
    if length > TRIED:
        _write(model, tried, TRIED, seed)  # the first call is slower than those that follow
        start = time.perf_counter()
        _write(model, tried, TRIED, seed)
        seconds = (time.perf_counter() - start) * batches * length / TRIED
        about = f", about {seconds / 60:,.0f} min" if seconds > 90 else f", about {seconds:.0f} s"
        tell(f"The dense model writes {count} windows of {length} tokens by itself{about}")
    return _write(model, begun, length, seed)


def _write(model: Any, begun: Tensor, length: int, seed: int) -> Tensor:
    """Windows of `length` tokens that go on from these beginnings, a few at a time."""
    device = device_of(model)
    written: list[Tensor] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for some in begun.split(windows_at_once(model, length)):
            written.append(_continue(model, some.to(device), length - some.shape[1]).cpu())
    return torch.cat(written)


def windows_at_once(model: Any, length: int, dtype: torch.dtype | None = None) -> int:
    """How many windows are written together: as many as have room for their keys and values."""
    return max(1, min(AT_ONCE, CACHE // max(1, size_of_cache(model, length, dtype))))


def size_of_cache(model: Any, length: int, dtype: torch.dtype | None = None) -> int:
    """Bytes of a window's keys and values, as attention in every block would keep them, in the type
    of the model's weights or another."""
    config = model.config.get_text_config()

    def known(name: str, otherwise: int) -> int:
        found = getattr(config, name, None)
        return found if isinstance(found, int) and found > 0 else otherwise

    heads = known("num_attention_heads", 1)
    width = known("head_dim", known("hidden_size", 1) // heads)
    width *= known("num_key_value_heads", heads)
    stored: torch.dtype = dtype or model.get_input_embeddings().weight.dtype
    return 2 * known("num_hidden_layers", 1) * width * length * stored.itemsize


def first_token(tokenizer: Any) -> int:
    """What a text of the model's own begins with: the token of a beginning, else that of an end,
    which stands between texts."""
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int):
            return token
    raise SympruneError(
        "The tokenizer has no token for the beginning or end of a text, which the model's own "
        "windows (self) would begin with; name a text for --calibration."
    )


def count_unwritten(*windows: Tensor | None) -> int:
    """How many windows the model has yet to write."""
    return sum(int(_unwritten(some).sum()) for some in windows if some is not None)


def fill_in(windows: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """The windows, with what the model wrote in the places that wait for it, and what is left."""
    places = _unwritten(windows)
    filled, count = windows.clone(), int(places.sum())
    filled[places] = written[:count]
    return filled, written[count:]


def _unwritten(windows: Tensor) -> Tensor:
    return windows[:, -1] == UNWRITTEN


def write_missing(
    model: Any,
    tokenizer: Any,
    tokens: Tensor,
    held_out: Tensor | None,
    recipe: Recipe,
    tell: Tell = lambda _: None,
) -> tuple[Tensor, Tensor | None]:
    """Calibration and held-out tokens, with the windows that the model in memory is to write."""
    count = count_unwritten(tokens, held_out)
    if not count:
        return tokens, held_out
    first, seed = first_token(tokenizer), recipe.text_seed
    with forward.ready(model):
        written = write_from_nothing(model, first, count, tokens.shape[1], seed, tell)
    tokens, rest = fill_in(tokens, written)
    return tokens, None if held_out is None else fill_in(held_out, rest)[0]


def write_for(model: Any, tokens: Tensor, recipe: Recipe, bos: int | None) -> Tensor:
    """The windows that a recipe has the model in memory write: none, if it says nothing of them."""
    if recipe.self_samples is None:
        return tokens[:0]
    check_can_write(model)
    with forward.ready(model):
        return write_windows(model, tokens, recipe.self_samples, recipe.text_seed, bos)


def choose_beginnings(tokens: Tensor, count: int) -> Tensor:
    """The beginnings of `count` windows: places of all windows in turn, as far apart as can be."""
    samples, length = tokens.shape
    size = max(1, min(BEGINNING, length // 4))
    turns = -(-count // samples)
    starts = [turn * (length - size) // turns for turn in range(turns)]
    return torch.cat([tokens[:, start : start + size] for start in starts])[:count]


def _continue(model: Any, begun: Tensor, missing: int) -> Tensor:
    """The windows with as many tokens more as are missing, drawn one after the other."""
    if not missing:
        return begun
    from transformers import GenerationConfig

    plain = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
        min_new_tokens=missing, max_new_tokens=missing, pad_token_id=0,
    )  # fmt: skip
    found: Tensor = model.generate(
        begun, attention_mask=torch.ones_like(begun), generation_config=plain
    )
    return found


def check_can_write(model: Any) -> None:
    """Fail before any work where the model cannot write."""
    if not getattr(model, "can_generate", lambda: False)():
        raise SympruneError(
            f"{type(model).__name__} cannot write text: pass --self-samples 0 and a "
            "--calibration of other text than its own."
        )


def check_room(size: int, device: torch.device) -> None:
    """Fail where weights of `size` bytes do not fit into memory as a whole."""
    free = memory.free(device)
    if size > free:
        raise SympruneError(
            f"To write text the model must be in memory as a whole: {size / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free; pass --self-samples 0 and a --calibration of other "
            "text than its own."
        )
