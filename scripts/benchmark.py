"""Speed and memory of the pruning engine, as ratios within one run.

    python scripts/benchmark.py [selection] [sampling] [statistics] [refinement] [frontier] [engine]
                                [memory] [waits] [types] [gram]

Absolute times depend on the machine and on what else runs there; the ratios are what is promised.
Every figure is the best of a few repetitions, the two sides of a ratio taken in turns; the whole
prune phase, which is long enough to meet other work, is the median of five rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from random_checkpoint import config, make_checkpoint
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from symprune import criteria, masks
from symprune.engine import forward, walk
from symprune.engine.collect import collect
from symprune.gram import GramSum
from symprune.machine import compute
from symprune.masks import Pattern
from symprune.models.layout import find_layout
from symprune.recipe import Recipe
from symprune.refine import dsnot
from symprune.refine.swap import swap
from symprune.stats import GRAM, MOMENTS, SQUARE, ChannelStats, Needs
from symprune.update import UPDATES
from symprune.update.alternating import MaskOf, alternate
from symprune.update.least_squares import LeastSquares, least_squares

console = Console(width=110)


def in_turns(
    *jobs: Callable[[], object], repeat: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """The times of every job, the jobs run in turns."""
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(repeat):
        for job, taken in zip(jobs, times, strict=True):
            start = clock()
            job()
            taken.append(clock() - start)
    return times


def best(first: Callable[[], object], second: Callable[[], object], repeat: int = 3) -> list[float]:
    """The shortest time of each of two jobs, run in turns."""
    return [min(taken) for taken in in_turns(first, second, repeat=repeat)]


def sorted_mask(score: Tensor, count: int) -> Tensor:
    """What reference implementations do: a full sort, then a scatter."""
    order = torch.sort(score, dim=-1).indices
    return torch.ones_like(score, dtype=torch.bool).scatter_(-1, order[..., :count], False)


def selection() -> None:
    """Mask selection on a 4096 x 11008 score against sorting it."""
    score = torch.rand(4096, 11008, generator=torch.Generator().manual_seed(0))
    flat, groups = score.flatten(), score.view(-1, 4)
    table = Table("4096 x 11008, 50 %", "sort + scatter", "symprune", "times faster")
    rows: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("row", lambda: sorted_mask(score, 5504), lambda: masks.keep_by_row(score, 0.5)),
        (
            "layer",
            lambda: sorted_mask(flat, flat.numel() // 2),
            lambda: masks.keep_by_layer(score, 0.5),
        ),
        ("2:4", lambda: sorted_mask(groups, 2), lambda: masks.keep_n_of_m(score, Pattern(2, 4))),
    ]
    for name, reference, ours in rows:
        slow, fast = best(reference, ours)
        table.add_row(name, f"{slow:.2f} s", f"{fast:.2f} s", f"{slow / fast:.1f}")
    console.print(table)


def sampling() -> None:
    """stochRIA's two ways of sampling against the full sums of RIA."""
    weight = torch.randn(4096, 11008, generator=torch.Generator().manual_seed(0))
    norms = {"input_norm": torch.rand(11008), "generator": torch.Generator().manual_seed(0)}
    table = Table("score of 4096 x 11008", "time", "times RIA's")
    for name in ("independent", "shared"):
        full, sampled = best(
            lambda: criteria.get("ria")(weight, norms),
            lambda name=name: criteria.get("stochria")(weight, norms, {"sampling": name}),
        )
        table.add_row(f"stochria, {name}", f"{sampled:.2f} s", f"{sampled / full:.2f}")
    table.add_row("ria", f"{full:.2f} s", "1.00")
    console.print(table)


