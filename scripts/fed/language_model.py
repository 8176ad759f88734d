"""Three owners fine-tune a pruned language model: perplexity on every domain against bytes sent.

    symprune prune --model smollm2-135m --sparsity 0.5 --method wanda --calibration builtin \
        --nsamples 16 --seqlen 128 --dtype float32 --output BASE
    python scripts/fed/language_model.py --base BASE --output OUT

The owners have WikiText, Penn Treebank (both below SYMPRUNE_ASSETS) and Python's documentation.
Finished lines are read from OUT, so that a run that was stopped goes on; OUT/perplexity.png shows
them. `scripts/fed/language_model_owners.py` is the same as code of the owners', for Flower.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune import MaskSet
from symprune.calibration import builtin_text
from symprune.fed import Problem, add_lora, build, merge_lora, simulate

TEXT = Path(os.environ.get("SYMPRUNE_ASSETS", ".")) / "text"
OWNERS: dict[str, Callable[[str], str]] = {
    "wikitext": lambda split: _wikitext(split),
    "ptb": lambda split: (TEXT / "ptb" / f"ptb.{SPLITS[split]}.txt").read_text(),
    "python": builtin_text,
}
SPLITS = {"train": "valid", "test": "test"}  # of Penn Treebank the training part is not here
FROZEN = ("*embed*", "*norm*")
STEPS = {"gamma": 0.1, "clip": 1.0, "batch": 1, "random_steps": False}


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    base: Path
    windows: int
    tests: int
    length: int
    rounds: int
    steps: int


def _wikitext(split: str) -> str:
    name = {"train": "wiki.train.first1MB.raw", "test": "wiki.test.raw"}[split]
    return (TEXT / "wikitext-2-raw" / name).read_text()


def windows(owner: str, split: str, count: int, sizes: Sizes) -> Tensor:
    """The first so many windows of an owner's text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sizes.base)
    text = OWNERS[owner](split)[: 12 * count * sizes.length]
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return ids[: count * sizes.length].view(count, sizes.length)


