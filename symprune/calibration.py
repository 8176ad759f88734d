"""Where the tokens come from: C4, WikiText-2, a text file, or the text that ships with Python.

The sampling follows the published set-up (thesis section 6.4): windows of `seqlen` tokens at random
places, from Python's `random` with the seed, so that C4 and WikiText-2 give the tokens the
reference implementations of Wanda and RIA draw.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from symprune.errors import SympruneError

SOURCES = ("c4", "wikitext2", "builtin")
C4_SHARD = {
    "train": "en/c4-train.00000-of-01024.json.gz",
    "test": "en/c4-validation.00000-of-00008.json.gz",
}
WIKITEXT_FILES = {"train": "wiki.train.first1MB.raw", "test": "wiki.test.raw"}
LARGEST_TEXT = 10**9  # bytes
HELD_OUT_EVERY = 5
WATCHED = 8


class Tokenizer(Protocol):
    """What is asked of a tokenizer: text in, `input_ids` out."""

    def __call__(self, text: str, **kwargs: Any) -> Any: ...


def calibration_tokens(
    source: str, tokenizer: Tokenizer, nsamples: int, seqlen: int, seed: int
) -> Tensor:
    """`[nsamples, seqlen]` token ids from a source's calibration part."""
    if source == "c4":
        return _from_documents(_c4("train"), tokenizer, nsamples, seqlen, seed)
    return windows(encode(tokenizer, text(source, "train")), nsamples, seqlen, seed, source)


