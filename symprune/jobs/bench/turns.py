"""Models side by side: speed, memory, size and perplexity in one run. What `symprune bench` calls.

Every model lives in a process of its own (`worker`) and takes its turns on command, so its
memory is its own and the machine's cores serve one measurement at a time. Figures are medians over
the rounds; a ratio is the median of the rounds' ratios, so that what slows a whole round cancels.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from symprune import calibration
from symprune.checkpoint.record import versions
from symprune.errors import SympruneError
from symprune.jobs.bench.process import bench_process
from symprune.jobs.estimate.forecast import Forecast, where_and_why
from symprune.machine.capacity import Capacity
from symprune.models import hub
from symprune.wording import counted

Tell = Callable[[str], None]
Tick = Callable[[int, int], None]
Watch = Callable[[int, int, str], None]
KIND = "bench"
SPEEDS = ("prefill_tokens_per_second", "decode_tokens_per_second")
FIGURES = (*SPEEDS, "first_token_seconds", "memory_bytes", "process_bytes")
CHARACTERS = 16  # of text for a token of the prompt, generously
BUSY = 0.5  # other work, in cores, that a reader of the figures should know of


@dataclass(frozen=True)
class Plan:
    """What is measured of every model. data is None where perplexity is not wanted."""

    prompt_tokens: int = 128
    new_tokens: int = 32
    rounds: int = 5
    threads: int | None = None
    data: str | None = "builtin"
    windows: int | None = 24
    seqlen: int = 512
    device: str = "auto"


@dataclass(frozen=True)
class Contender:
    """A model that takes part: as the user named it, its type, and what runs it."""

    given: str
    name: str
    dtype: str
    engine: str
    path: str

    @property
    def label(self) -> str:
        """The name without the folders around it."""
        return Path(self.name).name or self.name


class Worker(Protocol):
    """One model's process, or what stands for it in a test."""

    def ask(self, do: str, tick: Tick = ..., **about: Any) -> dict[str, Any]: ...


def read_contender(given: str, dtype: str, access: hub.Access) -> Contender:
    """What `MODEL` or `MODEL:TYPE` means. A GGUF file for which no type is asked is run by
    llama.cpp, where that is installed; with a type PyTorch runs its dequantised weights."""
    name, asked = hub.split_dtype(given, dtype)
    hub.check_dtype(asked)
    origin = hub.resolve(name, access)
    engine = "PyTorch"
    if origin.gguf_file and asked == "auto" and importlib.util.find_spec("llama_cpp"):
        engine = "llama.cpp"
    return Contender(given, name, asked, engine, str(origin))


def bench(
    models: Sequence[str],
    plan: Plan,
    dtype: str = "auto",
    tell: Tell = lambda _: None,
    watch: Watch = lambda *_: None,
    watch_eval: Tick = lambda *_: None,
    access: hub.Access | None = None,
    go_on: Callable[[Forecast], bool] = lambda _: True,
) -> dict[str, Any]:
    """Measure the models, in turns, and return the record of it. What can fail cheaply is first.
    go_on is told what it will take, from the round to warm up, and says whether to go on: if not,
    the record is empty."""
    begun = time.perf_counter()
    access = access or hub.Access()
    contenders = [read_contender(given, dtype, access) for given in models]
    _check(plan, contenders)
    threads = plan.threads or default_threads()
    prompt = calibration.text("builtin", "test")[: CHARACTERS * plan.prompt_tokens]
    busy = psutil.cpu_percent(interval=0.5) / 100 * (os.cpu_count() or 1)
    with ExitStack() as stack:
        workers: list[Worker] = []
        for contender in contenders:
            tell(f"Loading {contender.given}")
            workers.append(stack.enter_context(bench_process(contender.given, threads)))
            workers[-1].ask(
                "load", **asdict(contender), prompt=prompt, access=vars(access), threads=threads,
                prompt_tokens=plan.prompt_tokens, new_tokens=plan.new_tokens, device=plan.device,
            )  # fmt: skip
        first, seconds = warm_up(workers, plan.rounds, watch)
        spent = time.perf_counter() - begun
        if not go_on(forecast(plan, threads, first, seconds, spent)):
            return {}
        turns = take_turns(workers, plan.rounds, watch)
        rest = []
        for contender, worker in zip(contenders, workers, strict=True):
            if plan.data:
                tell(f"Perplexity of {contender.given} on {plan.data}")
            settings = {"data": plan.data, "windows": plan.windows, "seqlen": plan.seqlen}
            rest.append(worker.ask("finish", watch_eval, **settings))
    rows = [
        {
            "given": contender.given, "label": contender.label, "engine": contender.engine,
            **of_model, **summarise(mine, turns[0]),
        }
        for contender, of_model, mine in zip(contenders, rest, turns, strict=True)
    ]  # fmt: skip
    return {
        "kind": KIND,
        "plan": {**asdict(plan), "threads": threads},
        "models": rows,
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "other_work": busy},
        "versions": versions(),
        "notes": _notes(rows, contenders, busy),
    }


