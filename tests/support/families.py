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
FOUR = {**SMALL, "num_hidden_layers": 4}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
SHARED_KV = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2,
}


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


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
        "olmoe": lambda: hf.OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
    }
    return (makers | _UNUSUAL)[family]()


# Families that differ in more than names: what passes between blocks, what a matrix is, who routes.
_UNUSUAL: dict[str, Any] = {
    # every layer is given something of the sample, and later layers read what earlier ones left
    "gemma4": lambda: hf.Gemma4TextConfig(
        **{**FOUR, "head_dim": 8}, **SHARED_KV, global_head_dim=8
    ),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **{**FOUR, "head_dim": 8},
        **SHARED_KV,
        laurel_rank=8,
        activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0],
    ),
    "zamba2": lambda: hf.Zamba2Config(
        **_without(FOUR, "max_position_embeddings"),
        mamba_d_state=8,
        mamba_headdim=8,
        mamba_ngroups=1,
        n_mamba_heads=8,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_mem_blocks=1,
        adapter_rank=4,
        chunk_size=8,
    ),
    "deepseek-v4": lambda: hf.DeepseekV4Config(
        **_without(WITH_HEAD_DIM, "intermediate_size", "num_key_value_heads"),
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        qk_rope_head_dim=4,
        sliding_window=8,
        hc_mult=2,
    ),
    # convolutions beside the matrices
    "mamba": lambda: hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8
    ),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=8,
    ),
    "jamba": lambda: hf.JambaConfig(
        **FOUR,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "falcon-h1": lambda: hf.FalconH1Config(**WITH_HEAD_DIM, mamba_d_ssm=64, **MAMBA2),
    "granite-hybrid": lambda: hf.GraniteMoeHybridConfig(
        **SMALL,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
        **MAMBA2,
    ),
    "nemotron-h": lambda: hf.NemotronHConfig(
        **{**FOUR, "head_dim": 8},
        hybrid_override_pattern="M*-E",
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
    "qwen3-next": lambda: hf.Qwen3NextConfig(
        **WITH_HEAD_DIM, **MOE, shared_expert_intermediate_size=16, **LINEAR_ATTENTION
    ),
    "qwen3.5": lambda: hf.Qwen3_5TextConfig(**WITH_HEAD_DIM, **LINEAR_ATTENTION),
    "kimi-linear": lambda: hf.KimiLinearConfig(
        **WITH_HEAD_DIM,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        **{**LATENT, "q_lora_rank": None},
        first_k_dense_replace=1,
        linear_num_heads=4,
        linear_head_dim=8,
    ),
    "lfm2": lambda: hf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    "recurrent-gemma": lambda: hf.RecurrentGemmaConfig(
        **_without({**SMALL, "num_hidden_layers": 3}, "max_position_embeddings"),
        lru_width=32,
        block_types=["recurrent", "recurrent", "attention"],
        attention_window_size=16,
    ),
    # experts stored another way, routers called something else
    "llama4": lambda: hf.Llama4TextConfig(
        **WITH_HEAD_DIM,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
    ),
    "gpt-oss": lambda: hf.GptOssConfig(
        **WITH_HEAD_DIM, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "dbrx": lambda: hf.DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        vocab_size=VOCABULARY,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    ),
    "hunyuan-moe": lambda: hf.HunYuanMoEV1Config(**WITH_HEAD_DIM, num_experts=4, moe_topk=2),
    "jetmoe": lambda: hf.JetMoeConfig(
        **_without(SMALL, "num_attention_heads"),
        kv_channels=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "longcat": lambda: hf.LongcatFlashConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_hidden_layers=4,
        num_attention_heads=4,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        **{**LATENT, "qk_rope_head_dim": 8},
        head_dim=8,
        max_position_embeddings=64,
    ),
    "deepseek-v3": lambda: hf.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        **LATENT,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}
UNUSUAL = tuple(_UNUSUAL)
_PICTURES = {"image_size": 16, "patch_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
_QWEN_VL = {
    **SMALL,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}


def looking(family: str, seed: int = 0) -> Any:
    """A tiny model that reads pictures beside text."""
    vision: dict[str, Any]
    if family == "llava":
        vision = {**_PICTURES, "hidden_size": 64, "intermediate_size": 256, "projection_dim": 32}
        made: Any = hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**vision),
            text_config=hf.LlamaConfig(**SMALL),
            image_token_index=95,
        )
    elif family == "gemma3":
        vision = {**_PICTURES, "hidden_size": 64, "intermediate_size": 256}
        text = {**WITH_HEAD_DIM, "sliding_window": 8}
        made = hf.Gemma3Config(
            text_config=hf.Gemma3TextConfig(
                **text, layer_types=["sliding_attention", "full_attention"]
            ),
            vision_config=hf.SiglipVisionConfig(**vision),
            mm_tokens_per_image=4,
            image_token_index=95,
        )
    else:
        kind = {"qwen2-vl": hf.Qwen2VLConfig, "qwen2.5-vl": hf.Qwen2_5_VLConfig}[family]
        vision = {"depth": 6, "num_heads": 4, "patch_size": 8}
        vision |= {"embed_dim": 64, "hidden_size": 32} if family == "qwen2-vl" else {
            "hidden_size": 64, "intermediate_size": 256, "out_hidden_size": 32,
        }  # fmt: skip
        made = kind(
            text_config=_QWEN_VL, vision_config=vision, image_token_id=95, video_token_id=94,
            vision_start_token_id=93, vision_end_token_id=92,
        )  # fmt: skip
    torch.manual_seed(seed)
    return hf.AutoModelForImageTextToText.from_config(made).eval()


LOOKING = ("llava", "gemma3", "qwen2-vl", "qwen2.5-vl")
FAMILIES = (
    "llama", "smollm", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "opt", "gpt2",
    "gpt-neox", "bloom", "falcon", "stablelm", "mixtral", "qwen3-moe",
)  # fmt: skip


def model(family: str = "llama", seed: int = 0) -> Any:
    """A model of random weights."""
    torch.manual_seed(seed)
    made = hf.AutoModelForCausalLM.from_config(config(family)).eval()
    for name, buffer in made.named_buffers():
        if name.endswith("tid2eid"):  # which experts a token is for, whatever its state
            first = torch.arange(len(buffer)) % 4
            buffer.copy_(torch.stack([first, (first + 1 + first // 2) % 4], 1))
    return made


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
