"""A LLaMA checkpoint as GGUF files of the types llama.cpp is known for, to measure it against.

The tokenizer is left behind: a token for every byte, and names for the rest. What a prompt's tokens
are plays no part in how fast they are read.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
from torch import Tensor

from symprune.checkpoint.tensor_files import Shards

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
AROUND = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def make_gguf(folder: Path, types: dict[str, Path]) -> None:
    """Write the checkpoint in `folder` in each type (`Q8_0`, `Q4_0`, ...) to its file."""
    import llama_cpp

    @llama_cpp.llama_log_callback
    def say_nothing(*_: object) -> None:
        pass

    llama_cpp.llama_log_set(say_nothing, ctypes.c_void_p(0))
    half = folder / "half.gguf"
    _write_half(folder, half)
    for name, path in types.items():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        source, output = str(half).encode(), str(path).encode()
        if llama_cpp.llama_model_quantize(source, output, ctypes.byref(settings)):
            raise SystemExit(f"llama.cpp could not write {path}.")
    half.unlink()


def _write_half(folder: Path, path: Path) -> None:
    from gguf import GGUFWriter, TokenType

    about = json.loads((folder / "config.json").read_text())
    heads, vocab = about["num_attention_heads"], about["vocab_size"]
    writer = GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_context_length(about["max_position_embeddings"])
    writer.add_embedding_length(about["hidden_size"])
    writer.add_block_count(about["num_hidden_layers"])
    writer.add_feed_forward_length(about["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(about["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(about["rms_norm_eps"])
    writer.add_rope_dimension_count(about["hidden_size"] // heads)
    writer.add_vocab_size(vocab)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    named = vocab - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"[{number}]" for number in range(named))])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * named])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shards = Shards(folder)
    for name in shards.entries:
        weight = shards.read(name)
        if ".q_proj." in name or ".k_proj." in name:
            weight = _turn_pairs(weight, about["hidden_size"] // heads)
        dtype = np.float32 if weight.dim() == 1 else np.float16
        writer.add_tensor(_name(name), weight.float().numpy().astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    if name in AROUND:
        return AROUND[name]
    _, _, block, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{block}.{NAMES[module]}.weight"


def _turn_pairs(weight: Tensor, width: int) -> Tensor:
    """A head's rows as llama.cpp turns them: the two of a pair side by side."""
    rows, columns = weight.shape
    pairs = weight.view(rows // width, 2, width // 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()
