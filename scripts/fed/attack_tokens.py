"""The attack on plain federated pruning: a client's words from the sums of its first block.

What enters the first matrices depends on a token alone, so a client's sums of squares are linear in
how often it has which token: one equation a channel. Non-negative least squares over the public
embedding (Lawson and Hanson's active set, which finds sparse solutions) solves them.

    python scripts/fed/attack_tokens.py --text a.txt --public b.txt
    python scripts/fed/attack_tokens.py --text a.txt --public b.txt --widths 128 256 1024
    python scripts/fed/attack_tokens.py --text a.txt --public b.txt --widths 128 --words 0.25 1 2

An informed attacker knows which tokens public text of the same kind has; a guess knows only how
often they are there.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from symprune.checkpoint.load import load_with_tokenizer
from symprune.fed.pruning import Client, Server
from symprune.fed.pruning.exposure import TOKENS_PER_NUMBER
from symprune.fed.wire.payload import decode_message
from symprune.models.layout import find_layout
from symprune.recipe import Recipe

FREE = 1e-9  # of the largest: a gradient below this is rounding


@dataclass(frozen=True)
class Recovered:
    """How much of a client's text came out: tokens with the right count, in shares."""

    tokens: int
    distinct: int
    tokens_found: float
    words_found: float
    words_false: float

    @classmethod
    def compare(cls, counts: Tensor, found: Tensor) -> Recovered:
        both = torch.minimum(counts, found).sum()
        there, claimed = counts > 0, found > 0
        right = (there & claimed).sum()
        return cls(
            int(counts.sum()),
            int(there.sum()),
            float(both / counts.sum()),
            float(right / there.sum()),
            float(1 - right / max(int(claimed.sum()), 1)),
        )


class _Seen(Exception):
    """Nothing behind the first matrix has to be computed."""


def first_inputs(model: nn.Module, vocabulary: int) -> Tensor:
    """What enters the first matrix for every token of the vocabulary `[vocabulary, width]`."""
    name = find_layout(model).matrices(0)[0].parameter_name.rpartition(".")[0]
    seen: list[Tensor] = []

    def look(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[0].detach())
        raise _Seen

    hook = model.get_submodule(name).register_forward_pre_hook(look)
    try:
        for ids in torch.arange(vocabulary).unsqueeze(1).split(1024):
            with torch.no_grad(), suppress(_Seen):
                model(ids)
    finally:
        hook.remove()
    return torch.cat(seen).flatten(0, 1)


def recover(squares: Tensor, sums: Tensor, most: int = 5000) -> Tensor:
    """Token counts from `sums`, one per channel; squares `[vocabulary, width]` are the tokens'."""
    columns = squares.double().T.numpy()
    lengths = np.linalg.norm(columns, axis=0)
    columns = columns / np.maximum(lengths, 1e-300)
    solution = nonnegative(columns, sums.double().numpy(), most)
    return torch.from_numpy(np.rint(solution / np.maximum(lengths, 1e-300))).long()


