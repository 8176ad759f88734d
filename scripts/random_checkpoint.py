"""Checkpoints of any size with random weights, written one tensor at a time.

    python scripts/random_checkpoint.py FOLDER

writes a LLaMA of the shape of TinyLlama: 1.1 billion weights, 2.2 GB.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from symprune.checkpoint.tensor_files import INDEX, OutputFile, make_header

SHARD = 5 * 10**9
POOL = 2**22
DTYPE = torch.bfloat16


def config(
    hidden_size: int,
    intermediate_size: int,
    heads: int,
    blocks: int,
    vocab: int,
    key_value_heads: int | None = None,
) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads or heads,
        "num_hidden_layers": blocks,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def tiny_llama() -> dict:
    """TinyLlama's shape."""
    return config(2048, 5632, 32, 22, 32000, key_value_heads=4)


def tensors(about: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of a LLaMA checkpoint."""
    width, inner, vocab = (about[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    yield "model.embed_tokens.weight", (vocab, width)
    for block in range(about["num_hidden_layers"]):
        at = f"model.layers.{block}"
        narrow = width // about["num_attention_heads"] * about["num_key_value_heads"]
        for name, rows in (("q", width), ("k", narrow), ("v", narrow), ("o", width)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, width)
        yield f"{at}.mlp.gate_proj.weight", (inner, width)
        yield f"{at}.mlp.up_proj.weight", (inner, width)
        yield f"{at}.mlp.down_proj.weight", (width, inner)
        yield f"{at}.input_layernorm.weight", (width,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocab, width)


def make_checkpoint(folder: Path, about: dict) -> None:
    """Random weights, one tensor in memory at a time."""
    folder.mkdir(parents=True)
    shards: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    room = SHARD
    for name, shape in tensors(about):
        size = math.prod(shape) * DTYPE.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD
        shards[-1].append((name, DTYPE, shape))
        room -= size
    generator, places, total = torch.Generator().manual_seed(0), {}, 0
    pool = (0.02 * torch.randn(POOL, generator=generator)).to(DTYPE)
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        file = OutputFile(folder / name, make_header(shard, {"format": "pt"}))
        file.create()
        for tensor, _, shape in shard:
            file.write(tensor, random_weight(shape, pool, generator))
            places[tensor] = name
            total += math.prod(shape) * DTYPE.itemsize
        file.sync()
        file.close()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(about))


def random_weight(shape: tuple[int, ...], pool: Tensor, generator: torch.Generator) -> Tensor:
    """Ones for a norm; else normal numbers from the pool, in pieces that begin at random places."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=DTYPE)
    weight = torch.empty(math.prod(shape), dtype=DTYPE)
    for start in range(0, len(weight), POOL // 2):
        piece = weight[start : start + POOL // 2]
        begin = int(torch.randint(POOL - len(piece) + 1, (), generator=generator))
        piece.copy_(pool[begin : begin + len(piece)])
    return weight.view(shape)


def make_tokenizer(folder: Path) -> None:
    """A small byte-pair tokenizer; which tokens there are plays no part here."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, show_progress=False)
    made.train_from_iterator([topics["lambda"], topics["if"], topics["while"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")
    fast.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    make_checkpoint(parser.parse_args().folder, tiny_llama())
