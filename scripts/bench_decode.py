"""How fast a whole model decodes: one of 1.1 billion weights, dense, packed and in llama.cpp.

    python scripts/bench_decode.py [--folder build/decode] [--threads 1 2] [--rounds 5]

A LLaMA of TinyLlama's shape with random weights is made once and kept in the folder, with its
packed forms (50 % by magnitude, values rounded to the nearest, embedding and head int8) and, where
llama-cpp-python is installed, as GGUF. All models take turns in one run (`symprune bench`); what is
promised are the ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from statistics import median

from random_checkpoint import make_checkpoint, tiny_llama
from random_gguf import make_gguf
from rich.console import Console
from rich.table import Table

from symprune import Recipe
from symprune.checkpoint.packed import pack
from symprune.eval import tables
from symprune.jobs import pruning
from symprune.jobs.bench.turns import Plan, bench

console = Console(width=120)
SPARSITY = 0.5
DENSE, BF16, INT8, INT4 = "dense", "sparse-bf16", "sparse-int8", "sparse-int4"
QUANTISED = {"Q8_0": "q8_0.gguf", "Q4_0": "q4_0.gguf"}
TARGETS = (
    (INT8, DENSE, 2.5),
    (INT4, DENSE, 3.0),
    (INT8, QUANTISED["Q8_0"], 1.0),
    (INT4, QUANTISED["Q4_0"], 1.0),
)
"""A model, the one it is measured against, and how many times as fast it is to be."""


def prepare(folder: Path) -> list[str]:
    """The models to measure; those that are not there yet are made."""
    dense = folder / DENSE
    if not dense.is_dir():
        console.print(f"Making {dense}")
        make_checkpoint(dense, tiny_llama())
    for name, values in ((INT8, "int8"), (INT4, "int4")):
        if not (folder / name).is_dir():
            console.print(f"Making {folder / name}")
            prune(dense, folder / name, {"name": values, "solve": "nearest"}, "int8")
    if not (folder / BF16).is_dir():
        console.print(f"Making {folder / BF16}")
        plain = folder / "pruned"
        prune(dense, plain)
        pack(plain, folder / BF16)
    found = [str(folder / name) for name in (DENSE, BF16, INT8, INT4)]
    if importlib.util.find_spec("llama_cpp") is None:
        console.print("llama-cpp-python is not installed: llama.cpp takes no part.")
        return found
    missing = {t: folder / f for t, f in QUANTISED.items() if not (folder / f).is_file()}
    if missing:
        console.print(f"Making {', '.join(str(path) for path in missing.values())}")
        make_gguf(dense, missing)
    return [*found, *(str(folder / file) for file in QUANTISED.values())]


def prune(dense: Path, output: Path, values: dict | None = None, head: str | None = None) -> None:
    """Half of every row by magnitude: which weights go plays no part in how fast the rest are."""
    recipe = Recipe(method="magnitude", sparsity=SPARSITY, values=values, values_head=head)
    pruning.prune(pruning.Job(str(dense), recipe, output, evaluate=False, force=True, device="cpu"))


def against_targets(record: dict) -> Table:
    """What was promised, and the median of the rounds' ratios."""
    rows = {row["label"]: row["turns"] for row in record["models"]}
    table = Table("decoding", "times as fast as", "measured", "promised")
    for ours, theirs, wanted in TARGETS:
        if theirs in rows:
            name = "decode_tokens_per_second"
            pairs = zip(rows[ours], rows[theirs], strict=True)
            ratio = median(mine[name] / other[name] for mine, other in pairs)
            table.add_row(ours, theirs, f"{ratio:.2f}", f"{wanted:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/decode"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    models, records = prepare(asked.folder), []
    for threads in asked.threads:
        plan = Plan(rounds=asked.rounds, threads=threads, data=None, device="cpu")
        record = bench(models, plan, tell=console.print)
        console.print(tables.bench(record), against_targets(record))
        for note in record["notes"]:
            console.print(f"Note: {note}")
        records.append(record)
    if asked.json:
        asked.json.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
