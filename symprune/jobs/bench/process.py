"""The other end of a bench worker's pipe: starts the process, asks it, and sees it off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from symprune.errors import SympruneError

PATIENCE = 10  # seconds a process that was told to end may take


@contextmanager
def bench_process(name: str, threads: int) -> Iterator[BenchProcess]:
    """A process that holds one model and measures it when asked; it ends with the block.

    It has the number of threads it may use in its environment before any library starts some.
    """
    with tempfile.TemporaryFile(mode="w+", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "symprune.jobs.bench.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for the one that shows the figures
        )  # fmt: skip
        try:
            yield BenchProcess(name, process, said)
        except BaseException:
            process.kill()
            raise
        finally:
            try:
                process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


class BenchProcess:
    """The process, as `bench.Worker`: a question and its answer are one line of JSON each."""

    def __init__(self, name: str, process: subprocess.Popen[str], said: IO[str]) -> None:
        self.name, self._process, self._said = name, process, said

    def ask(
        self, do: str, tick: Callable[[int, int], None] = lambda *_: None, **about: Any
    ) -> dict[str, Any]:
        """The answer to a question, or the sentence it gave instead; `tick` hears of the way."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **about}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._explain(do) from None
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise SympruneError(answer["error"])
            if "tick" not in answer:
                return answer
            tick(*answer["tick"])
        raise self._explain(do)

    def _explain(self, do: str) -> SympruneError:
        """Why a process is gone."""
        code = self._process.wait()
        if code < 0:
            why = f"it was ended by signal {-code}, as the system does when memory runs out"
        else:
            self._said.seek(0)
            lines = self._said.read().strip().splitlines()
            why = lines[-1] if lines else f"exit code {code}"
        return SympruneError(f"The process that measures {self.name} failed at {do!r}: {why}")
