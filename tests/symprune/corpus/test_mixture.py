"""Several texts with weights, and how windows are divided among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from symprune import Recipe, SympruneError, calibration
from symprune.corpus.mixture import Part, arrange, divide, parse, write


def test_a_mixture_is_texts_with_weights_and_a_plus_between_spaces() -> None:
    assert parse("c4*0.7 + mine.jsonl*0.3") == (Part("c4", 0.7), Part("mine.jsonl", 0.3))
    assert parse("c4 + hf:a/b:en:train:text * 2") == (Part("c4"), Part("hf:a/b:en:train:text", 2.0))
    assert parse("a+b.txt") == (Part("a+b.txt"),)


def test_what_is_a_file_is_that_file(tmp_path: Path) -> None:
    odd = tmp_path / "one + two*3"
    odd.write_text("text")
    assert parse(str(odd)) == (Part(str(odd)),)
    assert parse(f"{odd}*2 + c4")[0].source != str(odd), "inside a mixture a plus is a plus"


def test_writing_a_mixture_gives_what_was_read() -> None:
    for text in ("c4", "c4*0.7 + mine.jsonl*0.3", "a*0.1 + b*1e-3 + c"):
        parts = parse(text)
        written = parse(write(parts, lambda name: name))
        assert [p.source for p in written] == [p.source for p in parts]
        assert divide(1000, written) == divide(1000, parts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no name"),
        ("c4*0", "not a number above 0"),
        ("c4*-1 + builtin", "not a number above 0"),
        ("c4*x + builtin", "not a number above 0"),
        ("c4*inf", "not a number above 0"),
        ("c4 + c4*2", "names 'c4' twice"),
        ("c4 +  + builtin", "without a name"),
        ("*2 + c4", "without a name"),
        (" + ".join(f"t{i}" for i in range(65)), "at most 64"),
    ],
)
def test_a_mixture_that_is_none_is_refused_by_the_recipe(text: str, said: str) -> None:
    with pytest.raises(SympruneError, match=said):
        Recipe(calibration=text)


def test_windows_are_divided_exactly_the_largest_remainders_first() -> None:
    assert divide(128, parse("c4*0.7 + a*0.3")) == [90, 38]
    assert divide(10, parse("a + b + c")) == [4, 3, 3]
    assert divide(1, parse("a*0.2 + b*0.5 + c*0.3")) == [0, 1, 0]
    for count in range(40):
        for text in ("a*0.1 + b*0.2 + c*0.7", "a*3 + b", "a*1e-9 + b*1e9"):
            parts = parse(text)
            shares = [count * p.weight / sum(q.weight for q in parts) for p in parts]
            counts = divide(count, parts)
            assert sum(counts) == count
            assert all(abs(n - s) < 1 for n, s in zip(counts, shares, strict=True))


def test_windows_of_all_texts_are_spread_evenly() -> None:
    order = arrange([4, 2])
    assert sorted(order) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert [part for part, _ in order] == [0, 1, 0, 0, 1, 0]
    assert arrange([3]) == [(0, 0), (0, 1), (0, 2)]


def test_who_gave_which_window_is_known_afterwards() -> None:
    found = calibration.windows_by_source("a*2 + b", 6)
    assert found == [("a", 2.0, [0, 2, 3, 5]), ("b", 1.0, [1, 4])]
