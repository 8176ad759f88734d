"""`symprune report`: one self-contained HTML page about a pruned model, a sweep or a bench.

The page needs no network, no library and no server: text, inline SVG, small PNGs and a script of a
page. What the source holds is data, never markup: everything is escaped on its way in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symprune.checkpoint.record import RECORD
from symprune.errors import SympruneError
from symprune.eval.report import bench, compare, run, sweep
from symprune.machine import durable


def build(source: Path, matrix: str | None = None) -> str:
    """The page, from the folder `symprune prune` wrote, the .jsonl file of `symprune sweep` or the
    .json file of `symprune bench` or `compare`.

    matrix names the weight matrix a run's heat map shows; left out, one in the middle of the model.
    """
    source = Path(source)
    if not source.exists():
        raise SympruneError(f"There is no run, sweep or bench at {source}.")
    if source.is_dir():
        return run.build(source, matrix)
    if source.name == RECORD:
        return run.build(source.parent, matrix)
    if matrix is not None:
        raise SympruneError(f"{source} is a sweep or a bench: it holds no matrix {matrix} to show.")
    if source.suffix != ".json":
        return sweep.build(source)
    return compare.read(source) if compare.is_one(source) else bench.read(source)


def write(source: Path, output: Path, force: bool = False, matrix: str | None = None) -> Path:
    """Write the page to `output`, whole or not at all, and return where it is."""
    output = Path(output)
    if output.is_dir():
        raise SympruneError(f"The output {output} is a folder, not a file.")
    if (output.exists() or output.is_symlink()) and not force:
        raise SympruneError(f"The output {output} exists; choose another or pass --force.")
    check_page(output)
    return _save(build(source, matrix), output)


def check_page(output: Path) -> None:
    """Fail before any work where a page would take the place of something else."""
    if not _is_replaceable(output):
        raise SympruneError(f"{output} is there and not a page of symprune; it is not replaced.")


def _is_replaceable(output: Path) -> bool:
    """Whether there is nothing yet, or a page that was made here."""
    try:
        content = output.read_bytes()
    except FileNotFoundError:
        return True
    except OSError as error:
        raise durable.explain(output, error) from error
    return not content or b"Made by symprune " in content


def write_bench(record: Mapping[str, Any], output: Path) -> Path:
    """Write the page of what `symprune bench` measured, in place of an older one."""
    return _save(bench.build(record), Path(output))


def write_comparison(record: Mapping[str, Any], output: Path) -> Path:
    """Write the page of what `symprune compare` found, in place of an older one."""
    return _save(compare.build(record), Path(output))


def _save(text: str, output: Path) -> Path:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        durable.write_text(output, text)
    except OSError as error:
        raise durable.explain(output, error) from error
    return output