def warm_up(
    workers: Sequence[Worker],
    rounds: int,
    watch: Watch = lambda *_: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[dict[str, float]], float]:
    """A turn of every model that is not counted, and the seconds of them all."""
    figures, begun, total = [], clock(), (rounds + 1) * len(workers)
    for place, worker in enumerate(workers):
        figures.append(worker.ask("turn"))
        watch(place + 1, total, "warming up")
    return figures, clock() - begun


def take_turns(
    workers: Sequence[Worker], rounds: int, watch: Watch = lambda *_: None
) -> list[list[dict[str, float]]]:
    """Every model's turns: `rounds` of them, in each of which every model has one."""
    turns: list[list[dict[str, float]]] = [[] for _ in workers]
    total = (rounds + 1) * len(workers)
    for number in range(1, rounds + 1):
        for place, (worker, taken) in enumerate(zip(workers, turns, strict=True)):
            taken.append(worker.ask("turn"))
            watch(number * len(workers) + place + 1, total, f"round {number} of {rounds}")
    return turns


def forecast(
    plan: Plan,
    threads: int,
    figures: Sequence[Mapping[str, float]],
    seconds: float,
    spent: float,
    folder: Path = Path(),
) -> Forecast:
    """What is left of a bench, from a turn of every model: windows of text are read as fast as its
    prompt was. Each process holds its model already, and none is written."""
    steps = {"rounds": plan.rounds * seconds}
    if plan.data and plan.windows:
        tokens = plan.windows * plan.seqlen
        steps["perplexity"] = sum(tokens / each[SPEEDS[0]] for each in figures)
    device = hub.pick_device(plan.device)
    held = int(sum(each["process_bytes"] for each in figures))
    models, turn = counted(len(figures), "model"), f"{plan.prompt_tokens} + {plan.new_tokens}"
    what = f"{models} in {plan.rounds} rounds of {turn} tokens"
    if plan.data:
        what += f", perplexity on {plan.windows} windows of {plan.data}"
    where = f"{where_and_why(device, plan.device)}, {counted(threads, 'thread')} each"
    return Forecast(what, where, Capacity.of(folder, device), steps, spent, held, held)


def summarise(
    turns: Sequence[Mapping[str, float]], first: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Medians over a model's turns, all of them, and how many times as fast as the first model."""
    found: dict[str, Any] = {name: statistics.median(t[name] for t in turns) for name in FIGURES}
    for name in SPEEDS:
        ratios = [mine[name] / theirs[name] for mine, theirs in zip(turns, first, strict=True)]
        found[f"{name.removesuffix('_tokens_per_second')}_times_first"] = statistics.median(ratios)
    return {**found, "turns": [dict(turn) for turn in turns]}


def default_threads() -> int:
    """OMP_NUM_THREADS where it is set, else the physical cores this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(here or 1, psutil.cpu_count(logical=False) or here or 1))


def _check(plan: Plan, contenders: Sequence[Contender]) -> None:
    """Whatever of a plan no model could do."""
    twice = {c.given for c in contenders if [o.given for o in contenders].count(c.given) > 1}
    if twice:
        raise SympruneError(f"{min(twice)} is named twice; name each model once.")
    if plan.data:
        calibration.text(plan.data, "test")
    if any(contender.engine == "PyTorch" for contender in contenders):
        hub.pick_device(plan.device)


def _notes(
    rows: Sequence[Mapping[str, Any]], contenders: Sequence[Contender], busy: float
) -> list[str]:
    notes = []
    files = [c.given for c in contenders if c.path.endswith(".gguf") and c.engine == "PyTorch"]
    if files and not importlib.util.find_spec("llama_cpp"):
        notes.append(
            f"{', '.join(files)}: PyTorch runs the dequantised weights; to run GGUF files as they "
            "are, install llama-cpp-python."
        )
    texts = {row["perplexity"]["tokens"] for row in rows if row.get("perplexity")}
    if len(texts) > 1:
        notes.append("The models have different tokenizers: perplexities cannot be compared.")
    for row in rows:
        notes += [note for note in row.get("notes", []) if note not in notes]
    if busy > BUSY:
        notes.append(f"Other work kept {busy:.1f} cores busy before the run: compare ratios only.")
    return notes


def _processor() -> str:
    """What the processor calls itself, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
