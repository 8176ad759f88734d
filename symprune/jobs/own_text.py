"""Text that the dense model of a run writes: it is in memory as a whole for that, once in a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.checkpoint.tensor_files import Shards
from symprune.engine import forward
from symprune.engine.text.bos import Bos
from symprune.engine.text.self_written import (
    check_can_write,
    check_room,
    count_unwritten,
    fill_in,
    first_token,
    write_from_nothing,
    write_windows,
)
from symprune.jobs.preparation import Tell
from symprune.jobs.texts import Texts
from symprune.models.hub import Access
from symprune.recipe import Recipe

Open = Callable[[], Any]


def open_whole(shards: Shards, streamed: StreamedModel, dtype: str, access: Access) -> Any:
    """The model that stays on disk, in memory as a whole."""
    check_can_write(streamed.model)
    weights = sum(parameter.numel() for parameter in streamed.model.parameters())
    check_room(weights * streamed.compute.itemsize, streamed.device)
    return StreamedModel(
        shards, streamed.model.config, dtype, streamed.device, access.trust_remote_code,
        streamed.compute,
    ).load_all()  # fmt: skip


def add_own(
    recipe: Recipe,
    open_model: Open,
    tokenizer: Any,
    blocks: StreamedBlocks,
    texts: Texts,
    found: Bos | None,
    tell: Tell,
) -> Texts:
    """The texts as they are calibrated on: windows that the model is to write are written, all
    begin with BOS if they should, and those that go on from others are added."""
    texts = _fill(recipe, open_model, tokenizer, blocks, texts, tell).begin_with(found)
    count, tokens = recipe.self_samples, texts.data
    if count is None or not isinstance(tokens, Tensor):
        return texts

    def write() -> list[list[int]]:
        tell(f"The dense model writes {count} windows")
        model, seed = open_model(), recipe.text_seed
        with forward.ready(model):
            return write_windows(model, tokens, count, seed, texts.bos).tolist()

    return texts.add_written(blocks.once("self-written windows", write))


def _fill(
    recipe: Recipe,
    open_model: Open,
    tokenizer: Any,
    blocks: StreamedBlocks,
    texts: Texts,
    tell: Tell,
) -> Texts:
    """The texts with the windows that the model writes from nothing."""
    tokens, watched = texts.data, texts.watched
    if not isinstance(tokens, Tensor) or not count_unwritten(tokens, watched):
        return texts
    count, length = count_unwritten(tokens, watched), tokens.shape[1]
    first = first_token(tokenizer)

    def write() -> list[list[int]]:
        model = open_model()
        with forward.ready(model):
            written = write_from_nothing(model, first, count, length, recipe.text_seed, tell)
            return written.tolist()

    written = torch.tensor(blocks.once("own windows", write))
    tokens, rest = fill_in(tokens, written)
    watched = None if watched is None else fill_in(watched, rest)[0]
    return replace(texts, data=tokens, watched=watched)
