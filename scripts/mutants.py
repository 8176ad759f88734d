"""Do the tests notice? Faults are put into a copy of the code, one at a time, and the fitting tests
are run on it: a fault is killed when a test fails, and survives when all pass.

    .venv/bin/python scripts/mutants.py                     # all faults, which takes a while
    .venv/bin/python scripts/mutants.py --only dsnot        # those whose file or words have it

faults/*.yaml lists them: file, old (text that stands in it exactly once), new, tests, and broken,
one sentence about what the fault does to the user. The run fails when fewer than 90 % are killed,
and at once when a fault's text no longer stands in its file or the tests fail without any fault.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).resolve().parent / "faults"
LEFT_BEHIND = (".*", "build", "dist", "out", "__pycache__", "*.egg-info", "site")
LEAST_KILLED = 0.9
LONGEST = 900  # seconds; a fault that makes a test hang is killed, too
KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"
PASSED, FAILED, NO_ANSWER = 0, 1, 70  # pytest's exit codes, and any other


@dataclass(frozen=True)
class Fault:
    """One wrong line: in `file`, `old` becomes `new`, and one of `tests` should fail."""

    file: str
    broken: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_faults() -> list[Fault]:
    """All that are listed, in the order of the list."""
    found = []
    for path in sorted(FAULTS.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            found.append(Fault(**{**entry, "tests": tuple(entry["tests"].split())}))
    return found


def find_stale(faults: list[Fault], root: Path = ROOT) -> list[str]:
    """A sentence for every fault that cannot be put into the code, or has no tests to notice it."""
    sentences = []
    for fault in faults:
        file = root / fault.file
        count = file.read_text(encoding="utf-8").count(fault.old) if file.is_file() else 0
        if count != 1:
            sentences.append(f"{fault.file} has {count} times, not once: {fault.old!r}.")
        if fault.old == fault.new:
            sentences.append(f"{fault.file} is not changed by: {fault.broken}")
        missing = [test for test in fault.tests if not (root / test.split("::")[0]).exists()]
        sentences += [f"There is no {test} to notice: {fault.broken}" for test in missing]
    return sentences


def copy_code(folder: Path) -> Path:
    """The repository without what is made from it, with fed/ and eval/ under the names they are
    imported by."""
    copy = folder / "symprune-with-a-fault"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    for part in ("fed", "eval"):
        (copy / "symprune" / part).symlink_to(copy / part)
    return copy


def load_libraries() -> None:
    """Once, for all runs to come: most of a short run's time. None of ours, which have faults."""
    for name in ("datasets", "hypothesis", "safetensors.torch", "sklearn.datasets", "torch"):
        importlib.import_module(name)
    for name in ("llama", "gpt2", "opt", "mixtral"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def run_tests(copy: Path, tests: list[str]) -> tuple[int | None, str]:
    """pytest's exit code, None when it took too long, and the end of what it said.

    In a process of its own, which finds the copy when it imports symprune, and with a session of
    its own, so that nothing it started is left.
    """
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os._exit(_run_in_copy(copy, tests, said.fileno()))
        end = time.monotonic() + LONGEST
        found, status = os.waitpid(child, os.WNOHANG)
        while not found and time.monotonic() < end:
            time.sleep(0.05)
            found, status = os.waitpid(child, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not found:
            os.waitpid(child, 0)
            return None, "It took too long."
        said.seek(0)
        text = said.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(status), text[-2000:]


def _run_in_copy(copy: Path, tests: list[str], output: int) -> int:
    """pytest's exit code; of anything that escapes it, one that no test has."""
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        sys.path.insert(0, str(copy))
        _check_copy(copy)
        code = int(pytest.main(["-x", "-p", "no:cacheprovider", *tests]))
        sys.stdout.flush()
        return code
    except BaseException:
        os.write(output, traceback.format_exc().encode())
        return NO_ANSWER


def _check_copy(copy: Path) -> None:
    """Fail unless all three parts are imported from the copy."""
    for name in ("symprune", "symprune.fed", "symprune.eval"):
        found = importlib.util.find_spec(name)
        if found is None or not str(found.origin).startswith(str(copy)):
            raise ImportError(f"{name} is not imported from {copy}, but from {found}.")


def try_fault(copy: Path, fault: Fault) -> tuple[str, str]:
    """Put the fault in, run its tests, take it out; what became of it, and why."""
    file = copy / fault.file
    whole = file.read_text(encoding="utf-8")
    try:
        _write(file, whole.replace(fault.old, fault.new))
        code, said = run_tests(copy, list(fault.tests))
    finally:
        _write(file, whole)
    if code in (FAILED, None):
        return KILLED, _first_failure(said)
    return (SURVIVED, "") if code == PASSED else (BROKEN, said)


def _write(file: Path, text: str) -> None:
    """What was compiled from the file before goes: Python tells two texts of one length and one
    second apart by neither."""
    file.write_text(text, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _first_failure(said: str) -> str:
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].split("::", 1)[-1] if failed else said.strip()


def try_all(faults: list[Fault], copy: Path, console: Console) -> dict[Fault, tuple[str, str]]:
    tests = sorted({test for fault in faults for test in fault.tests})
    console.print(f"Without a fault: {len(tests)} files of tests")
    code, said = run_tests(copy, tests)
    if code != PASSED:
        sys.exit(f"The tests fail without any fault.\n{said}")
    found = {}
    for number, fault in enumerate(faults, 1):
        start = time.monotonic()
        found[fault] = became, why = try_fault(copy, fault)
        seconds = time.monotonic() - start
        line = f"{number}/{len(faults)} {became} ({seconds:.0f} s) {fault.file}: {fault.broken}"
        console.print(line, markup=False, highlight=False)
        if became == BROKEN:
            console.print(why, markup=False, highlight=False)
    return found


def show(found: dict[Fault, tuple[str, str]], console: Console) -> bool:
    """The table of all faults; whether enough of them are killed."""
    table = Table("", "file", "what is broken", "the test that says so", show_lines=True)
    for fault, (became, why) in found.items():
        table.add_row(became, fault.file, fault.broken, why if became == KILLED else "")
    console.print(table, markup=False)
    killed = sum(became == KILLED for became, _ in found.values())
    broken = sum(became == BROKEN for became, _ in found.values())
    console.print(f"{killed} of {len(found)} faults killed ({100 * killed / len(found):.0f} %).")
    if broken:
        console.print(f"{broken} kept the tests from running at all, which says nothing.")
    return not broken and killed >= LEAST_KILLED * len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put faults into a copy and run its tests.")
    parser.add_argument("--only", default="", help="faults whose file or words have this")
    only = parser.parse_args().only
    faults = [f for f in read_faults() if only in f"{f.file} {f.broken}"]
    stale = find_stale(faults)
    if stale or not faults:
        sys.exit("\n".join(stale) or f"No fault has {only!r}.")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="symprune-mutants-") as folder:
        copy = copy_code(Path(folder).resolve())
        load_libraries()
        found = try_all(faults, copy, console)
    sys.exit(0 if show(found, console) else 1)


if __name__ == "__main__":
    main()
