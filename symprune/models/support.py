"""What can be pruned, told from a configuration alone, and which of transformers' classes makes it.

A model is walked block by block: what goes from one block to the next is the hidden states, and
what is measured is how well the next token is predicted. A model of which one of the two is not
true is refused here, in one sentence, before any of its weights is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symprune.errors import SympruneError

REFUSED = {
    "hrm_text": "it runs its blocks more than once in a forward pass, and one set of statistics "
    "does not stand for all of them.",
    "rwkv": "between its blocks it halves the hidden states, and it rescales its own weights when "
    "it is first run, so its blocks cannot be run one by one.",
    "xlnet": "it predicts tokens from both sides, in an order of its own, so it has no perplexity "
    "and no blocks that pass on one hidden state.",
    "zaya": "every block's router goes on from the state of the router before it, so its blocks "
    "cannot be run one by one.",
}
"""Families that transformers counts among the causal language models and that cannot be walked."""


MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 10_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 100_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), 100_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), 10_000_000),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 100_000_000),
    "vocab_size": 1_000_000_000,
}
"""Sizes in a configuration beyond which there is no model, but time and memory without end."""


def check_sizes(plain: Mapping[str, Any]) -> None:
    """Refuse a configuration, as its file has it, with sizes that are none. Nothing is made of it
    before: some sizes are how often a loop goes round."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            check_sizes(value)
            continue
        if name not in MOST or not isinstance(value, int | float):
            continue
        if type(value) is not int or not 0 <= value <= MOST[name]:
            raise SympruneError(f"its {name} is {value}, not from 0 to {MOST[name]:,}.")


def check_supported(config: Any) -> None:
    """Refuse, in a sentence, a configuration whose model cannot be pruned."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
    )

    kind = str(getattr(config, "model_type", ""))
    if any(getattr(part, "is_encoder_decoder", False) for part in (config, _text_part(config))):
        raise SympruneError(
            f"{_name_of(config)} is an encoder-decoder; symprune prunes decoders, which predict "
            "the next token from those before it."
        )
    decodes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in MASKED and not (decodes and kind in CAUSAL):
        raise SympruneError(
            f"{_name_of(config)} is an encoder: it fills in masked tokens and has no perplexity; "
            "symprune prunes decoders, which predict the next token from those before it."
        )
    if kind in REFUSED:
        raise SympruneError(f"{_name_of(config)} cannot be pruned: {REFUSED[kind]}")


def auto_class(config: Any, trust_remote_code: bool = False) -> Any:
    """The class of transformers that makes the whole model: the causal language model or, where
    that is but a part of what the checkpoint holds, the vision-language model around it."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    theirs = getattr(config, "auto_map", None) or {}
    for found in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if trust_remote_code and found.__name__ in theirs:
            return found
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        inner = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "config_class", None)
        if not sees or inner is type(config):
            return AutoModelForCausalLM
    if sees:
        return AutoModelForImageTextToText
    raise SympruneError(
        f"{_name_of(config)} is not a language model that transformers can generate text with."
    )


def _text_part(config: Any) -> Any:
    """The configuration of the language model inside."""
    find = getattr(config, "get_text_config", None)
    return config if find is None else find()


def _name_of(config: Any) -> str:
    """`BertForMaskedLM (bert)`, as a configuration calls its model."""
    names = getattr(config, "architectures", None) or [type(config).__name__]
    return f"{names[0]} ({getattr(config, 'model_type', '')})"
