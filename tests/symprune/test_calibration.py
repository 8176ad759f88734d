"""Where tokens come from."""

from __future__ import annotations

import random
from pathlib import Path

import families
import pytest
import torch

from symprune import calibration
from symprune.errors import SympruneError


def test_the_builtin_parts_never_overlap() -> None:
    train, test = calibration.builtin_text("train"), calibration.builtin_text("test")
    assert len(train) > 3 * len(test) > 100_000
    mine, theirs = (set(text.split("\n\n")) for text in (train, test))
    assert mine and theirs and not mine & theirs
    assert len(mine) == len(train.split("\n\n")), "a paragraph stands once"


def test_windows_are_those_of_the_published_sampling() -> None:
    ids = torch.arange(1000)
    got = calibration.windows(ids, 5, 64, seed=3)
    random.seed(3)
    starts = [random.randint(0, 1000 - 64 - 1) for _ in range(5)]
    assert got[:, 0].tolist() == starts
    assert torch.equal(got[2], torch.arange(starts[2], starts[2] + 64))


def test_a_file_gives_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the value of an expression " * 50)
    tokens = calibration.calibration_tokens(str(path), families.tokenizer(), 3, 16, 0)
    assert tokens.shape == (3, 16) and tokens.dtype == torch.long


def test_text_that_is_empty_short_or_missing_is_named(tmp_path: Path) -> None:
    tokenizer = families.tokenizer()
    short = tmp_path / "short.txt"
    short.write_text("few words")
    with pytest.raises(SympruneError, match=r"short\.txt has \d+ tokens, too few.*2048"):
        calibration.calibration_tokens(str(short), tokenizer, 1, 2048, 0)
    short.write_text(" \n ")
    with pytest.raises(SympruneError, match="is empty"):
        calibration.text(str(short), "train")
    with pytest.raises(SympruneError, match="absent"):
        calibration.text(str(tmp_path / "absent"), "train")
    short.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SympruneError, match="not a text file"):
        calibration.text(str(short), "train")


def test_data_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.delenv("SYMPRUNE_ASSETS", raising=False)
    for source in ("c4", "wikitext2"):
        with pytest.raises(SympruneError, match=f"{source}.*builtin"):
            calibration.calibration_tokens(source, families.tokenizer(), 1, 8, 0)


def test_c4_takes_windows_from_documents_that_are_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["short", "the lambda expression " * 30]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    tokens = calibration.calibration_tokens("c4", families.tokenizer(), 4, 16, 0)
    assert tokens.shape == (4, 16)
    with pytest.raises(SympruneError, match="too few documents"):
        calibration.calibration_tokens("c4", families.tokenizer(), 1, 100_000, 0)


def test_the_local_wikitext_is_joined_as_the_papers_join_it(assets: Path) -> None:
    text = calibration.text("wikitext2", "test")
    assert text.startswith("\n\n = Robert Boulter = \n\n\n\n")
    assert len(text) > 1_290_000


def test_held_out_windows_touch_no_calibration_window() -> None:
    def numbered(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text) // 10))}

    tokens = calibration.calibration_tokens("builtin", numbered, 32, 64, seed=3)
    others = calibration.held_out_tokens("builtin", numbered, 32, 64, seed=3)
    assert others is not None and others.shape == (4, 64)
    assert not set(tokens.flatten().tolist()) & set(others.flatten().tolist())


def test_a_text_that_is_used_up_leaves_nothing_held_out(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("word " * 100)

    def letters(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(range(70))}

    assert calibration.held_out_tokens(str(file), letters, 16, 64, seed=0) is None


def test_every_window_but_the_very_last_may_be_drawn() -> None:
    """As the reference implementations draw them, which leave the last one out."""
    ids = torch.arange(7)
    drawn = calibration.windows(ids, 200, 4, seed=0)
    assert sorted(set(drawn[:, 0].tolist())) == [0, 1, 2]
    assert torch.equal(drawn - drawn[:, :1], torch.arange(4).expand(200, 4))
