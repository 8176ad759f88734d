"""Adapters that were trained on a pruned model, merged into it: a checkpoint with its zeros.

A run's `model.safetensors` has the adapters alone, by peft's names, and says their alpha.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from symprune.card.base import LICENCE_FILES
from symprune.checkpoint.load import load_with_tokenizer
from symprune.checkpoint.output_folder import check_output, whole_folder
from symprune.errors import SympruneError, check
from symprune.fed.problems.models.lora import ADAPTER, ALPHA, PREFIX, add_lora, merge_lora
from symprune.maskset import MaskSet

FILE = "model.safetensors"  # of a run's or a deployment's folder
NAME = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.{ADAPTER}\.weight")


@dataclass(frozen=True)
class Adapters:
    """The tensors by name, the layers they are for, and how they are used."""

    tensors: dict[str, Tensor]
    layers: tuple[str, ...]
    rank: int
    alpha: float


def read_adapters(place: Path, alpha: float | None = None) -> Adapters:
    """The adapters of a run's file, or of the folder it is in. alpha: where the file does not say
    it, as one that was written by hand."""
    file = place / FILE if place.is_dir() else place
    check(file.is_file(), f"There are no adapters at {file}.")
    try:
        with safe_open(file, "pt") as opened:
            told = (opened.metadata() or {}).get(ALPHA)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        known = None if told is None else float(told)
    except (SafetensorError, OSError, ValueError) as error:
        raise SympruneError(f"The adapters {file} cannot be read: {error}.") from None
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = NAME.fullmatch(name)
        check(found is not None, f"{file} is no file of LoRA adapters: it has a tensor {name}.")
        assert found is not None
        whole = tensor.dim() == 2 and tensor.is_floating_point()
        check(whole and bool(torch.isfinite(tensor).all()), f"{name} is no matrix of numbers.")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    check(bool(pairs), f"{file} holds no adapters.")
    ranks = set()
    for layer, pair in pairs.items():
        check(len(pair) == 2, f"{file} has one half of the adapter of {layer}.")
        check(len(pair["A"]) == pair["B"].shape[1], f"A and B of {layer} do not fit each other.")
        ranks.add(len(pair["A"]))
    check(len(ranks) == 1, f"The adapters in {file} have the ranks {sorted(ranks)}, not one.")
    used = alpha if known is None else known
    check(used is not None, f"{file} does not say the adapters' alpha: give it.")
    assert used is not None
    same = alpha is None or alpha == used
    check(same, f"The adapters were trained with alpha = {used:g}, not {alpha or 0:g}.")
    return Adapters(tensors, tuple(pairs), ranks.pop(), used)


def merge_into_folder(
    model: str, adapters: Adapters, output: Path, masks: str | Path | None = None
) -> MaskSet:
    """Write the model with the adapters merged in, `W + mask * (alpha/rank B A)`, its tokenizer and
    its masks, whole or not at all; the masks.

    model: a pruned model, as for `symprune prune`. masks: where they are not in its folder."""
    check_output(output, force=False, reads=[model])
    kept = MaskSet.load(model if masks is None else masks)
    base, tokenizer = load_with_tokenizer(model, device="cpu")
    known = dict(base.named_modules())
    for layer in adapters.layers:
        check(layer in known, f"{model} has no layer {layer}: the adapters are another model's.")
    # Names as they are, not endings of names: peft takes a text for a pattern of the whole name.
    exact = "|".join(re.escape(layer) for layer in adapters.layers)
    adapted = add_lora(base, kept, rank=adapters.rank, alpha=adapters.alpha, targets=exact)
    own = dict(adapted.named_parameters())
    for name, tensor in adapters.tensors.items():
        sizes = (tuple(tensor.shape), tuple(own[name].shape))
        check(sizes[0] == sizes[1], f"{name} is {sizes[0]}, in {model} it must be {sizes[1]}.")
    merged = merge_lora(adapted, adapters.tensors)
    with whole_folder(output) as work:
        merged.save_pretrained(work)
        tokenizer.save_pretrained(work)
        kept.save(work)
        for licence in filter(Path.is_file, (Path(model) / name for name in LICENCE_FILES)):
            shutil.copyfile(licence, work / licence.name)
    return kept
