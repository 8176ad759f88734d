"""`symprune report`: one self-contained HTML page about a pruned model or about a sweep.

The page needs no network, no library and no server: text, inline SVG, small PNGs and a script of a
page. What the source holds is data, never markup: everything is escaped on its way in.
"""

from __future__ import annotations

from pathlib import Path

from symprune.checkpoint.record import RECORD
from symprune.errors import SympruneError
from symprune.eval.report import run, sweep
from symprune.machine import durable


def build(source: Path, matrix: str | None = None) -> str:
    """The page, from the folder `symprune prune` wrote or the .jsonl file of `symprune sweep`.

    matrix names the weight matrix a run's heat map shows; left out, one in the middle of the model.
    """
    source = Path(source)
    if not source.exists():
        raise SympruneError(f"There is no run or sweep at {source}.")
    if source.is_dir():
        return run.build(source, matrix)
    if source.name == RECORD:
        return run.build(source.parent, matrix)
    if matrix is not None:
        raise SympruneError(f"{source} is a sweep: it holds no matrix {matrix} to show.")
    return sweep.build(source)


def write(source: Path, output: Path, force: bool = False, matrix: str | None = None) -> Path:
    """Write the page to `output`, whole or not at all, and return where it is."""
    output = Path(output)
    if output.is_dir():
        raise SympruneError(f"The output {output} is a folder, not a file.")
    if (output.exists() or output.is_symlink()) and not force:
        raise SympruneError(f"The output {output} exists; choose another or pass --force.")
    text = build(source, matrix)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        durable.write_text(output, text)
    except OSError as error:
        raise durable.explain(output, error) from error
    return output