def llama(blocks: int, hidden: int, intermediate: int) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def statistics() -> None:
    """What measuring adds to a block's forward: its four distinct inputs, added to statistics."""
    table = Table("one block, 4 x 512 tokens", "forward", "statistics", "added")
    for hidden, intermediate in ((1024, 2816), (2048, 5504)):
        model = llama(1, hidden, intermediate)
        layout = find_layout(model)
        with forward.ready(model):
            activations = forward.embed(layout, torch.randint(0, 512, (4, 512)))
            block, found = layout.blocks[0], layout.matrices(0)
            squares = Needs(frozenset({SQUARE}))
            first = collect(activations, 0, block, found, squares, samples=range(1))
            seen = first.inputs.values()
            widths = [stats.channels for stats in {id(each): each for each in seen}.values()]
            inputs = [(torch.randn(1, 512, width), ChannelStats(width)) for width in widths]

            def run_block(
                block: torch.nn.Module = block, a: forward.Activations = activations
            ) -> None:
                for samples in a.batches():
                    a.run(0, block, samples)

            def measure(pairs: list[tuple[Tensor, ChannelStats]] = inputs) -> None:
                for _ in range(4):
                    for x, stats in pairs:
                        stats.add(x)

            plain, measured = best(run_block, measure, repeat=7)
        added = f"{100 * measured / plain:.1f} %"
        table.add_row(f"width {hidden}", f"{plain:.3f} s", f"{measured:.3f} s", added)
    console.print(table)


def refinement() -> None:
    """Refining a 4096 x 4096 layer against one `torch.topk` over its scores."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, 4096, generator=generator)
    stats = ChannelStats(4096, (SQUARE, MOMENTS))
    stats.add(torch.randn(2, 256, 4096, generator=generator) + 0.1)
    score = weight.abs() * stats.norm
    keep, two_of_four = masks.keep_by_row(score, 0.5), masks.keep_n_of_m(score, Pattern(2, 4))
    relative = dsnot.Keys(grow_relative=True, gamma2=1e-4)
    rows: list[tuple[str, Callable[[], object]]] = [
        ("dsnot, published", lambda: dsnot.dsnot(weight, keep, stats)),
        ("dsnot, improving", lambda: dsnot.dsnot(weight, keep, stats, accept="improving")),
        ("r2-dsnot", lambda: dsnot.dsnot(weight, keep, stats, keys=relative)),
        ("dsnot, 2:4", lambda: dsnot.dsnot(weight, two_of_four, stats, pattern=Pattern(2, 4))),
    ]
    table = Table("4096 x 4096, 50 %", "topk of 2048", "refine", "times topk")
    for name, job in rows:
        topk, ours = best(lambda: torch.topk(score, 2048, dim=1), job)
        table.add_row(name, f"{topk:.2f} s", f"{ours:.2f} s", f"{ours / topk:.1f}")
    console.print(table)


def frontier() -> None:
    """Swaps and updates of a 4096 x 4096 layer in multiples of one product W @ G."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, 4096, generator=generator)
    x = torch.randn(8192, 4096, generator=generator)
    x += x.roll(1, 1)  # neighbouring channels are correlated
    stats = ChannelStats(4096, [GRAM])
    stats.add(x)
    gram, score = stats.gram, weight.abs() * x.norm(dim=0)
    keep, two_of_four = masks.keep_by_row(score, 0.5), masks.keep_n_of_m(score, Pattern(2, 4))

    def mask_of(values: Tensor, share: float) -> Tensor:
        return masks.keep_by_row(values.abs() * x.norm(dim=0), round(0.5 * share, 6))

    rows: list[tuple[str, Callable[[], object]]] = [
        ("60 swaps a row", lambda: swap(weight, keep, gram)),
        ("60 swaps a row, 2:4", lambda: swap(weight, two_of_four, gram, pattern=Pattern(2, 4))),
        ("lsq, 20 steps", lambda: least_squares(weight, keep, gram, tolerance=0)),
        ("4 rounds", lambda: alternate(weight, gram, mask_of, rounds=4)),
    ]
    table = Table("4096 x 4096, 50 %", "W @ G", "time", "products")
    for name, job in rows:
        product, ours = best(lambda: weight @ gram, job, repeat=2)
        table.add_row(name, f"{product:.2f} s", f"{ours:.2f} s", f"{ours / product:.1f}")
    console.print(table)
    bound_of_rounds()


