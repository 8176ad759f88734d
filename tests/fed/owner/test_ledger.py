"""The privacy ledger: what was spent stays spent, and nobody who is not root can make it forget."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from symprune.errors import SympruneError
from symprune.fed.owner.guard import guard_of, guard_of_text, ledger_of
from symprune.fed.owner.ledger import Ledger
from symprune.fed.owner.places import places_of
from symprune.fed.owner.policy import Policy
from symprune.fed.privacy import CLIENT, Release, compose, noise_multiplier

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


def test_one_file_has_one_budget_however_it_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    rows = folder / "rows.jsonl"
    rows.write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to(rows)
    os.link(rows, tmp_path / "hard.jsonl")
    spellings = ["data/rows.jsonl", str(rows), f"libsvm:{rows}", f"{folder}/./rows.jsonl:answer"]
    spellings += ["link.jsonl", "hard.jsonl", str(folder), f"builtin*0.1 + {rows}*0.9"]
    policy = Policy(epsilon=1.0)
    for spelled in spellings[:4]:
        ledger_of(policy, spelled).spend(STEP, "x", "y")
    for spelled in spellings:
        with pytest.raises(SympruneError, match="budget is spent"):
            ledger_of(policy, spelled).spend(STEP, "x", "y")
    (folder / "other.txt").write_text("other")
    ledger_of(policy, str(folder / "other.txt")).spend(STEP, "x", "y")
    assert ledger_of(policy, "a9a").spent() == 0


def test_a_column_or_function_is_no_other_data() -> None:
    assert places_of("hf:org/name:text") == places_of("hf:org/name")
    assert places_of("module:one") == places_of("module:other")
    assert places_of("hf:org/name") != places_of("hf:org/other")


def test_training_and_pruning_spend_one_budget(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("1 1:1\n")
    policy = Policy(epsilon=2.0)
    pruning = guard_of_text({}, str(file))
    training = guard_of({}, f"libsvm:{file}")
    for guard in (pruning, training):
        replace(guard, policy=policy).spend(Release(1.0, 4.0), "x", "y")
    assert ledger_of(policy, str(file)).spent() == compose([Release(1.0, 4.0, 2)], DELTA)


def test_a_clients_releases_count_for_its_rows_with_half_their_noise(ledger: Ledger) -> None:
    """A row that changes may turn a clipped change round: that is twice its length."""
    about_clients = Release(0.5, 4.0, 2, CLIENT)
    ledger.spend(about_clients, "x", "y")
    assert ledger.spent() == compose([about_clients], DELTA)
    rows = Release(1.0, 20.0)
    wider = Ledger(ledger.file, 50.0, DELTA)
    wider.spend(rows, "x", "y")
    assert wider.spent() == compose([Release(0.5, 2.0, 2), rows], DELTA)
    assert wider.spent() > compose([about_clients, rows], DELTA)