def problem(sizes: Sizes, lora: bool = False) -> Problem:
    """The owners' text and the pruned model, or adapters on it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sizes.base, dtype=torch.float32)
    adapted = add_lora(model, MaskSet.load(sizes.base), rank=8) if lora else model
    return Problem.causal_lm(
        adapted,
        [windows(owner, "train", sizes.windows, sizes) for owner in OWNERS],
        length=sizes.length,
        client_tests=[windows(owner, "test", sizes.tests, sizes) for owner in OWNERS],
        exempt=() if lora else FROZEN,
    )


def lines(sizes: Sizes) -> dict[str, tuple[str, dict[str, Any], bool, bool]]:
    """Of every line of the table: algorithm, options, with masks, with LoRA."""
    options = {**STEPS, "p": 1 / sizes.steps}
    return {
        "FedAvg, dense": ("fedavg", options, False, False),
        "FedAvg, masks": ("fedavg", options, True, False),
        "FedAvg, masks, int8": ("fedavg", {**options, "compressor": "int8"}, True, False),
        "FedAvg, masks, int4": ("fedavg", {**options, "compressor": "int4"}, True, False),
        "Sparse-ProxSkip, masks": ("sparse-proxskip", {**options, "sparsity": 0.0}, True, False),
        "EF21, masks": ("ef21", {"gamma": 0.1, "compressor": "top-k:0.1+int8"}, True, False),
        "LoRA, masks": ("fedavg", {**options, "gamma": 0.3}, False, True),
    }


def scores(whole: Problem, model: Tensor) -> list[float]:
    return [score["perplexity"] for score in whole.evaluate_each(model)]


def run_line(name: str, sizes: Sizes) -> dict[str, Any]:
    algorithm, options, masked, lora = lines(sizes)[name]
    whole = problem(sizes, lora)
    masks = MaskSet.load(sizes.base) if masked else None
    result = simulate(
        build(algorithm, **options),
        whole,
        sizes.rounds,
        masks=masks,
        clients_at_once=1,
        evaluate_every=0,
    )
    last, clients = result.history[-1], whole.clients * sizes.rounds
    found = {
        "perplexity": scores(whole, result.model),
        "up": last["bytes_up"] / clients,
        "down": last["bytes_down"] / clients,
    }
    weights = result.parameters
    if lora:
        merged = merge_lora(whole.loss.model, weights)  # type: ignore[attr-defined]
        weights = dict(merged.named_parameters())
    return {**found, "zeros": share_of_zeros(weights, MaskSet.load(sizes.base))}


def share_of_zeros(weights: Mapping[str, Tensor], masks: MaskSet) -> float:
    """How many of the weights that the masks are about are zero."""
    zeros = sum(int((weights[name] == 0).sum()) for name in masks)
    return zeros / sum(mask.numel() for mask in masks.values())


def run_alone(sizes: Sizes) -> dict[str, Any]:
    """Every owner trains for itself as long as it would with the others: the perplexity of each on
    its own text, and the model of each on the text of each."""
    whole, masks = problem(sizes), MaskSet.load(sizes.base)
    algorithm = build("fedavg", **STEPS, p=1 / sizes.steps)
    out = {}
    for number, owner in enumerate(OWNERS):
        own = whole.select(torch.tensor([number]))
        result = simulate(algorithm, own, sizes.rounds, masks=masks, evaluate_every=0)
        out[owner] = scores(whole, result.model)
    return {"perplexity": [out[owner][at] for at, owner in enumerate(OWNERS)], "models": out}


def run_start(sizes: Sizes) -> dict[str, Any]:
    whole = problem(sizes)
    return {"perplexity": scores(whole, whole.initial())}


def plot(found: dict[str, dict[str, Any]], file: Path) -> None:
    """Perplexity on every domain against bytes up of a client and round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, len(OWNERS))
    for at, (panel, owner) in enumerate(zip(panels, OWNERS, strict=True)):
        for number, (name, line) in enumerate(found.items()):
            perplexity, color = line["perplexity"][at], f"C{number}"
            if "up" in line:
                panel.plot(line["up"] / 1e6, perplexity, "o", color=color, label=name)
            else:  # nothing is sent
                panel.axhline(perplexity, color=color, linestyle="--", linewidth=1, label=name)
        panel.set(xscale="log", title=owner, xlabel="MB up, a client and round")
    panels[0].set_ylabel("perplexity")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Federated fine-tuning of a pruned model.")
    parser.add_argument("--base", type=Path, required=True, help="folder of the pruned model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8, help="training windows of an owner")
    parser.add_argument("--tests", type=int, default=8, help="test windows of a domain")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="local steps of a round")
    parser.add_argument("--only", nargs="*", help="these lines alone")
    given = vars(parser.parse_args())
    output, only = given.pop("output"), given.pop("only")
    sizes = Sizes(**given)
    output.mkdir(parents=True, exist_ok=True)
    tasks: dict[str, Callable[[], dict[str, Any]]] = {
        "pruned, not trained": lambda: run_start(sizes),
        **{name: lambda name=name: run_line(name, sizes) for name in lines(sizes)},  # type: ignore[misc]
        "alone, masks": lambda: run_alone(sizes),
    }
    files = {
        name: output / f"{name.replace(', ', '-').replace(' ', '-').lower()}.json" for name in tasks
    }
    for name in only or tasks:
        if not files[name].exists():
            begun = time.process_time()
            found = tasks[name]()
            found["seconds"] = time.process_time() - begun
            files[name].write_text(json.dumps(found, indent=1))
        print(name, files[name].read_text(), flush=True)
    finished = {n: json.loads(file.read_text()) for n, file in files.items() if file.exists()}
    plot(finished, output / "perplexity.png")


if __name__ == "__main__":
    main()
