"""Pruning models larger than memory, measured: `python scripts/scale.py flat|seven|processes`.

`flat` prunes models of 4, 8, 16 and 32 equal blocks and prints the peak of the resident memory
above what the interpreter and the imported libraries take. `seven` makes a checkpoint with the
shape of LLaMA2-7b (random weights, bf16, 13.5 GB), one tensor at a time, and prunes it under
`ulimit -d`, the limit of what a process may allocate. `processes` prunes with one process and with
two, a thread each. Files go to --folder and are removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from random_checkpoint import DTYPE, config, make_checkpoint
from rich.console import Console
from rich.table import Table

SEVEN = {"hidden_size": 4096, "intermediate_size": 11008, "heads": 32, "blocks": 32, "vocab": 32000}
VOCAB = 16384
console = Console(width=110)


def resident(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def work(folder: Path, samples: int, seqlen: int, method: str) -> None:
    """Prune in this process; print what it took above the libraries, as JSON."""
    from symprune import Recipe
    from symprune.jobs import pruning

    tiny = config(64, 128, 4, 1, 512)
    shutil.rmtree(folder / "tiny", ignore_errors=True)
    make_checkpoint(folder / "tiny", tiny)
    recipe = Recipe(method=method, calibration="builtin", nsamples=samples, seqlen=seqlen)
    for name in ("tiny", "model"):  # the first makes Python import what it needs
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        job = pruning.Job(str(folder / name), recipe, folder / f"{name}-out", "auto", "cpu", False)
        record = pruning.prune(job)
    seconds = sum(record["seconds"].values())
    print(json.dumps({"peak": resident("VmHWM") - before, "seconds": seconds}))


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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=["flat", "seven", "processes", "work"])
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
    elif given.what == "processes":
        processes(given.folder, *sizes[1:], given.method)
        shutil.rmtree(given.folder)
    else:
        seven(given.folder, int(given.cap * 1e9), given.samples, given.seqlen, given.method)
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
