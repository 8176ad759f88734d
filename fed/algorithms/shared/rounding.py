"""Uploads that are sparse already: their values may be rounded, none may be left out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from symprune.fed.compressors import parse_quantiser
from symprune.fed.protocol import Sent, Turn


def round_values(name: str, w: Tensor, bits: int | Tensor | None, turn: Turn) -> Sent:
    """`w [C, d]` as it is sent through the compressor of this name; `bits` is what a paper counts
    without it, 32 a value."""
    if name == "identity":
        return Sent(w, bits)
    quantiser = parse_quantiser(name)
    values = torch.as_tensor(w.shape[-1] if bits is None else bits // 32).expand(len(w))
    counted = [quantiser.paper_bits(count) for count in values.tolist()]
    return replace(quantiser.sent(w, turn.stream("compress")), bits=torch.tensor(counted))
