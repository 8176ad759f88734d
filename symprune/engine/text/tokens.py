"""The tokens a run calibrates on, and how long they may be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from symprune.allocate.search import CANDIDATES, Search, split_windows
from symprune.calibration import begin_with, calibration_tokens, held_out_tokens
from symprune.engine.text import bos
from symprune.engine.text.bos import Bos
from symprune.engine.text.self_written import Tell, write_missing
from symprune.errors import SympruneError
from symprune.machine import host
from symprune.models.hub import max_length
from symprune.recipe import Recipe
from symprune.stats import Needs


def read_tokens(
    model: nn.Module,
    data: Any,
    held_out: Tensor | None,
    recipe: Recipe,
    needs: Needs,
    tell: Tell = lambda _: None,
) -> tuple[Tensor, Tensor | None, list[str], Bos | None]:
    """The tokens to calibrate on and those that watch, what the user should know of them, and what
    was decided about BOS. data is a tokenizer, or calibration tokens to take as they are."""
    if isinstance(data, Tensor):
        check_tokens(data, model)
        if held_out is not None and held_out.shape[1:] != data.shape[1:]:
            raise SympruneError("Held-out tokens must be as long as the calibration tokens.")
        return data, held_out, [], None
    if not callable(data) and (data is not None or reads_text(recipe, needs)):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise SympruneError(
            "The data to calibrate on is a tokenizer or a [samples, length] tensor of token ids, "
            f"not {kind}."
        )
    if not reads_text(recipe, needs):
        return torch.zeros((0, recipe.seqlen), dtype=torch.long), None, [], None
    seqlen, notes = cap_seqlen(model.config, recipe.seqlen)
    tokens, held_out = draw_tokens(data, recipe, needs, seqlen)
    tokens, held_out = write_missing(model, data, tokens, held_out, recipe, tell)
    found = bos.decide(recipe.bos, data, model.config, bos.in_memory(model))
    tokens = begin_with(tokens, found.token)
    held_out = None if held_out is None else begin_with(held_out, found.token)
    return tokens, held_out, [*notes, *found.notes], found


def check_tokens(tokens: Tensor, model: nn.Module) -> None:
    """Fail where tokens are no ids of the model's vocabulary: an accelerator would not say why."""
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise SympruneError("Calibration tokens must be a filled [samples, length] tensor.")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool:
        raise SympruneError(f"Calibration tokens must be whole numbers, not {tokens.dtype}.")
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
    lowest, highest = (int(value) for value in host.bring([tokens.min(), tokens.max()]))
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise SympruneError(
            f"Calibration token {wrong} is not in the model's vocabulary of {vocabulary:,}."
        )


def reads_text(recipe: Recipe, needs: Needs) -> bool:
    """Whether calibration text has a say: in the masks, in how much each layer gives, or in what
    the kept weights become, or in which experts go."""
    measured = recipe.allocation is not None and recipe.allocation.needs
    fitted = recipe.reconstruction is not None or recipe.experts is not None
    return bool(needs or measured) or fitted


def draw_tokens(
    tokenizer: Any, recipe: Recipe, needs: Needs, seqlen: int
) -> tuple[Tensor, Tensor | None]:
    """The recipe's calibration tokens and, for a step that fits them, others to watch it on; the
    last of these are those that allocations are tried on. The model's own are yet to be written."""
    settings = (recipe.calibration, tokenizer, recipe.nsamples, seqlen, recipe.text_seed)
    tokens, tried = calibration_tokens(*settings, own=True), windows_to_try(recipe)
    watched = needs.gram or recipe.reconstruction is not None or tried
    return tokens, held_out_tokens(*settings, tried) if watched else None


def windows_to_try(recipe: Recipe) -> int:
    """How many windows allocations are tried on."""
    return recipe.allocation.windows if isinstance(recipe.allocation, Search) else 0


def tries(recipe: Recipe) -> list[tuple[int, int]]:
    """How many windows are tried on, and how many allocations, in one round after the other."""
    windows = windows_to_try(recipe)
    parts = split_windows(torch.empty(windows)) if windows else ()
    return [(len(part), count) for part, count in zip(parts, CANDIDATES, strict=False)]


def take_windows(
    recipe: Recipe, tokens: Tensor, held_out: Tensor | None
) -> tuple[Tensor, Tensor | None, list[str]]:
    """What allocations are tried on, the held-out tokens that watch, and what the user should know
    of it. Where there are too few for both, all do both; where there are none, calibration tokens
    are tried on."""
    wanted = windows_to_try(recipe)
    if not wanted:
        return tokens[:0], held_out, []
    if held_out is None:
        windows = tokens[-wanted:]
        note = f"Without held-out text, allocations were tried on {len(windows)} of the calibration"
        return windows, None, [f"{note} windows."]
    if len(held_out) <= wanted:
        return held_out, held_out, []
    return held_out[-wanted:], held_out[:-wanted], []


def cap_seqlen(config: Any, seqlen: int) -> tuple[int, list[str]]:
    """The sequence length the model can take, and a note when that is less than was asked for."""
    limit = max_length(config)
    if limit is None or seqlen <= limit:
        return seqlen, []
    return limit, [f"The model supports {limit} positions: seqlen is {limit}, not {seqlen}."]
