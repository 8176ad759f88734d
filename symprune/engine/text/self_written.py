"""More calibration windows, written by the dense model itself.

What is fitted to few tokens fits these tokens; text that the model goes on writing from the
calibration text's own beginnings shows it more of the states it passes through, and needs no data
(Williams et al., "Self-calibration for language model quantization and pruning", 2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symprune.calibration import begin_with
from symprune.engine import forward
from symprune.errors import SympruneError
from symprune.machine import memory
from symprune.models.layout import device_of
from symprune.recipe import Recipe

BEGINNING = 32  # tokens of calibration text that a window begins with, at most a quarter of it
AT_ONCE = 16  # windows, always: another number would round, and so write, otherwise


def write_windows(
    model: Any, tokens: Tensor, count: int, seed: int, bos: int | None = None
) -> Tensor:
    """`[count, length]` windows that the model, in memory, writes from beginnings found in the
    calibration windows `tokens`, by sampling from its own distribution; a text never ends. bos is
    the token every window begins with, if any."""
    begun = begin_with(choose_beginnings(tokens, count), bos)
    missing = tokens.shape[1] - begun.shape[1]
    device = device_of(model)
    written: list[Tensor] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for some in begun.split(AT_ONCE):
            written.append(_continue(model, some.to(device), missing).cpu())
    return torch.cat(written)


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
        raise SympruneError(f"{type(model).__name__} cannot write text: pass --self-samples 0.")


def check_room(size: int, device: torch.device) -> None:
    """Fail where weights of `size` bytes do not fit into memory as a whole."""
    free = memory.free(device)
    if size > free:
        raise SympruneError(
            f"To write text the model must be in memory as a whole: {size / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free; pass --self-samples 0."
        )