def bound_of_rounds() -> None:
    """Eight rounds against the products W @ G they cannot do without: one for every step,
    one more for every round. Processor time, so that other work shows less."""
    fit = LeastSquares(rounds=8, iters=10)
    needed = fit.rounds + (fit.rounds - 1) * fit.round_iters + fit.iters
    table = Table(f"{fit.rounds} rounds, 50 %", "W @ G", "rounds", "products", "times the bound")
    for rows, columns in ((1536, 576), (576, 1536), (4096, 4096)):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(rows, columns, generator=generator)
        x = torch.randn(2 * columns, columns, generator=generator)
        x += x.roll(1, 1)
        gram, norms = x.T @ x, {"input_norm": x.norm(dim=0)}

        def mask_of(
            values: Tensor, share: float, norms: dict[str, Tensor] = norms, half: int = columns // 2
        ) -> Tensor:
            return masks.drop_lowest(criteria.get("wanda")(values, norms), int(share * half))

        def rounds(weight: Tensor = weight, gram: Tensor = gram, mask_of: MaskOf = mask_of) -> None:
            steps = {"iters": fit.round_iters, "last_iters": fit.iters}
            alternate(weight, gram, mask_of, rounds=fit.rounds, shrink=0.1, **steps)

        room = torch.empty_like(weight)
        products = lambda w=weight, g=gram, out=room: torch.mm(w, g, out=out)  # noqa: E731
        repeat = 3 if columns > 2000 else 9
        one, all_rounds = in_turns(products, rounds, repeat=repeat, clock=time.process_time)
        ratio = min(all_rounds) / min(one)
        table.add_row(
            f"{rows} x {columns}", f"{min(one):.3f} s", f"{min(all_rounds):.2f} s",
            f"{ratio:.1f} for {needed}", f"{ratio / needed:.2f}",
        )  # fmt: skip
    console.print(table)


def whole_engine() -> None:
    """The whole prune phase against the two forward passes it needs."""
    model = llama(2, 1024, 2816)
    layout, tokens = find_layout(model), torch.randint(0, 512, (32, 512))

    def two_passes() -> None:
        with forward.ready(model):
            activations = forward.embed(layout, tokens)
            for index, block in enumerate(layout.blocks):
                for samples in activations.batches():
                    activations.run(index, block, samples)
                if index + 1 < len(layout.blocks):
                    activations.advance(index, block)

    table = Table("2 blocks of width 1024, 32 x 512 tokens", "two passes", "prune", "ratio")
    methods = ("wanda", "ria", "symwanda", "stochria")
    runs = [lambda m=method: walk.prune(model, tokens, Recipe(method=m)) for method in methods]
    passes, *times = in_turns(two_passes, *runs, repeat=5)
    for method, prune in zip(methods, times, strict=True):
        ratios = [ours / theirs for ours, theirs in zip(prune, passes, strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table.add_row(method, f"{min(passes):.2f} s", f"{min(prune):.2f} s", spread)
    console.print(table)


MEMORY_PROBE = """
import sys, torch
sys.path.insert(0, {folder!r})
from benchmark import llama, Recipe
from symprune.engine import walk
from symprune.machine.memory import peak
model = llama({blocks}, 256, 704)
tokens = torch.randint(0, 512, ({samples}, 512))
walk.prune(model, tokens[:1], Recipe())
before = peak()
walk.prune(model, tokens, Recipe())
print(peak() - before)
"""


def memory() -> None:
    """Peak memory above a loaded model that has been walked once, against the hidden states."""
    table = Table("width 256, 512 tokens a sample", "hidden states", "peak above", "copies")
    for blocks, samples in ((2, 128), (6, 128), (2, 256)):
        code = MEMORY_PROBE.format(folder=sys.path[0], blocks=blocks, samples=samples)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        peak, states = int(done.stdout.split()[-1]), samples * 512 * 256 * 4
        table.add_row(
            f"{blocks} blocks, {samples} samples",
            f"{states / 1e6:.0f} MB",
            f"{peak / 1e6:.0f} MB",
            f"{peak / states:.2f}",
        )
    console.print(table)


def waits() -> None:
    """How often the host waits for an accelerator, counted on the tests' pretend device."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from pretend_device import PretendDevice

    dense, tokens = llama(2, 64, 176), torch.randint(0, 512, (4, 32))
    dsnot = {"name": "dsnot", "layers": "all"}
    methods = ("magnitude", "wanda", "ria", "symwanda", "stochria")
    recipes = [Recipe(method=method) for method in methods]
    recipes += [Recipe(method="wanda", group="layer"), Recipe(method="wanda", pattern="2:4")]
    recipes += [Recipe(method="wanda", allocate=name) for name in ("owl", "error")]
    recipes += [Recipe(method="wanda", refine=refine) for refine in (dsnot, "swap")]
    recipes += [Recipe(method="wanda", update=update) for update in UPDATES]
    table = Table("host waits for an accelerator", "a matrix", "a matrix, errors reported")
    for recipe in recipes:
        counts = []
        for report_error in (False, True):
            with PretendDevice() as device:
                model = device.take(dense)
                report = walk.prune(model, tokens, recipe, report_error=report_error)
            counts.append(device.own_waits / len(report.layers))
        table.add_row(recipe.describe(), *(f"{count:.1f}" for count in counts))
    console.print(table)


TYPES_PROBE = """
import sys
from pathlib import Path
from symprune import Recipe
from symprune.jobs import pruning
folder = Path(sys.argv[1])
recipe = Recipe(method="wanda", calibration="builtin", nsamples=16, seqlen=512)
job = {"evaluate": False, "force": True, "device": "cpu"}
best = {}
for _ in range(2):
    for dtype in ("bfloat16", "float32"):
        record = pruning.prune(
            pruning.Job(str(folder / "dense"), recipe, folder / "out", compute_dtype=dtype, **job)
        )
        best[dtype] = min(sum(record["seconds"].values()), best.get(dtype, 1e9))
print(best["bfloat16"], best["float32"])
"""
WITHOUT = {"AVX-512 without bf16": "AVX512_CORE_VNNI", "AVX2 alone": "AVX2"}
"""What torch's library of products may use, as on a CPU that has no more."""


def types() -> None:
    """A bf16 checkpoint pruned from disk on the CPU, computed in bf16 and in fp32."""
    has = sorted(compute.INSTRUCTIONS[torch.bfloat16] & compute.cpu_features())
    settings = {f"this CPU ({', '.join(has) or 'no bf16'})": "DEFAULT", **WITHOUT}
    table = Table("2 blocks of width 1024, 16 x 512 tokens", "bf16", "fp32", "times faster in fp32")
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder) / "dense", config(1024, 2816, 16, 2, 512))
        for name, may_use in settings.items():
            done = subprocess.run(
                [sys.executable, "-c", TYPES_PROBE, folder],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "ONEDNN_MAX_CPU_ISA": may_use},
            )
            before, after = map(float, done.stdout.split()[-2:])
            table.add_row(name, f"{before:.2f} s", f"{after:.2f} s", f"{before / after:.2f}")
    console.print(table)


