"""Letters between machines: what comes out is what went in, and nothing else gets in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symprune.errors import SympruneError
from symprune.fed.remote.job import TrainingJob, job_from_json
from symprune.fed.wire.envelope import Letter, unpack


@given(st.lists(st.binary(max_size=50), max_size=4), st.integers())
def test_a_letter_arrives_as_it_was_written(parts: list[bytes], number: int) -> None:
    letter = Letter({"kind": "turn", "number": number}, tuple(parts))
    assert unpack(letter.pack()) == letter


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_bytes_that_are_no_letter_are_refused_in_a_sentence(data: bytes) -> None:
    with pytest.raises(SympruneError, match="letter"):
        unpack(data)


@pytest.mark.parametrize("sizes", [[5], [-1], [1.5], "x", None, [True]])
def test_parts_must_add_up(sizes: object) -> None:
    header = json.dumps({"sizes": sizes}).encode()
    with pytest.raises(SympruneError, match="letter"):
        unpack(len(header).to_bytes(4, "little") + header + b"ab")


def test_a_letter_that_is_too_long_is_not_opened() -> None:
    with pytest.raises(SympruneError, match="at most 10"):
        unpack(Letter({}, (b"0" * 100,)).pack(), most=10)


def test_a_job_survives_the_way_to_another_machine() -> None:
    job = TrainingJob("fedavg", {"gamma": 0.1}, {"data": "digits", "clients": 3}, rounds=2, seed=5)
    assert job_from_json(job.to_json()) == job


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"algorithm": "fedmagic"}', '{"algorithm": 3}'])
def test_a_job_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(SympruneError):
        job_from_json(text)


def test_settings_a_problem_does_not_have_are_named() -> None:
    with pytest.raises(SympruneError, match="colour"):
        TrainingJob("fedavg", problem={"colour": "blue"})


def test_a_header_as_long_as_no_letter_has_is_not_read() -> None:
    header = json.dumps({"sizes": [], "filler": "x" * (1 << 20)}).encode()
    with pytest.raises(SympruneError, match="has no header"):
        unpack(len(header).to_bytes(4, "little") + header)
