"""Which parameters can be packed."""

from __future__ import annotations

import families
import pytest
import torch

from symprune.models.layout import find_layout
from symprune.runtime.packable import BLOCKS, EMBEDDING, HEAD, packable


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "dbrx", "deepseek-v4", "gpt-oss"])
def test_what_is_pruned_can_be_packed_piece_by_piece(family: str) -> None:
    model = families.model(family)
    found = packable(model)
    pieces = {
        name: piece
        for packing in found.values()
        if packing.part == BLOCKS
        for name, piece in zip(
            packing.matrices, packing.pieces(model.get_parameter(packing.name)), strict=True
        )
    }
    expected = {matrix.name: matrix.weight for matrix in find_layout(model).all_matrices()}
    assert pieces.keys() == expected.keys()
    assert all(torch.equal(pieces[name], expected[name]) for name in expected)


def test_a_head_that_is_the_embedding_is_named_once() -> None:
    apart, tied = packable(families.model("llama")), packable(families.model("smollm"))
    assert apart["model.embed_tokens.weight"].part == EMBEDDING
    assert apart["lm_head.weight"].part == HEAD
    assert "lm_head.weight" not in tied
    assert tied["model.embed_tokens.weight"].tied == ("lm_head.weight",)


def test_a_model_without_weights_is_planned_alike() -> None:
    with torch.device("meta"):
        empty = families.model("mixtral")
    assert packable(empty) == packable(families.model("mixtral"))
