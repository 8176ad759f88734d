"""A language model small enough for an example: random weights, random tokens, no download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 96


def tiny_model(seed: int = 0) -> Any:
    """A LLaMA of two blocks and 32 channels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokens(samples: int = 8, length: int = 32, seed: int = 0) -> Tensor:
    """Calibration tokens, `[samples, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (samples, length), generator=generator)
