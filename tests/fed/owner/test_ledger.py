"""The privacy ledger: what was spent stays spent, and nobody who is not root can make it forget."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from symprune.errors import SympruneError
from symprune.fed.owner.ledger import Ledger
from symprune.fed.privacy import Release, compose, noise_multiplier

DELTA = 1e-5
STEP = Release(1.0, noise_multiplier(1.0, DELTA, 1.0, 4))  # four of them are epsilon = 1


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "below" / "ledger.jsonl", 1.0, DELTA)


def test_releases_add_up_across_runs_algorithms_and_objects(ledger: Ledger) -> None:
    for run in range(4):
        Ledger(ledger.file, 1.0, DELTA).spend(STEP, f"algorithm {run}", f"run {run}")
    assert 0.99 < ledger.spent() <= 1.0
    with pytest.raises(
        SympruneError, match=r"budget is spent: pruning would bring epsilon to 1\.1"
    ):
        ledger.spend(STEP, "pruning", "a new name")
    assert len(ledger.file.read_text().splitlines()) == 4


def test_what_is_spent_is_what_the_accountant_says(ledger: Ledger) -> None:
    made = [STEP, Release(0.1, 3.0, 5)]
    for release in made:
        ledger.spend(release, "x", "y")
    assert ledger.spent() == compose(made, DELTA)


def test_a_ledger_is_its_owners_alone(ledger: Ledger) -> None:
    assert ledger.spent() == 0.0 and not ledger.file.parent.exists()
    ledger.spend(STEP, "x", "y")
    for file in ledger.file.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def cut(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def lower(file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["multiplier"] = 1e6
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def leave_out(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))


def swap(file: Path) -> None:
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "the last line is cut off": (cut, "cut off"),
    "the last line is torn": (tear, "torn"),
    "a number is lowered": (lower, "line 1 was changed"),
    "a line is left out": (leave_out, "line 1 was changed"),
    "lines change places": (swap, "line 1 was changed"),
    "it is emptied": (lambda file: file.write_bytes(b""), "empty"),
    "it is deleted": (lambda file: file.unlink(), "gone"),
    "it is noise": (lambda file: file.write_bytes(b"\xff\x00\n"), "no entry"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_ledger_allows_nothing_and_is_not_begun_anew(ledger: Ledger, name: str) -> None:
    for _ in range(2):
        ledger.spend(STEP, "x", "y")
    damage, sentence = DAMAGE[name]
    damage(ledger.file)
    found = ledger.file.read_bytes() if ledger.file.exists() else None
    for _ in range(2):
        with pytest.raises(SympruneError, match=f"damaged .*{sentence}"):
            ledger.spend(STEP, "x", "y")
        with pytest.raises(SympruneError, match="nothing is released"):
            ledger.spent()
    assert (ledger.file.read_bytes() if ledger.file.exists() else None) == found


def test_a_crash_between_the_two_files_loses_nothing(ledger: Ledger) -> None:
    ledger.spend(STEP, "x", "y")
    head = ledger.file.with_name("ledger.jsonl.head")
    before = head.read_text()
    ledger.spend(STEP, "x", "y")
    head.write_text(before)
    ledger.spend(STEP, "x", "y")
    assert ledger.spent() == compose([STEP] * 3, DELTA)


def test_writers_at_the_same_time_spend_the_budget_once(ledger: Ledger) -> None:
    def spend(number: int) -> bool:
        try:
            Ledger(ledger.file, 1.0, DELTA).spend(STEP, "x", f"run {number}")
        except SympruneError as error:
            return "budget is spent" not in str(error)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(spend, range(12))) == 4
    assert ledger.spent() <= 1.0


def test_a_ledger_that_cannot_be_written_allows_nothing(ledger: Ledger) -> None:
    ledger.file.mkdir(parents=True)
    with pytest.raises((SympruneError, OSError)):
        ledger.spend(STEP, "x", "y")
