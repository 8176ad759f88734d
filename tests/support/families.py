"""Tiny random models of every family, small enough to prune in a moment."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

VOCABULARY = 96
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITH_HEAD_DIM = {**SMALL, "head_dim": 8}
NO_KV = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}


def config(family: str) -> Any:
    """The configuration of a tiny model of `family`."""
    makers = {
        "llama": lambda: hf.LlamaConfig(**SMALL),
        "smollm": lambda: hf.LlamaConfig(**SMALL, tie_word_embeddings=True),
        "mistral": lambda: hf.MistralConfig(**WITH_HEAD_DIM, sliding_window=8),
        "qwen2": lambda: hf.Qwen2Config(**SMALL),
        "qwen3": lambda: hf.Qwen3Config(**WITH_HEAD_DIM),
        "gemma2": lambda: hf.Gemma2Config(**WITH_HEAD_DIM, sliding_window=8),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **WITH_HEAD_DIM,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "phi3": lambda: hf.Phi3Config(**SMALL),
        "opt": lambda: hf.OPTConfig(
            **{k: v for k, v in NO_KV.items() if k != "intermediate_size"},
            ffn_dim=48,
            word_embed_proj_dim=32,
        ),
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64
        ),
        "gpt-neox": lambda: hf.GPTNeoXConfig(**NO_KV),
        "bloom": lambda: hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        "falcon": lambda: hf.FalconConfig(**NO_KV),
        "stablelm": lambda: hf.StableLmConfig(**SMALL),
        "mixtral": lambda: hf.MixtralConfig(
            **SMALL, num_local_experts=4, num_experts_per_tok=2, head_dim=8
        ),
        "qwen3-moe": lambda: hf.Qwen3MoeConfig(
            **WITH_HEAD_DIM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
    }
    return makers[family]()


FAMILIES = (
    "llama", "smollm", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "opt", "gpt2",
    "gpt-neox", "bloom", "falcon", "stablelm", "mixtral", "qwen3-moe",
)  # fmt: skip


def model(family: str = "llama", seed: int = 0) -> Any:
    """A model of random weights."""
    torch.manual_seed(seed)
    return hf.AutoModelForCausalLM.from_config(config(family)).eval()


def tokens(samples: int = 4, length: int = 16, seed: int = 0) -> torch.Tensor:
    """Random calibration tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (samples, length), generator=generator)


def tokenizer(begins: bool = False) -> Any:
    """A byte-pair tokenizer of the models' vocabulary, trained on a little text in a moment; with
    `begins`, one that puts BOS before every text."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    made.train_from_iterator([topics["lambda"], topics["if"], topics["while"]], trainer)
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
