"""The owners of `language_model.py` as code of their own: a pruned model and a few windows of text
each, for `fed run` (all in one process) and `fed deploy` (each on a node of Flower).

    export BASE=base SYMPRUNE_ASSETS=...    # base: the folder of the pruned model
    own=scripts/fed/language_model_owners.py
    symprune fed deploy --algorithm fedavg --masks base --model $own:last_blocks --clients 3 \
        --data $own:everyone --split user --own-data $own:wikitext --own-data $own:ptb \
        --own-data $own:python --l2 0 --set gamma=0.1 --set p=0.5 --set batch=1 --set clip=1 \
        --rounds 2 --folder out
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from language_model import OWNERS, Sizes, windows
from torch import nn

from symprune import MaskSet
from symprune.fed import Dataset, add_lora, text_data

TRAINED = 2  # blocks at the end of the model: a message is then 14 MB, not 212


@cache
def sizes() -> Sizes:
    """Two short windows of each text."""
    return Sizes(Path(os.environ["BASE"]), windows=2, tests=1, length=64, rounds=2, steps=2)


def base() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(sizes().base, dtype=torch.float32)


def last_blocks() -> nn.Module:
    """The pruned model, of which the matrices of the last blocks are trained."""
    model = base()
    last = model.config.num_hidden_layers - TRAINED
    trained = tuple(f"model.layers.{block}." for block in range(last, last + TRAINED))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained) and parameter.dim() == 2)
    return model


def adapters() -> nn.Module:
    """The pruned model with LoRA adapters, which alone are trained."""
    return add_lora(base(), MaskSet.load(sizes().base), rank=8)


def wikitext() -> Dataset:
    return _text("wikitext")


def ptb() -> Dataset:
    return _text("ptb")


def python() -> Dataset:
    return _text("python")


def everyone() -> Dataset:
    """All owners' text, for the run in one process that a deployment is compared with."""
    return _text(*OWNERS)


def _text(*owners: str) -> Dataset:
    train, test = (
        [windows(owner, split, count, sizes()) for owner in owners]
        for split, count in (("train", sizes().windows), ("test", sizes().tests))
    )
    return text_data(train, length=sizes().length, test=torch.cat(test))
