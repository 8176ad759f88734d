"""Files and folders of text: plain, JSON lines or Parquet. Nothing in them is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from symprune.corpus.documents import Document, choose_column, read_cell
from symprune.errors import SympruneError
from symprune.machine.foreign_files import check_links
from symprune.validation import parse_json

LARGEST_TEXT = 10**9  # bytes
MOST_FILES = 100_000
PLAIN, LINES, TABLES = (".txt", ".md", ".text"), (".jsonl", ".ndjson"), (".parquet",)
ROWS_AT_ONCE = 16  # rows of a table, any of which may be long


def split_column(source: str) -> tuple[Path, str | None]:
    """The file, and the column behind a colon, of `mine.jsonl:answer`."""
    name, colon, column = source.rpartition(":")
    if colon and Path(name).suffix.lower() in (*LINES, *TABLES) and not Path(source).exists():
        return Path(name), column
    return Path(source), None


def has_documents(source: str) -> bool:
    """Whether a source is files of documents, rather than one file of plain text."""
    path = split_column(source)[0]
    return path.suffix.lower() in (*LINES, *TABLES) or path.is_dir()


def read_documents(source: str) -> list[Document]:
    """The documents of a file or, name by name, of a folder's files."""
    path, column = split_column(source)
    files = _files_in(path) if path.is_dir() else [path]
    found: list[Document] = []
    for file in files:
        found += _read_file(file, column)
    if not found:
        raise SympruneError(f"There is no text in {source}.")
    return found


def _read_file(file: Path, column: str | None) -> Iterator[Document]:
    if file.suffix.lower() in LINES:
        return _read_lines(file, column)
    if file.suffix.lower() in TABLES:
        return _read_table(file, column)
    return iter([read_text(str(file))])


def _files_in(folder: Path) -> list[Path]:
    check_links(folder, deep=True)
    known = (*PLAIN, *LINES, *TABLES)
    found: list[Path] = []
    size = 0
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.suffix.lower() not in known or not path.is_file():
            continue
        empty = path.suffix.lower() in PLAIN and path.stat().st_size == 0
        found += [] if empty else [path]
        size += path.stat().st_size
        if len(found) > MOST_FILES or size > LARGEST_TEXT:
            raise SympruneError(
                f"The folder {folder} has more than {MOST_FILES:,} files or "
                f"{LARGEST_TEXT / 1e9:.0f} GB of text; a part of it is plenty."
            )
    if not found:
        raise SympruneError(f"The folder {folder} has no file of text ({', '.join(known)}).")
    return found


def read_text(path: str) -> str:
    """The whole of a text file."""
    file = Path(path)
    if file.exists() and not file.is_file():
        raise SympruneError(f"The text {path} is not a file.")
    _check_size(file)
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SympruneError(f"{path} is not a text file (UTF-8).") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not content.strip():
        raise SympruneError(f"The text file {path} is empty.")
    return content


def _check_size(file: Path) -> None:
    try:
        size = file.stat().st_size if file.is_file() else 0
    except (OSError, ValueError):  # no name a file could have: reading says so
        return
    if size > LARGEST_TEXT:
        raise SympruneError(
            f"The text file {file} has {size / 1e9:.1f} GB; a part of it, of "
            f"{LARGEST_TEXT / 1e9:.0f} GB at most, is plenty."
        )


def _unreadable(path: str | Path, error: Exception) -> SympruneError:
    reason = getattr(error, "strerror", None) or str(error)
    return SympruneError(
        f"Cannot read text {str(path)!r} ({reason}); give c4, wikitext2, builtin, self, a data "
        "set of the hub (hf:ORG/NAME), a file or folder, or several (A*0.7 + B*0.3)."
    )


def _read_lines(file: Path, column: str | None) -> Iterator[Document]:
    """One JSON object a line."""
    _check_size(file)
    chosen: str | None = None
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"line {number} of {file}"
                row = _parse_row(line, number, file)
                if chosen is None:
                    chosen = choose_column(list(row), column, str(file))
                document = read_cell(row.get(chosen), chosen, where)
                if document is not None:
                    yield document
    except SympruneError:
        raise
    except UnicodeDecodeError as error:
        raise SympruneError(f"{file} is not a text file (UTF-8).") from error
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def _parse_row(line: str, number: int, file: Path) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise SympruneError(f"Line {number} of {file} is not JSON.") from error
    if not isinstance(row, dict):
        raise SympruneError(f"Line {number} of {file} is not a JSON object.")
    return row


def _read_table(file: Path, column: str | None) -> Iterator[Document]:
    """The rows of a Parquet file, up to as much text as a text file may have."""
    import pyarrow
    import pyarrow.parquet as parquet

    _check_size(file)
    size = 0
    try:
        with parquet.ParquetFile(file, pre_buffer=False) as table:
            chosen = choose_column(list(table.schema_arrow.names), column, str(file))
            batches = table.iter_batches(ROWS_AT_ONCE, columns=[chosen], use_threads=False)
            for batch in batches:
                for value in batch.column(0).to_pylist():
                    document = read_cell(value, chosen, str(file))
                    if document is None:
                        continue
                    size += len(document)
                    if size > LARGEST_TEXT:
                        raise SympruneError(f"{file} unpacks to more than {LARGEST_TEXT:,} bytes.")
                    yield document
    except SympruneError:
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise _unreadable(file, error) from error
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise SympruneError(f"{file} is not a whole Parquet file.") from error
