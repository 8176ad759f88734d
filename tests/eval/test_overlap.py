"""Whether calibration and evaluation text overlap."""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import pytest
import torch
from fuzzing import EXAMPLES, ODD_VALUES, fuzz
from hypothesis import strategies as st
from torch import Tensor

from symprune.eval import overlap
from symprune.eval.overlap import (
    DISTINCT,
    LENGTH,
    find_overlap,
    find_overlap_with_sample,
    hash_passages,
    keep_sample,
)


def random_windows(count: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, 50_000, (count, length), generator=torch.manual_seed(seed))


def test_passages_have_the_same_hash_where_they_are_the_same() -> None:
    windows = random_windows(3, 100, 0)
    windows[2, 50:90] = windows[0, 7:47]
    found = hash_passages(windows)
    assert found.shape == (3, 100 - LENGTH + 1)
    counted = Counter(found.flatten().tolist())
    assert sum(count == 2 for count in counted.values()) == 40 - LENGTH + 1
    assert set(counted.values()) == {1, 2} and min(counted) >= 0


def test_what_was_calibrated_on_is_found_wherever_it_stands() -> None:
    calibrated, evaluated = random_windows(4, 128, 0), random_windows(5, 200, 1)
    assert find_overlap(calibrated, evaluated).windows == 0
    evaluated[1, 30:130] = calibrated[2, 10:110]
    found = find_overlap(calibrated, evaluated)
    places = 200 - LENGTH + 1
    assert (found.windows, found.of) == (1, 5)
    assert found.share == (100 - LENGTH + 1) / (5 * places)
    note = found.note("mine.txt")
    assert note is not None and "1 of 5 evaluation windows (mine.txt)" in note
    evaluated[1, 30 + LENGTH - 1 :] = 7  # one token too few is left of it
    assert find_overlap(calibrated, evaluated).windows == 0


def test_passages_of_few_tokens_do_not_count() -> None:
    dashes = torch.arange(DISTINCT - 1).repeat(20)[None]
    assert find_overlap(dashes, dashes).windows == 0
    words = torch.arange(DISTINCT).repeat(20)[None]
    assert find_overlap(words, words).share == 1


def test_a_passage_or_two_is_no_reason_to_warn() -> None:
    assert overlap.Overlap(1, 30, 0.0001).note("x") is None
    assert overlap.Overlap(1, 30, 0.002).note("x") is not None


def test_windows_shorter_than_a_passage_have_none() -> None:
    short = random_windows(2, LENGTH - 1, 0)
    assert find_overlap(short, short).note("x") is None
    assert keep_sample(short) == ""


@pytest.mark.parametrize(("windows", "size"), [(2, 10_924), (40, 10_924), (1, 992)])
def test_a_sample_tells_the_share_later(windows: int, size: int) -> None:
    length = 2000 if windows > 1 else 124
    calibrated = random_windows(windows, length, 0)
    sample = keep_sample(calibrated)
    assert len(sample) == size
    evaluated = torch.cat([calibrated, random_windows(windows, length, 1)])
    found = find_overlap_with_sample(sample, evaluated)
    assert found is not None
    # A sample of 1,024 hashes of which a half is shared: four standard deviations of its share.
    assert abs(found.share - 0.5) < 4 * (0.25 / 1024) ** 0.5 or windows == 1
    other = find_overlap_with_sample(sample, random_windows(windows, length, 2))
    assert other is not None and other.windows == 0


def test_a_sample_is_compared_with_the_hashes_it_could_have() -> None:
    """All of what was calibrated on is found, although few hashes of it are kept."""
    calibrated = random_windows(40, 2000, 0)
    found = find_overlap_with_sample(keep_sample(calibrated), calibrated)
    assert found is not None and found.share == 1


@EXAMPLES
def test_a_sample_is_read_or_passed_over(examples: int) -> None:
    good = keep_sample(random_windows(1, 64, 0))
    evaluated = random_windows(1, 64, 0)
    texts = st.text(max_size=20) | st.binary(max_size=64).map(
        lambda b: base64.b64encode(b).decode()
    )
    cut = st.integers(0, len(good)).map(lambda end: good[:end])

    def read(sample: Any) -> None:
        find_overlap_with_sample(sample, evaluated)

    fuzz(read, st.sampled_from(ODD_VALUES) | texts | cut, examples)