def held_out_tokens(
    source: str, tokenizer: Tokenizer, nsamples: int, seqlen: int, seed: int, more: int = 0
) -> Tensor | None:
    """An eighth as many windows of the calibration text that none of `calibration_tokens` touches;
    of C4, its validation part. None when nothing is left. Behind them stand `more` others, as far
    as there are any."""
    count = max(1, nsamples // WATCHED)
    if source == "c4":
        return _from_documents(_c4("test"), tokenizer, count + more, seqlen, seed)
    ids = encode(tokenizer, text(source, "train"))
    used = _starts(len(ids), nsamples, seqlen, seed, source)
    free = [
        start
        for start in range(0, len(ids) - seqlen, seqlen)
        if all(abs(start - taken) >= seqlen for taken in used)
    ]
    chosen = random.Random(seed).sample(free, min(count, len(free)))
    others = sorted(set(free) - set(chosen))
    chosen += random.Random(seed).sample(others, min(more, len(others)))
    return torch.stack([ids[start : start + seqlen] for start in chosen]) if chosen else None


def begin_with(tokens: Tensor, bos: int | None) -> Tensor:
    """Windows that begin with BOS, as long as they were: the last token makes room. One that begins
    with it already, as the start of a text does, is left as it is."""
    if bos is None:
        return tokens
    if tokens.shape[1] < 2:
        raise SympruneError("Windows of one token have no room for BOS; use a larger --seqlen.")
    begun = torch.cat([torch.full_like(tokens[:, :1], bos), tokens[:, :-1]], dim=1)
    return torch.where(tokens[:, :1] == bos, tokens, begun)


def text(source: str, split: str) -> str:
    """The `train` (calibration) or `test` (held-out) text of a source; a file is all one text."""
    if source == "builtin":
        return builtin_text(split)
    if source == "wikitext2":
        return _wikitext2(split)
    if source == "c4":
        return " ".join(_c4(split)[:1100]["text"])
    return _read(source)


def encode(tokenizer: Tokenizer, content: str) -> Tensor:
    """The token ids of a text, in one row. Length warnings are moot: windows are cut afterwards."""
    return torch.tensor(tokenizer(content, verbose=False)["input_ids"], dtype=torch.long)


def windows(ids: Tensor, nsamples: int, seqlen: int, seed: int, source: str = "text") -> Tensor:
    """`nsamples` windows of `seqlen` tokens at random places of one long row of ids."""
    starts = _starts(len(ids), nsamples, seqlen, seed, source)
    return torch.stack([ids[start : start + seqlen] for start in starts])


def _starts(length: int, nsamples: int, seqlen: int, seed: int, source: str) -> list[int]:
    last = length - seqlen - 1
    if last < 0:
        raise SympruneError(
            f"The calibration text {source} has {length} tokens, too few for one window of "
            f"{seqlen}; use a longer text or a smaller --seqlen."
        )
    chance = random.Random(seed)
    return [chance.randint(0, last) for _ in range(nsamples)]


def builtin_text(split: str) -> str:
    """The Python language reference inside CPython: a fifth of it is held out for testing.

    Its topics quote each other, so topics that share a paragraph stay on one side, and a paragraph
    stands once: no line of prose is in both parts.
    """
    held_out: list[str] = []
    calibrating: list[str] = []
    for part in _families():
        small = sum(map(len, held_out)) * HELD_OUT_EVERY <= sum(map(len, calibrating))
        (held_out if small and calibrating else calibrating).append(part)
    return "\n\n".join(held_out if split == "test" else calibrating)


def _families() -> list[str]:
    """The topics' text, joined where they share a paragraph, largest first."""
    from pydoc_data.topics import topics

    owner: dict[str, int] = {}
    families: dict[int, list[str]] = {}
    for number, name in enumerate(sorted(topics)):
        paragraphs = [p.strip("\n") for p in topics[name].split("\n\n") if p.strip()]
        related = {owner[p] for p in paragraphs if p in owner}
        families[number] = [p for old in sorted(related) for p in families.pop(old)]
        families[number] += [p for p in dict.fromkeys(paragraphs) if p not in owner]
        owner.update(dict.fromkeys(families[number], number))
    return sorted(("\n\n".join(family) for family in families.values()), key=len, reverse=True)


def _read(path: str) -> str:
    file = Path(path)
    if file.exists() and not file.is_file():
        raise SympruneError(f"The text {path} is not a file.")
    if file.exists() and file.stat().st_size > LARGEST_TEXT:
        raise SympruneError(
            f"The text file {path} has {file.stat().st_size / 1e9:.1f} GB; a part of it, of "
            f"{LARGEST_TEXT / 1e9:.0f} GB at most, is plenty."
        )
    try:
        content = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SympruneError(f"{path} is not a text file (UTF-8).") from error
    except OSError as error:
        raise SympruneError(
            f"Cannot read text {path!r} ({error.strerror}); "
            f"give a file or one of {', '.join(SOURCES)}."
        ) from error
    if not content.strip():
        raise SympruneError(f"The text file {path} is empty.")
    return content


def _wikitext2(split: str) -> str:
    """WikiText-2 raw, rows joined as the papers do: train by a space, test by an empty line.

    A copy under `$SYMPRUNE_ASSETS/text/wikitext-2-raw` is used when there is one.
    """
    joint = " " if split == "train" else "\n\n"
    assets = os.environ.get("SYMPRUNE_ASSETS")
    local = Path(assets or "") / "text" / "wikitext-2-raw" / WIKITEXT_FILES[split]
    if assets and local.is_file():
        lines = local.read_text(encoding="utf-8").splitlines(keepends=True)
        return joint.join(line if line.strip() else "" for line in lines)
    rows = _load_dataset("wikitext2", "Salesforce/wikitext", name="wikitext-2-raw-v1", split=split)
    return joint.join(rows["text"])


def _c4(split: str) -> Any:
    return _load_dataset("c4", "allenai/c4", data_files={split: C4_SHARD[split]}, split=split)


def _load_dataset(source: str, path: str, **options: Any) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(path, **options)
    except Exception as error:
        raise SympruneError(
            f"Data set {source} ({path}) cannot be reached ({type(error).__name__}); go online, "
            "or use builtin or a text file of your own instead (--calibration, --data)."
        ) from error


def _from_documents(
    rows: Any, tokenizer: Tokenizer, nsamples: int, seqlen: int, seed: int
) -> Tensor:
    """Random windows of random documents, skipping documents shorter than a window."""
    chance = random.Random(seed)
    found: list[Tensor] = []
    for _ in range(1000 * nsamples):
        ids = encode(tokenizer, rows[chance.randint(0, len(rows) - 1)]["text"])
        if len(ids) > seqlen:
            start = chance.randint(0, len(ids) - seqlen - 1)
            found.append(ids[start : start + seqlen])
            if len(found) == nsamples:
                return torch.stack(found)
    raise SympruneError(f"c4 has too few documents longer than {seqlen} tokens.")
