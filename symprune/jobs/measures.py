"""What a bench measures once, whoever runs the model: honest bits per weight and perplexity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symprune import calibration
from symprune.checkpoint.parameter_names import skeleton
from symprune.checkpoint.record import read_record
from symprune.checkpoint.resume import digest
from symprune.engine.text import bos
from symprune.engine.text.bos import Bos, Losses
from symprune.engine.text.tokens import cap_seqlen
from symprune.errors import SympruneError
from symprune.eval.perplexity import cut, summary
from symprune.models import hub
from symprune.models.layout import find_layout
from symprune.runtime.layers import packed_parameters


@dataclass(frozen=True)
class Bits:
    """What the matrices of a model's blocks take in memory, how many weights they have, and what
    kinds of values packed ones have."""

    bits: int
    weights: int
    packed: tuple[str, ...] = ()


def bits_per_weight(model: nn.Module, trusted: bool = False) -> Bits:
    """Of the decoder blocks' matrices, with all that belongs to them: masks, scales, headers."""
    packed = packed_parameters(model)
    config: Any = model.config
    # Which parameters these are is told by their shapes, which a packed model does not show.
    plain = skeleton(config, torch.float32, trusted) if packed else model
    found = {m.parameter_name: m.parameter.numel() for m in find_layout(plain).all_matrices()}
    bits, kinds = 0, set()
    for name in found:
        if name in packed:
            module, leaf = packed[name]
            _, layout = module.blob(leaf)
            bits += layout.bits
            kinds.add(layout.kind)
        else:
            parameter = model.get_parameter(name)
            bits += 8 * parameter.numel() * parameter.element_size()
    return Bits(bits, sum(found.values()), tuple(sorted(kinds)))


def check_room(config: Any, prompt: int, new: int) -> None:
    """Fail where a model has fewer positions than prompt and continuation take."""
    room = hub.max_length(config)
    if room is not None and prompt + new > room:
        raise SympruneError(
            f"The model has room for {room} tokens: a prompt of {prompt} and {new} new ones are "
            "too many."
        )


def measure_perplexity(
    origin: hub.Origin,
    config: Any,
    tokenizer: Any,
    losses: Losses,
    data: str,
    windows: int | None,
    seqlen: int,
    tick: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Perplexity as `symprune eval` has it, and which tokens it is of."""
    seqlen, notes = cap_seqlen(config, seqlen)
    ids = calibration.evaluation_tokens(data, tokenizer)
    found = read_bos(Path(origin.path)) or bos.decide("auto", tokenizer, config, losses)
    rows = cut(ids, seqlen, windows, found.token)
    figures = []
    for number, row in enumerate(rows):
        figures += losses(row[None], [slice(1, None)])
        tick(number + 1, len(rows))
    result = summary(figures, seqlen)
    about = {"data": data, "tokens": digest(rows), **result.to_dict()}
    return {"perplexity": about, "notes": [*notes, *found.notes]}


def read_bos(folder: Path) -> Bos | None:
    """What was decided when the model in a folder was pruned: what was measured on the dense model
    need not come out of the pruned one."""
    record = read_record(folder)
    found = record.get("bos") if record else None
    try:
        return Bos(**found) if found else None
    except TypeError:
        raise SympruneError(f"What the record in {folder} says about BOS makes no sense.") from None