def nonnegative(columns: np.ndarray, target: np.ndarray, most: int) -> np.ndarray:
    """min ||columns x - target|| over x >= 0, by an active set that grows a few at a time."""
    width, size = columns.shape
    x, active = np.zeros(size), np.zeros(size, dtype=bool)
    residual, single = target.copy(), columns.astype(np.float32)
    for _ in range(most):
        gradient = single.T @ residual.astype(np.float32)
        gradient[active] = -np.inf
        if gradient.max() <= FREE * np.abs(target).max() or active.sum() >= width:
            break
        room = max(1, min(int(active.sum()) // 20, width - int(active.sum())))
        active[np.argpartition(-gradient, room - 1)[:room]] = True
        while True:
            here = np.flatnonzero(active)
            fit = np.linalg.lstsq(columns[:, here], target, rcond=None)[0]
            if (fit > 0).all():
                break
            below = fit <= 0
            step = np.min(x[here][below] / np.maximum(x[here][below] - fit[below], 1e-300))
            x[here] += step * (fit - x[here])
            gone = here[below & (x[here] <= 1e-12 * max(x[here].max(), 1e-300))]
            x[gone], active[gone] = 0.0, False
        x[:] = 0.0
        x[here] = fit
        residual = target - columns[:, here] @ fit
        if np.linalg.norm(residual) <= 1e-7 * np.linalg.norm(target):
            break
    return x


def guess(public: Tensor, tokens: int) -> Tensor:
    """What public text alone would have one expect: counts by its frequencies."""
    return (public.double() / public.sum() * tokens).round().long()


def attack(inputs: Tensor, sums: Tensor, public: Tensor | None = None) -> Tensor:
    """Counts of all tokens; an informed attacker tries the tokens that public text has alone."""
    squares = inputs.double().square()
    if public is None:
        return recover(squares, sums)
    candidates = (public > 0).nonzero().squeeze(1)
    found = torch.zeros(len(inputs), dtype=torch.int64)
    found[candidates] = recover(squares[candidates], sums)
    return found


def sent_sums(model: nn.Module, tokens: Tensor) -> Tensor:
    """What a client of a plain run sends of the first matrix's input: a sum of squares a channel.
    The bytes are those that cross the wire."""
    client = Client(model, tokens, allow_few_tokens=True)
    server = Server(model, Recipe(method="wanda"), 1)
    server.welcome({0: client(server.hello()[0])})
    reply = decode_message(client(server.ask(0)[0]))
    return reply["values"][: server.layout.matrices(0)[0].weight.shape[1]]


def random_inputs(vocabulary: int, width: int, seed: int = 0) -> Tensor:
    """Embeddings of no model, normalised as a first block does."""
    drawn = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.square().mean(1, keepdim=True).sqrt()


def of_few_words(ids: Tensor, words: int, tokens: int) -> Tensor:
    """So many tokens of a text from which all but its first different ones are left out; begun
    again where it ends."""
    kept = list(dict.fromkeys(ids.tolist()))[:words]
    left = ids[torch.isin(ids, torch.tensor(kept))]
    return left.repeat(-(-tokens // len(left)))[:tokens]


def show(name: str, inputs: Tensor, ids: Tensor, public: Tensor, lengths: list[int]) -> None:
    """A row for each length of text: what each attacker and a guess find of it."""
    for length in lengths:
        counts = torch.bincount(ids[:length], minlength=len(inputs))
        sums = (inputs.double().square() * counts.unsqueeze(1)).sum(0).float()
        found = {"blind": attack(inputs, sums), "informed": attack(inputs, sums, public)}
        found["guess"] = guess(public, length)
        for who, what in found.items():
            got = Recovered.compare(counts, what)
            print(
                f"{name:>14} {length:>7} tokens, {got.distinct:>5} distinct, {who:>8}: "
                f"{got.tokens_found:6.1%} of the tokens, {got.words_found:6.1%} of the words, "
                f"{got.words_false:6.1%} of its words false",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="for its tokenizer and embedding")
    parser.add_argument("--text", required=True, help="the client's text, a file")
    parser.add_argument("--public", required=True, help="text of the same kind, a file")
    parser.add_argument("--widths", type=int, nargs="*", help="random embeddings instead")
    parser.add_argument(
        "--words", type=float, nargs="*", help="long texts of so many different tokens a channel"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[96, 512, 2048, 8192])
    chosen = parser.parse_args()
    model, tokenizer = load_with_tokenizer(chosen.model, device="cpu")
    size = model.config.vocab_size
    ids, seen = (
        torch.tensor(tokenizer(Path(file).read_text())["input_ids"])
        for file in (chosen.text, chosen.public)
    )
    public = torch.bincount(seen, minlength=size)
    embeddings = {f"width {width}": random_inputs(size, width) for width in chosen.widths or ()}
    for name, inputs in (embeddings or {chosen.model: first_inputs(model, size)}).items():
        width = inputs.shape[1]
        long = TOKENS_PER_NUMBER * width
        for share in chosen.words or ():
            show(name, inputs, of_few_words(ids, round(share * width), long), public, [long])
        if not chosen.words:
            show(name, inputs, ids, public, chosen.lengths)


if __name__ == "__main__":
    main()
