"""Packing a model that is in memory, in place: its weights with their zeros, or codes for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.runtime.blob import FLOATS, encode_codes, encode_floats
from symprune.runtime.layers import pack_parameter
from symprune.runtime.packable import BLOCKS, Packing, packable
from symprune.values.grid import OnGrid


def pack_model(
    model: nn.Module, values: Mapping[str, OnGrid] | None = None, *, around: bool = False
) -> None:
    """Pack what can be packed of a model in memory, in place: afterwards it runs from there.

    Args:
        model: A causal LM with its weights; those that are zero are pruned.
        values: The matrices that are on a grid, by name: a report's `values`. A parameter is packed
            as codes if all its matrices are there, else in the type it has.
        around: Whether the embedding and the head are packed too where no values are given.
    """
    given = values or {}
    for name, packing in packable(model).items():
        coded = any(matrix in given for matrix in packing.matrices)
        if not coded and packing.part != BLOCKS and not around:
            continue
        blob = nn.Parameter(_encode(model, packing, given), requires_grad=False)
        for same in (name, *packing.tied):
            path, _, leaf = same.rpartition(".")
            pack_parameter(model.get_submodule(path), leaf, blob, same)
    if hasattr(model, "save_pretrained"):
        from symprune.runtime.hf_quantizer import adopt

        adopt(model)


def _encode(model: nn.Module, packing: Packing, given: Mapping[str, OnGrid]) -> Tensor:
    weight = model.get_parameter(packing.name).detach()
    how = {"transposed": packing.transposed, "stacked": packing.stacked}
    coded = [given[matrix] for matrix in packing.matrices if matrix in given]
    if not coded:
        plain = weight if weight.dtype in FLOATS.values() else weight.to(torch.float32)
        return encode_floats(packing.pieces(plain), **how).to(weight.device)
    if len(coded) < len(packing.matrices):
        raise SympruneError(f"Only some of the matrices of {packing.name} are on a grid.")
    kinds = sorted({each.grid.name for each in coded})
    if len(kinds) > 1:
        raise SympruneError(f"{packing.name} would have values of {' and '.join(kinds)}.")
    pieces = []
    for each, piece in zip(coded, packing.pieces(weight), strict=True):
        keep = (piece != 0) | (each.grid.levels(each.codes) == 0)  # some levels are zero themselves
        pieces.append((each.codes, each.scales, None if keep.all() else keep))
    return encode_codes(pieces, kinds[0], **how).to(weight.device)
