"""Do recipes hold on models that nobody tuned them for? Small ones of five families, trained here.

    python scripts/small_models.py [--families llama,qwen2] [--recipes balanced,best]
                                   [--amounts 50,2:4] [--folder out/small-models]

A tokenizer and a model of each family learn the calibration text of WikiText-2 for some minutes;
then every recipe prunes it. One table: perplexity on the test text, of which nothing was trained or
calibrated on. Trained models and finished cells are kept.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from frontier import amount_of, pick
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from symprune import calibration
from symprune.cli import console
from symprune.jobs.sweep import Grid, Sweep
from symprune.recipe import Recipe

VOCABULARY, LENGTH, BATCH, RATE, SEED = 4096, 256, 8, 2e-3, 0
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
GATED = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, **GATED),
    "qwen2": Qwen2Config(**COMMON, **GATED),
    "gemma3": Gemma3TextConfig(**COMMON, **GATED, head_dim=32, sliding_window=64),
    "opt": OPTConfig(
        **COMMON, hidden_size=128, word_embed_proj_dim=128, ffn_dim=512, num_hidden_layers=6,
        num_attention_heads=4, dropout=0.0,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=128, n_layer=6, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip


def learn_tokenizer(text: str) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet)
    made.train_from_iterator([text], learn)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def train(config: PretrainedConfig, ids: torch.Tensor, epochs: int) -> Any:
    """A model of this shape after some passes over the text, by Adam along a cosine."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config).float().train()
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    steps = epochs * (len(windows) // BATCH)
    for step in range(steps):
        if step % (len(windows) // BATCH) == 0:
            order = torch.randperm(len(windows)).split(BATCH)
        some = windows[order[step % (len(windows) // BATCH)]]
        share = min((step + 1) / 50, (1 + math.cos(math.pi * step / steps)) / 2)
        for group in adam.param_groups:
            group["lr"] = RATE * share
        loss = model(input_ids=some, labels=some).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    return model.eval()


def load_or_train(family: str, folder: Path, epochs: int, tell: Any) -> tuple[Any, Any]:
    text, place = calibration.text("wikitext2", "train"), folder / family
    if not (place / "config.json").is_file():
        tell(f"Training a small {family}")
        tokenizer = learn_tokenizer(text)
        train(FAMILIES[family], calibration.encode(tokenizer, text), epochs).save_pretrained(place)
        tokenizer.save_pretrained(place)
    return AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)


def main(
    families: Annotated[str, typer.Option(help=", ".join(FAMILIES))] = "all",
    recipes: Annotated[str, typer.Option(help="Recipes that ship.")] = "fast,balanced,best",
    amounts: Annotated[str, typer.Option(help="Percentages and patterns.")] = "50,2:4",
    epochs: Annotated[int, typer.Option(help="Passes over the text in training.")] = 4,
    nsamples: Annotated[int, typer.Option()] = 16,
    eval_windows: Annotated[int, typer.Option()] = 64,
    folder: Annotated[Path, typer.Option()] = Path("out/small-models"),
) -> None:
    """Train small models, prune each by every recipe, and show the perplexities."""
    text = {"calibration": "wikitext2", "nsamples": nsamples, "seqlen": LENGTH}
    names, wanted = pick("family", families, FAMILIES), recipes.split(",")
    console.prepare_libraries()
    table = Table("family", "dense", *(f"{n} {a}" for a in amounts.split(",") for n in wanted))
    for family in names:
        with console.display() as shown:
            model, tokenizer = load_or_train(family, folder, epochs, shown.tell)
            grid = Grid(**text, eval_data="wikitext2", eval_windows=eval_windows)
            job = Sweep(model, tokenizer, family, grid, folder / "results.jsonl")
            cells = [
                Recipe.named(name).with_changes(**amount_of(amount), **text)
                for amount in amounts.split(",")
                for name in wanted
            ]
            results = job.run(shown.watch, shown.watch_eval, shown.begin, cells)
        found = [f"{result['perplexity']:.2f}" for result in results]
        table.add_row(family, f"{results[0]['dense']:.2f}", *found)
    console.out.print(table)


if __name__ == "__main__":
    console.run(lambda: typer.run(main))
