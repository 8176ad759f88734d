"""How fast packed matrices multiply: sparse and dense, against torch, on one thread, in one run.

Every contestant multiplies a matrix of 44032 x 4096 (random weights, random masks); rounds are
taken in turns and medians are shown. Times are those of the processor, so other work on the machine
matters less.

    python scripts/bench_sparse.py [--rows 44032] [--columns 4096] [--rounds 9] [--json]
                                   [--only token,avx2,tokens,prompt,threads]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from symprune.runtime.blob import encode_codes, encode_floats
from symprune.runtime.layout import BITS, FLOATS
from symprune.runtime.multiply import force_level, level, levels, multiply

SPARSITIES = (50, 60, 70)
SECTIONS = ("token", "avx2", "tokens", "prompt", "threads")
# At least so many times as fast as torch's dense bfloat16, at 50, 60 and 70 %.
TARGETS = {"bfloat16": (1.7, 2.0, 2.4), "int8": (3.3, 3.8, 4.3), "int4": (4.5, 5.0, 5.5)}
# At least so many times as fast as our own dense kernel of the same kind, at 50 %.
OWN_TARGETS = {"bfloat16": 1.8, "int4": 1.35}
AVX2_TARGETS = (1.3, 1.6, 1.9)

Work = Callable[[], object]


@dataclass
class Matrices:
    """The contestants' weights, made when first asked for."""

    rows: int
    columns: int
    made: dict[str, Tensor] = field(default_factory=dict)

    def dense(self, dtype: torch.dtype) -> Tensor:
        name = str(dtype)
        if name not in self.made:
            generator = torch.Generator().manual_seed(0)
            weight = torch.randn(self.rows, self.columns, generator=generator)
            self.made[name] = weight.to(dtype)
        return self.made[name]

    def packed(self, kind: str, sparsity: int) -> Tensor:
        name = f"{kind} {sparsity}"
        if name not in self.made:
            self.made[name] = self.pack(kind, sparsity)
        return self.made[name]

    def pack(self, kind: str, sparsity: int) -> Tensor:
        generator = torch.Generator().manual_seed(sparsity)
        keep = None
        if sparsity:
            keep = torch.rand(self.rows, self.columns, generator=generator) >= sparsity / 100
        if kind in FLOATS:
            weight = self.dense(FLOATS[kind])
            # Not a product: a pruned weight is +0, never -0.
            return encode_floats([weight if keep is None else weight.where(keep, 0)])
        lowest = 1 if kind == "int8" else 0
        codes = torch.empty(self.rows, self.columns, dtype=torch.uint8)
        codes.random_(lowest, 2 ** BITS[kind], generator=generator)
        scales = torch.rand(self.rows, -(-self.columns // 64), generator=generator).bfloat16()
        return encode_codes([(codes, scales, keep)], kind)


def in_turns(
    works: dict[str, Work],
    rounds: int,
    clock: Callable[[], float] = time.thread_time,
    pick: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Milliseconds of each, the median over rounds in which everyone has a turn."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            begin = clock()
            work()
            if number:  # the first is for the caches
                times[name].append(1000 * (clock() - begin))
    return {name: pick(each) for name, each in times.items()}


def packed_works(matrices: Matrices, kinds: list[tuple[str, int]], x: Tensor) -> dict[str, Work]:
    def work(blob: Tensor) -> Work:
        return lambda: multiply(blob, x)

    return {f"{kind} {share}": work(matrices.packed(kind, share)) for kind, share in kinds}


def at_level(name: str, work: Work) -> Work:
    """The same with lesser instructions."""

    def forced() -> object:
        before = level()
        force_level(name)
        result = work()
        force_level(before)
        return result

    return forced


def dynamic_int8(columns: int, rows: int) -> torch.nn.Module:
    """torch's own int8 linear, weights and inputs quantised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False))
        return torch.ao.quantization.quantize_dynamic(linear, dtype=torch.qint8)


def one_token(matrices: Matrices, rounds: int) -> dict[str, float]:
    x = torch.randn(1, matrices.columns)
    narrow, wide, half = x.bfloat16(), matrices.dense(torch.float32), matrices.dense(torch.bfloat16)
    integer = dynamic_int8(matrices.columns, matrices.rows)
    kinds = [(kind, share) for kind in ("bfloat16", "int8", "int4") for share in (0, *SPARSITIES)]
    works: dict[str, Work] = {
        "torch float32": lambda: F.linear(x, wide),
        "torch bfloat16": lambda: F.linear(narrow, half),
        "torch dynamic int8": lambda: integer(x),
        "reading": lambda: wide.view(torch.int64).sum(),
    }
    works |= packed_works(matrices, [*kinds, ("int3", 0), ("int3", 50), ("int2", 50)], narrow)
    return in_turns(works, rounds)


def forced_avx2(matrices: Matrices, rounds: int) -> dict[str, float]:
    kinds = [(kind, share) for kind in ("bfloat16", "int8", "int4") for share in (0, *SPARSITIES)]
    works = packed_works(matrices, kinds, torch.randn(1, matrices.columns).bfloat16())
    return in_turns({name: at_level("avx2", work) for name, work in works.items()}, rounds)


def torch_work(x: Tensor, weight: Tensor) -> Work:
    return lambda: F.linear(x, weight)


def more_tokens(matrices: Matrices, rounds: int, counts: tuple[int, ...]) -> dict[str, float]:
    found = {}
    kinds = [(kind, 50) for kind in ("bfloat16", "int8", "int4")]
    for count in counts:
        x = torch.randn(count, matrices.columns).bfloat16()
        works = {"torch bfloat16": torch_work(x, matrices.dense(torch.bfloat16))}
        if counts[-1] >= 512:
            works["torch float32"] = torch_work(x.float(), matrices.dense(torch.float32))
        works |= packed_works(matrices, kinds, x)
        times = in_turns(works, rounds)
        found |= {f"{name}, {count}": value for name, value in times.items()}
    return found


def on_threads(matrices: Matrices, rounds: int) -> dict[str, float]:
    """Alone and in turns with torch's own work: two pools of threads would fight. By the clock, so
    of many rounds the best: threads wait for each other whenever something else has a core."""
    x = torch.randn(1, matrices.columns).bfloat16()
    blob, weight = matrices.packed("int8", 50), matrices.dense(torch.bfloat16)[:4096]
    found = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        works: dict[str, Work] = {
            "int8 50": lambda: multiply(blob, x),
            "torch": lambda: F.linear(x, weight),
            "both in turns": lambda: (multiply(blob, x), F.linear(x, weight)),
        }
        times = in_turns(works, 30 * rounds, time.perf_counter, min)
        found |= {f"{name}, {threads} threads": value for name, value in times.items()}
    torch.set_num_threads(1)
    return found


def show_token(matrices: Matrices, times: dict[str, float], console: Console) -> None:
    dense = times["torch bfloat16"]
    table = Table(title=f"{matrices.rows} x {matrices.columns}, one token, {level()}")
    for column in ("", "ms", "GB/s", "over torch bf16", "target", "over own dense", "target"):
        table.add_column(column, justify="left" if not column else "right")
    for name, value in times.items():
        kind, _, share = name.partition(" ")
        size = matrices.made.get(name)
        speed = "" if size is None else f"{size.numel() / value / 1e6:.1f}"
        if name == "reading":
            speed = f"{4 * matrices.rows * matrices.columns / value / 1e6:.1f}"
        target = own = own_target = ""
        if share.isdigit() and share != "0":
            at = SPARSITIES.index(int(share))
            target = f"{TARGETS[kind][at]}" if kind in TARGETS else ""
            if f"{kind} 0" in times:
                own = f"{times[f'{kind} 0'] / value:.2f}"
            if share == "50":
                own_target = f"{OWN_TARGETS.get(kind, '')}"
        table.add_row(
            _label(name), f"{value:.2f}", speed, f"{dense / value:.2f}", target, own, own_target
        )
    console.print(table)
    ratio = times["torch dynamic int8"] / times["int8 50"]
    console.print(f"sparse int8 at 50 % over torch's dynamic int8: {ratio:.2f} (target 1.15)")


def show_avx2(times: dict[str, float], console: Console) -> None:
    table = Table(title="one token, forced avx2")
    for column in ("", "ms", "over own dense", "target"):
        table.add_column(column, justify="left" if not column else "right")
    for name, value in times.items():
        kind, _, share = name.partition(" ")
        sparse = share != "0"
        target = AVX2_TARGETS[SPARSITIES.index(int(share))] if sparse and kind == "bfloat16" else ""
        own = f"{times[f'{kind} 0'] / value:.2f}" if sparse else ""
        table.add_row(_label(name), f"{value:.2f}", own, str(target))
    console.print(table)


def show_tokens(times: dict[str, float], title: str, console: Console) -> None:
    counts = list(dict.fromkeys(name.split(", ")[1] for name in times))
    table = Table(title=title)
    table.add_column("ms (over torch bf16)")
    for count in counts:
        table.add_column(f"{count} tokens", justify="right")
    for name in dict.fromkeys(name.split(", ")[0] for name in times):
        cells = []
        for count in counts:
            value, dense = times[f"{name}, {count}"], times[f"torch bfloat16, {count}"]
            cells.append(f"{value:.1f} ({dense / value:.2f})")
        table.add_row(_label(name), *cells)
    console.print(table)


def show_threads(times: dict[str, float], console: Console) -> None:
    table = Table(title="milliseconds by the clock, the best round")
    for column in ("", "1 thread", "2 threads"):
        table.add_column(column, justify="left" if not column else "right")
    for name in dict.fromkeys(name.split(", ")[0] for name in times):
        table.add_row(_label(name), *(f"{times[f'{name}, {n} threads']:.2f}" for n in (1, 2)))
    console.print(table)


def _label(name: str) -> str:
    kind, _, share = name.partition(" ")
    if kind not in BITS:
        return name
    return f"dense {kind}" if share == "0" else f"sparse {kind}, {share} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=44032)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--json", action="store_true", help="print JSON and no tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(quiet=options.json)
    matrices = Matrices(options.rows, options.columns)
    wanted = options.only.split(",")
    found: dict[str, object] = {"rows": options.rows, "columns": options.columns, "level": level()}
    with torch.inference_mode():
        if "token" in wanted:
            found["token"] = times = one_token(matrices, options.rounds)
            show_token(matrices, times, console)
        if "avx2" in wanted and "avx2" in levels():
            found["avx2"] = times = forced_avx2(matrices, options.rounds)
            show_avx2(times, console)
        if "tokens" in wanted:
            found["tokens"] = times = more_tokens(matrices, options.rounds, (2, 4, 8, 16, 32))
            show_tokens(times, "a few tokens", console)
        if "prompt" in wanted:
            found["prompt"] = times = more_tokens(matrices, 3, (128, 512))
            show_tokens(times, "a prompt (at most 1.15 times the faster dense one)", console)
        if "threads" in wanted:
            found["threads"] = times = on_threads(matrices, options.rounds)
            show_threads(times, console)
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
