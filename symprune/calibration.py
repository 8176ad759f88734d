"""Where the tokens come from: C4, WikiText-2, the text that ships with Python, or a user's own
(`corpus`): files, data sets of the hub, what the model writes, or several with weights.

The sampling follows the published set-up (thesis section 6.4): windows of `seqlen` tokens at random
places, from Python's `random` with the seed, so that C4 and WikiText-2 give the tokens the
reference implementations of Wanda and RIA draw.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune.corpus import documents, files, hub, mixture
from symprune.corpus.documents import Document, Tokenizer
from symprune.corpus.files import read_text
from symprune.corpus.mixture import OWN
from symprune.errors import SympruneError

SOURCES = ("c4", "wikitext2", "builtin")
C4_SHARD = {
    "train": "en/c4-train.00000-of-01024.json.gz",
    "test": "en/c4-validation.00000-of-00008.json.gz",
}
WIKITEXT_FILES = {"train": "wiki.train.first1MB.raw", "test": "wiki.test.raw"}
EVALUATED = 4_000_000  # characters of documents that perplexity is measured on, at most
HELD_OUT_EVERY = 5
WATCHED = 8
UNWRITTEN = -1
"""Stands for every token of a window that the model has yet to write."""


def calibration_tokens(
    source: str, tokenizer: Tokenizer, nsamples: int, seqlen: int, seed: int, own: bool = False
) -> Tensor:
    """`[nsamples, seqlen]` token ids from the calibration part of a source, or of several by their
    weights, spread evenly. own: the model can write windows; they are UNWRITTEN here."""
    parts = mixture.parse(source)
    counts = mixture.divide(nsamples, parts)
    found: list[Tensor] = []
    for part, count in zip(parts, counts, strict=True):
        if count == 0:
            raise SympruneError(
                f"{part.source} would give none of {nsamples} windows; use a larger --nsamples or "
                "weight."
            )
        if part.source == OWN and not own:
            raise SympruneError(
                "The model's own windows (self) are written by prune, refine and sweep alone; "
                "name a text."
            )
        found.append(_windows_of(part.source, tokenizer, count, seqlen, seed))
    return torch.stack([found[part][window] for part, window in mixture.arrange(counts)])


def held_out_tokens(
    source: str, tokenizer: Tokenizer, nsamples: int, seqlen: int, seed: int, more: int = 0
) -> Tensor | None:
    """An eighth as many windows of the calibration text that none of `calibration_tokens` touches;
    of C4, its validation part. None when nothing is left. Behind them stand `more` others, as far
    as there are any. The model's own are UNWRITTEN."""
    parts = mixture.parse(source)
    amounts = (nsamples, max(1, nsamples // WATCHED), more)
    settings = zip(parts, *(mixture.divide(amount, parts) for amount in amounts), strict=True)
    watching, others = [], []
    for part, taken, count, further in settings:
        found = _held_out_of(part.source, tokenizer, taken, seqlen, seed, count, further)
        watching.append(found[:count])
        others.append(found[count:])
    every = torch.cat([*watching, *others])
    return every if len(every) else None


def _windows_of(source: str, tokenizer: Tokenizer, count: int, seqlen: int, seed: int) -> Tensor:
    if source == OWN:
        return _unwritten(count, seqlen)
    if source == "c4":
        return _from_documents(_c4("train"), tokenizer, count, seqlen, seed)
    return windows(_row(source, tokenizer, count, seqlen, seed), count, seqlen, seed, source)


def _held_out_of(
    source: str, tokenizer: Tokenizer, taken: int, seqlen: int, seed: int, count: int, more: int
) -> Tensor:
    """`count` and then `more` windows of one source, or as many as there are, apart from the
    `taken` that calibrate."""
    if source == OWN or count + more == 0:
        return _unwritten(count + more, seqlen)
    if source == "c4":
        return _from_documents(_c4("test"), tokenizer, count + more, seqlen, seed)
    ids = _row(source, tokenizer, taken, seqlen, seed)
    used = _starts(len(ids), taken, seqlen, seed, source)
    free = [
        start
        for start in range(0, len(ids) - seqlen, seqlen)
        if all(abs(start - other) >= seqlen for other in used)
    ]
    chosen = random.Random(seed).sample(free, min(count, len(free)))
    others = sorted(set(free) - set(chosen))
    chosen += random.Random(seed).sample(others, min(more, len(others)))
    found = [ids[start : start + seqlen] for start in chosen]
    return torch.stack(found) if found else _unwritten(0, seqlen)


def _unwritten(count: int, seqlen: int) -> Tensor:
    return torch.full((count, seqlen), UNWRITTEN)


def _row(source: str, tokenizer: Tokenizer, count: int, seqlen: int, seed: int) -> Tensor:
    """The source's calibration part as one row of tokens; of many documents, plenty of them."""
    found = _documents_of(source, "train")
    if found is None:
        return encode(tokenizer, text(source, "train"))
    drawn = documents.draw(found, count * seqlen, seed)
    return encode(tokenizer, documents.join(drawn, tokenizer, source))


def evaluation_tokens(source: str, tokenizer: Tokenizer) -> Tensor:
    """The held-out part of a source as one row of tokens; of documents, the first ones."""
    parts = mixture.parse(source)
    if len(parts) > 1 or source == OWN:
        raise SympruneError(f"Perplexity is measured on one text, not on {source!r}.")
    found = _documents_of(source, "test")
    if found is None:
        return encode(tokenizer, text(source, "test"))
    first = documents.first_of(iter(found), EVALUATED)
    return encode(tokenizer, documents.join(first, tokenizer, source))


def _documents_of(source: str, split: str) -> list[Document] | None:
    """The documents of a source that is made of them."""
    if source in SOURCES:
        return None
    if source.startswith(hub.PREFIX):
        return hub.read_hub(source, split)
    return files.read_documents(source) if files.has_documents(source) else None


def windows_by_source(source: str, nsamples: int) -> list[tuple[str, float, list[int]]]:
    """For every source its name, its weight and which windows of `calibration_tokens` are its."""
    parts = mixture.parse(source)
    places = mixture.arrange(mixture.divide(nsamples, parts))
    return [
        (part.source, part.weight, [i for i, (owner, _) in enumerate(places) if owner == number])
        for number, part in enumerate(parts)
    ]


def files_of(source: str) -> list[str]:
    """What of a source may be a file or folder of the user's."""
    names = [part.source for part in mixture.parse(source)]
    return [str(files.split_column(name)[0]) for name in names if not name.startswith(hub.PREFIX)]


def without_folders(source: str) -> str:
    """A source by the names of its files, without where they are kept."""

    def alone(name: str) -> str:
        return name if name.startswith(hub.PREFIX) else Path(name).name

    return mixture.write(mixture.parse(source), alone)


def with_whole_paths(source: str) -> str:
    """A source that is the same from whatever folder it is read."""

    def whole(name: str) -> str:
        file, column = files.split_column(name)
        there = str(file.resolve()) if file.exists() else str(file)
        return name if not file.exists() else there + (f":{column}" if column else "")

    return mixture.write(mixture.parse(source), whole)


def needs_no_hub(source: str) -> bool:
    """Whether a source was chosen that nothing has to be fetched for."""
    return {part.source for part in mixture.parse(source)} <= {"builtin", OWN}


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
    return read_text(source)


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
