"""Pruning models larger than memory: `python scripts/scale.py flat|seven|processes|ahead|memory`.

`flat` prunes models of 4, 8, 16 and 32 equal blocks and prints the peak of the resident memory
above what the interpreter and the imported libraries take. `seven` makes a checkpoint with the
shape of LLaMA2-7b (random weights, bf16, 13.5 GB), one tensor at a time, and prunes it under
`ulimit -d`, the limit of what a process may allocate. `processes` prunes with one process and with
two, a thread each. `ahead` measures how much of the next block is in the system's file cache when
it is wanted. `memory` prints what models people have take in the default set-up, as the tool says
it before the first block, and checks such a sum by a run. Files go to --folder and are removed
afterwards.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from random_checkpoint import DTYPE, config, make_checkpoint, tensors
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from symprune import Recipe

SEVEN = {"hidden_size": 4096, "intermediate_size": 11008, "heads": 32, "blocks": 32, "vocab": 32000}
MODELS = {
    "LLaMA2-7b": SEVEN,
    "LLaMA2-13b": {
        "hidden_size": 5120, "intermediate_size": 13824, "heads": 40, "blocks": 40, "vocab": 32000,
    },
    "LLaMA2-70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "heads": 64, "blocks": 80, "vocab": 32000,
        "key_value_heads": 8,
    },
}  # fmt: skip
VOCAB = 16384
console = Console(width=110)


def resident(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def work(folder: Path, samples: int, seqlen: int, method: str) -> None:
    """Prune in this process; print what it took above the libraries, as JSON."""
    from symprune.jobs import pruning

    tiny = config(64, 128, 4, 1, 512)
    shutil.rmtree(folder / "tiny", ignore_errors=True)
    make_checkpoint(folder / "tiny", tiny)
    recipe = recipe_of(method, samples, seqlen)
    for name in ("tiny", "model"):  # the first makes Python import what it needs
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        job = pruning.Job(
            str(folder / name), recipe, folder / f"{name}-out", "auto", "cpu", False,
            compute_dtype="bfloat16",
        )  # fmt: skip
        record = pruning.prune(job)
    seconds = sum(record["seconds"].values())
    print(json.dumps({"peak": resident("VmHWM") - before, "seconds": seconds}))


def recipe_of(method: str, samples: int, seqlen: int) -> Recipe:
    """By the name of a recipe that ships, or of a method."""
    from symprune import Recipe

    made = Recipe.named(method) if method in ("fast", "balanced", "best") else Recipe(method=method)
    return replace(made, calibration="builtin", nsamples=samples, seqlen=seqlen)


def flat(
    folder: Path, depths: list[int], width: int, samples: int, seqlen: int, method: str
) -> None:
    """Peak memory of models that differ only in their depth."""
    inner = 11 * width // 4
    block = (4 * width * width + 3 * width * inner + 2 * width) * DTYPE.itemsize
    embeddings = VOCAB * width * DTYPE.itemsize
    hidden = samples * seqlen * width * DTYPE.itemsize
    unit = block + embeddings + hidden
    console.print(
        f"{method}, 50 %, {samples} x {seqlen} tokens, bf16; one block {block / 1e6:.1f} MB + "
        f"embeddings {embeddings / 1e6:.1f} MB + hidden states {hidden / 1e6:.1f} MB = "
        f"{unit / 1e6:.1f} MB"
    )
    table = Table("blocks", "model on disk", "peak above the libraries", "of the sum", "seconds")
    peaks = []
    for blocks in depths:
        shutil.rmtree(folder, ignore_errors=True)
        about = config(width, inner, width // 128, blocks, VOCAB)
        make_checkpoint(folder / "model", about)
        size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        options = ["--samples", str(samples), "--seqlen", str(seqlen), "--method", method]
        command = [sys.executable, __file__, "work", "--folder", str(folder), *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        peaks.append(found["peak"])
        table.add_row(
            str(blocks),
            f"{size / 1e6:.0f} MB",
            f"{found['peak'] / 1e6:.1f} MB",
            f"{found['peak'] / unit:.2f}",
            f"{found['seconds']:.1f}",
        )
        shutil.rmtree(folder)
    console.print(table)
    growth = 100 * (peaks[-1] / peaks[0] - 1)
    console.print(f"From {depths[0]} to {depths[-1]} blocks: {growth:+.1f} %")


def seven(folder: Path, cap: int, samples: int, seqlen: int, method: str) -> None:
    """A 7B-shaped model, pruned with less memory than it has weights."""
    start = time.monotonic()
    if not (folder / "model" / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        make_checkpoint(folder / "model", config(**SEVEN))
    size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    console.print(
        f"{size / 1e9:.2f} GB on disk, made in {time.monotonic() - start:.0f} s; "
        f"a process may allocate {cap / 1e9:.2f} GB (ulimit -d {cap // 1024})"
    )
    command = [
        sys.executable, "-m", "symprune", "prune", "--model", str(folder / "model"),
        "--method", method, "--sparsity", "0.5", "--calibration", "builtin",
        "--nsamples", str(samples), "--seqlen", str(seqlen), "--no-eval", "--device", "cpu",
        "--output", str(folder / "out"), "--log", str(folder / "log.jsonl"),
    ]  # fmt: skip
    shown = ["symprune", *command[3:]]
    console.print("$ " + " ".join(Path(part).name if "/" in part else part for part in shown))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))

    done = subprocess.run(command, check=False, preexec_fn=limit, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    console.print(f"exit code 0; peak resident memory {peak / 1e9:.2f} GB, of {size / 1e9:.2f} GB")
    for line in (folder / "log.jsonl").read_text().splitlines()[-2:]:
        console.print(line, soft_wrap=True, highlight=False)


def processes(folder: Path, width: int, samples: int, seqlen: int, method: str) -> None:
    """One process and two of them, a thread each, on the same model: times, and the same files."""
    shutil.rmtree(folder, ignore_errors=True)
    make_checkpoint(folder / "model", config(width, 11 * width // 4, width // 128, 4, VOCAB))
    table = Table(f"4 blocks of width {width}, {samples} x {seqlen} tokens", "seconds to prune")
    seconds, results = [], []
    for count in (1, 2):
        out = folder / f"out-{count}"
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(count)]
        options = [
            "--model", str(folder / "model"), "--method", method, "--calibration", "builtin",
            "--nsamples", str(samples), "--seqlen", str(seqlen), "--no-eval", "--device", "cpu",
            "--output", str(out), "--json", str(folder / "record.json"),
        ]  # fmt: skip
        command = [sys.executable, *launcher, "-m", "symprune", "prune", *options]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=alone, check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        record = json.loads((folder / "record.json").read_text())
        seconds.append(sum(record["seconds"].values()))
        results.append(b"".join(path.read_bytes() for path in sorted(out.glob("*.safetensors"))))
        table.add_row(f"{count} process{'es' * (count > 1)}", f"{seconds[-1]:.1f}")
    console.print(table)
    verdict = "the same" if results[0] == results[1] else "OTHER"
    console.print(f"Two take {seconds[1] / seconds[0]:.2f} of one's time, for {verdict} bytes.")


def ahead(folder: Path, width: int) -> None:
    """How much of a block the system has read after one advice for each tensor, and after ours."""
    from symprune.checkpoint import tensor_files

    shutil.rmtree(folder, ignore_errors=True)
    make_checkpoint(folder / "model", config(width, 11 * width // 4, width // 128, 2, VOCAB))
    paths = sorted((folder / "model").glob("*.safetensors"))
    shards = tensor_files.Shards(folder / "model", [path.name for path in paths])
    names = [name for name in shards if name.startswith("model.layers.1.")]
    wanted = [shards.entries[name] for name in names]
    size = sum(entry.size for entry in wanted)
    table = Table(f"a block of {size / 1e6:.0f} MB", "in the file cache", "share")
    for told, piece in (("one advice a tensor", 2**62), ("as pruning asks", tensor_files.ADVICE)):
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = sum(cached(folder / "model" / e.file, e.start, e.size) for e in wanted)
        tensor_files.ADVICE = piece
        shards.prefetch(names)
        time.sleep(5)
        found = sum(cached(folder / "model" / e.file, e.start, e.size) for e in wanted)
        share = f"{100 * found / size:.1f} %"
        table.add_row(f"{told} (before: {before / 1e6:.0f} MB)", f"{found / 1e6:.0f} MB", share)
    console.print(table)
    shutil.rmtree(folder)


def cached(path: Path, start: int, size: int) -> int:
    """Bytes of a part of a file that are in the system's file cache, in whole pages."""
    page = mmap.PAGESIZE
    first = start // page * page
    with (
        path.open("rb") as file,
        mmap.mmap(
            file.fileno(), start + size - first, mmap.MAP_SHARED, mmap.PROT_READ, offset=first
        ) as mapped,
    ):
        view = np.frombuffer(mapped, np.uint8)
        pages = -(-len(view) // page)
        seen = (ctypes.c_ubyte * pages)()
        place = ctypes.c_void_p(view.ctypes.data)
        if ctypes.CDLL(None, use_errno=True).mincore(place, ctypes.c_size_t(len(view)), seen):
            raise OSError(ctypes.get_errno(), "mincore")
        del view
        return min(size, page * sum(each & 1 for each in seen))


class Shapes:
    """A checkpoint that has names, types and shapes, and no weights."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.shapes = dict(tensors(about))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def dtype(self, name: str) -> torch.dtype:
        return DTYPE

    def is_exact(self, name: str) -> bool:
        return False

    def read(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def prefetch(self, names: Iterable[str]) -> None:
        raise NotImplementedError


def parts_of(about: dict[str, Any], samples: int, seqlen: int) -> tuple[int, int, int]:
    """Bytes of a block, of the hidden states and of the Gram matrices, as a run counts them."""
    from transformers import LlamaConfig

    from symprune.checkpoint.streamed_model import StreamedModel
    from symprune.gram import memory_of

    streamed = StreamedModel(Shapes(about), LlamaConfig(**about))
    width, inner = about["hidden_size"], about["intermediate_size"]
    # Of q, k, v; of o; of gate and up; of down: each twice, the other for text that only watches.
    grams = 2 * (3 * memory_of(width) + memory_of(inner))
    return streamed.block_size, streamed.states_size(samples, seqlen), grams


def memory(folder: Path, width: int, samples: int, seqlen: int) -> None:
    """What pruning takes in the default set-up, 128 x 2048 tokens, and a run that checks the sum.

    Where Gram matrices are fitted, held-out text is watched beside the samples.
    """
    from symprune.calibration import WATCHED

    table = Table("128 x 2048 tokens, bf16", "block", "hidden states", "ria", "Gram", "balanced")
    for name, shape in {**MODELS, "this run": None}.items():
        sizes = (128, 2048) if shape else (samples, seqlen)
        about = config(**shape) if shape else config(width, 11 * width // 4, width // 128, 2, VOCAB)
        block, states, grams = parts_of(about, *sizes)
        watched = parts_of(about, max(1, sizes[0] // WATCHED), sizes[1])[1]
        needed = (block + states, block + states + watched + grams)
        cells = (block, states, needed[0], grams, needed[1])
        table.add_row(name, *(f"{cell / 1e9:.2f} GB" for cell in cells))
    console.print(table)
    for method, expected in zip(("ria", "balanced"), needed, strict=True):
        shutil.rmtree(folder, ignore_errors=True)
        make_checkpoint(folder / "model", about)
        options = ["--samples", str(samples), "--seqlen", str(seqlen), "--method", method]
        command = [sys.executable, __file__, "work", "--folder", str(folder), *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peak = json.loads(done.stdout.strip().splitlines()[-1])["peak"]
        console.print(
            f"{method}, width {width}, {samples} x {seqlen}: {expected / 1e6:.0f} MB by the sum, "
            f"{peak / 1e6:.0f} MB measured above the libraries, {peak / expected:.2f} times"
        )
        shutil.rmtree(folder)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=["flat", "seven", "processes", "ahead", "memory", "work"])
    options.add_argument("--folder", type=Path, default=Path("out/scale"))
    options.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16, 32])
    options.add_argument("--width", type=int, default=2048, help="of the models but `seven`")
    options.add_argument("--samples", type=int, default=4)
    options.add_argument("--seqlen", type=int, default=64)
    options.add_argument("--method", default="ria")
    options.add_argument("--cap", type=float, default=4.0, help="GB (10^9 bytes)")
    given = options.parse_args()
    sizes = (given.blocks, given.width, given.samples, given.seqlen)
    if given.what == "work":
        work(given.folder, given.samples, given.seqlen, given.method)
    elif given.what == "flat":
        flat(given.folder, *sizes, given.method)
    elif given.what == "ahead":
        ahead(given.folder, given.width)
    elif given.what == "memory":
        memory(given.folder, *sizes[1:])
    elif given.what == "processes":
        processes(given.folder, *sizes[1:], given.method)
        shutil.rmtree(given.folder)
    else:
        seven(given.folder, int(given.cap * 1e9), given.samples, given.seqlen, given.method)
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
