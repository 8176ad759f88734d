"""How long honest clients' channels are beside the median client's, in the units of `fed prune
--robust norm:K`, and beside what the server's own few tokens bring.

Texts that have little in common, one of which says the same word all the time. A K above the
largest of these numbers leaves none of such clients out.

    SYMPRUNE_ASSETS=... python scripts/fed/honest_lengths.py --model smollm2-135m
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor

from symprune import Recipe, calibration
from symprune.checkpoint.load import load_with_tokenizer
from symprune.fed.pruning import prune
from symprune.fed.pruning.aggregate import bounds


def texts() -> dict[str, str]:
    assets = Path(os.environ["SYMPRUNE_ASSETS"]) / "text"
    return {
        "WikiText-2": (assets / "wikitext-2-raw/wiki.valid.first100KB.raw").read_text(),
        "PTB": (assets / "ptb/ptb.valid.txt").read_text(),
        "Python": calibration.text("builtin", "train"),
        "this code": Path(bounds.__file__).read_text() * 4,
        "numbers": " ".join(str(number * 7919 % 10007) for number in range(4000)),
        "one word": "no " * 4000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--windows", type=int, default=2)
    asked = parser.parse_args()
    named = texts()
    model, tokenizer = load_with_tokenizer(asked.model, device="cpu")
    clients = [
        torch.tensor(tokenizer(text)["input_ids"][: asked.windows * asked.seqlen]).view(
            asked.windows, asked.seqlen
        )
        for text in named.values()
    ]
    among: list[Tensor] = []
    alone = 0.0
    measure = bounds.times_usual

    def watch(rows: Tensor, usual: Tensor, size: float) -> Tensor:
        found = measure(rows, usual, size)
        among.append(found)
        return found

    judge = bounds.too_long

    def both(said: dict[int, bounds.Lengths], own: bounds.Lengths, most: float) -> dict[int, str]:
        nonlocal alone
        for number in said:  # as if this client were alone with the server
            for mine, its in zip(own, said[number], strict=True):
                if mine is not None and its is not None:
                    size = float(mine.square().mean().sqrt())
                    alone = max(alone, float(measure(its.unsqueeze(0), mine, size)))
        return judge(said, own, most)

    bounds.times_usual, bounds.too_long = watch, both
    prune(model, clients, Recipe(refine="dsnot", pattern="2:4"), robust="norm:1e9")
    worst = torch.stack(among).amax(0)
    for name, times in zip(named, worst.tolist(), strict=True):
        print(f"{name}: {times:.2f} times the median client's", flush=True)
    print(f"all: {alone:.1f} times what the server's own tokens bring", flush=True)


if __name__ == "__main__":
    main()