def add_rounded(self: GramSum, sample: Tensor) -> None:
    """A Gram matrix summed in fp32, whose bits depend on the order."""
    for start, end in self._stripes():
        self.matrix[start:end, start:].addmm_(sample[:, start:end].T, sample[:, start:])


def exact_gram() -> None:
    """What exact Gram matrices cost a block of SmolLM2-135M's shape, and its whole pruning."""
    model, tokens = llama(1, 576, 1536), torch.randint(0, 512, (8, 2048))
    samples = [torch.randn(2048, width) for width in (576, 576, 576, 1536)]
    sums = [GramSum(sample.shape[1], "cpu") for sample in samples]
    exact = GramSum.add

    def add_all(add: Callable[[GramSum, Tensor], None]) -> None:
        for total, sample in zip(sums, samples, strict=True):
            add(total, sample)

    def prune(add: Callable[[GramSum, Tensor], None]) -> None:
        GramSum.add = add  # type: ignore[method-assign]
        walk.prune(model, tokens, Recipe.named("balanced"))
        GramSum.add = exact  # type: ignore[method-assign]

    for name, job, repeat in (("Gram matrices", add_all, 15), ("balanced, 8 samples", prune, 3)):
        rounded, ours = in_turns(
            lambda j=job: j(add_rounded), lambda j=job: j(exact), repeat=repeat
        )
        ratio = median(after / before for before, after in zip(rounded, ours, strict=True))
        console.print(
            f"One block, 2048 tokens a sample, {name}: {median(rounded):.3f} s in fp32, "
            f"{median(ours):.3f} s exactly, {ratio:.3f} times"
        )


PARTS = {
    "selection": selection,
    "sampling": sampling,
    "statistics": statistics,
    "refinement": refinement,
    "frontier": frontier,
    "engine": whole_engine,
    "memory": memory,
    "waits": waits,
    "types": types,
    "gram": exact_gram,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all when none is named")
    for part in parser.parse_args().parts or PARTS:
        PARTS[part]()
