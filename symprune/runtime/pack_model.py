"""Packing a model that is in memory, in place: its weights with their zeros, or codes for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.runtime.blob import FLOATS, Codes, encode_codes, encode_floats
from symprune.runtime.layers import pack_parameter
from symprune.runtime.packable import BLOCKS, Packing, packable


def pack_model(
    model: nn.Module, codes: Mapping[str, tuple[str, Codes]] | None = None, *, around: bool = False
) -> None:
    """Pack what can be packed of `model`, in place.

    Args:
        model: A causal LM with its weights; pruned ones are zero.
        codes: By the name of a matrix its kind (int8, ...), codes, scales and keep-mask. A
            parameter whose matrices are all there is packed as codes, of one kind.
        around: Whether the embedding and the head are packed as well where no codes are given.
    """
    given = codes or {}
    for name, packing in packable(model).items():
        coded = [given.get(matrix) for matrix in packing.matrices]
        if not any(coded) and packing.part != BLOCKS and not around:
            continue
        blob = nn.Parameter(_encode(model, packing, given), requires_grad=False)
        for same in (name, *packing.tied):
            path, _, leaf = same.rpartition(".")
            pack_parameter(model.get_submodule(path), leaf, blob, same)
    _tell_transformers(model)


def _encode(model: nn.Module, packing: Packing, given: Mapping[str, tuple[str, Codes]]) -> Tensor:
    weight = model.get_parameter(packing.name)
    how = {"transposed": packing.transposed, "stacked": packing.stacked}
    coded = [given[matrix] for matrix in packing.matrices if matrix in given]
    if len(coded) == len(packing.matrices):
        kinds = {kind for kind, _ in coded}
        if len(kinds) > 1:
            raise SympruneError(
                f"{packing.name} would have values of {' and '.join(sorted(kinds))}."
            )
        blob = encode_codes([each for _, each in coded], kinds.pop(), **how)
    elif coded:
        raise SympruneError(f"Only some of the matrices of {packing.name} have codes.")
    else:
        plain = weight.detach()
        if plain.dtype not in FLOATS.values():
            plain = plain.to(torch.float32)
        blob = encode_floats(packing.pieces(plain), **how)
    return blob.to(weight.device)


def _tell_transformers(model: nn.Module) -> None:
    """transformers' own models know that they are packed: for saving, tying and what else asks."""
    if type(model).__module__.startswith("transformers.") or hasattr(model, "save_pretrained"):
        from symprune.runtime.hf_quantizer import adopt

        adopt(model)
