"""Writing a pruned model so that it appears whole or not at all, and reading back what it carries.

The folder is a plain HuggingFace checkpoint (safetensors, config, tokenizer, generation config)
that loads without symprune, plus `symprune.json` (what was done) and `masks.safetensors` (which
weights).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from symprune.card.base import LICENCE_FILES
from symprune.checkpoint.record import RECORD, is_ours, read_record, write_record
from symprune.checkpoint.tensor_files import INDEX
from symprune.errors import SympruneError
from symprune.machine import durable, work_folder
from symprune.machine.checksums import FILE as CHECKSUMS
from symprune.machine.checksums import read_checksums, write_checksums
from symprune.maskset import FILE_NAME, PACKED, MaskSet
from symprune.validation import parse_json

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What says how a vision-language model is given its pictures."""
GENERATION = "generation_config.json"
HEADROOM = 64 * 2**20
SAFETENSORS = ".safetensors"


def check_output(output: Path, force: bool, reads: Iterable[str | Path] = ()) -> None:
    """Fail before any work when `output` exists or cannot be written. With force a folder that
    symprune wrote may be replaced, but never what the work reads, nor the current folder."""
    real = output.resolve()
    for path in (Path(each).expanduser() for each in reads):
        if path.exists() and path.resolve().is_relative_to(real):
            raise SympruneError(f"The output {output} is or holds {path}, which is read.")
    if (output.exists() or output.is_symlink()) and not force:
        raise SympruneError(f"The output {output} exists; choose another or pass --force.")
    if output.is_symlink():
        raise SympruneError(f"The output {output} is a link; name the folder itself.")
    if output.exists() and not output.is_dir():
        raise SympruneError(f"The output {output} is a file, not a folder.")
    if output.exists():
        _check_replaceable(output, real)
    parent = _existing_parent(output)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise SympruneError(f"The output {output} cannot be created: {parent} is not writable.")


def _check_replaceable(output: Path, real: Path) -> None:
    """Refuse a folder that holds anything symprune did not write. What it wrote is listed beside
    it, or has a record that says what else there is, or is packed."""
    if Path.cwd().is_relative_to(real):
        raise SympruneError(f"The output {output} is or holds the current folder.")
    names = {path.name for path in output.iterdir()}
    known = _find_known(output, names)
    if names and known is None:
        raise SympruneError(
            f"The output {output} was not written by symprune, so --force does not replace it."
        )
    others = names - (known or names)
    if others:
        raise SympruneError(
            f"The output {output} holds {min(others)}, which symprune did not write, so --force "
            "does not replace it."
        )


def _find_known(output: Path, names: set[str]) -> set[str] | None:
    """Which names in a folder are those of files symprune wrote; None where it wrote none."""
    with suppress(SympruneError):  # a damaged list is no reason to keep a damaged folder
        listed = read_checksums(output)
        if listed is not None:
            return {CHECKSUMS, *(name.partition("/")[0] for name in listed)}
    record = read_record(output)
    if not is_ours(record) and not _is_packed_by_us(output):
        return None
    if record is None or not isinstance(record.get("files"), list):
        return names
    weights = {name for name in names if name.startswith("model") and name.endswith(SAFETENSORS)}
    return {*map(str, record["files"]), RECORD, PACKED, FILE_NAME, INDEX, CHECKSUMS, *weights}


def _is_packed_by_us(folder: Path) -> bool:
    """Whether the folder's manifest is one of symprune's."""
    try:
        with (folder / PACKED).open("rb") as file:
            return b'"symprune-packed"' in file.read(256)
    except OSError:
        return False


def check_room(output: Path, needed: int) -> None:
    """Fail before any work when so many bytes will not fit on the disk of `output`."""
    free = shutil.disk_usage(_existing_parent(output)).free
    if free < needed + HEADROOM:
        raise SympruneError(
            f"The disk of {output} is full: the model needs {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free."
        )


def _existing_parent(output: Path) -> Path:
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return parent


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `output` at the end, or vanishes if anything
    fails. Whether `output` may be written is for the caller to check, before any work."""
    output = output.absolute()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work_folder.remove_left_over(output)
        with work_folder.temporary(output, work_folder.NEW) as work:
            yield work
            write_checksums(work)
            publish(work, output)
    except Exception as error:
        explained = durable.explain(output, error)
        if explained is error:
            raise
        raise explained from error


def publish(work: Path, output: Path) -> None:
    """Put `work`, once it is on the disk, in the place of `output`."""
    durable.sync_tree(work)
    _replace_folder(work, output)
    durable.sync(output.parent)


def _replace_folder(work: Path, output: Path) -> None:
    """An old folder goes only once the new one stands, and only if it is symprune's still."""
    if not output.exists():
        work.rename(output)
        return
    _check_replaceable(output, output.resolve())
    if work_folder.swap(work, output):
        shutil.rmtree(work, ignore_errors=True)
        return
    with work_folder.temporary(output, work_folder.OLD) as old:
        old.rmdir()
        output.rename(old)
        try:
            work.rename(output)
        except OSError:
            old.rename(output)
            raise


def save(
    output: Path,
    model: nn.Module,
    tokenizer: Any | None,
    record: dict[str, Any],
    masks: MaskSet,
) -> None:
    """Write the pruned model, its tokenizer, its masks and the record of what was done."""
    with whole_folder(output) as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        masks.save(folder / FILE_NAME)
        write_record(folder, record)


def write_around(
    folder: Path, source: Path, model: Any, tokenizer: Any | None, dtype: str = "auto"
) -> None:
    """What a checkpoint has beside its weights: as it is in `source`, and the tokenizer."""
    config = parse_json((source / "config.json").read_text())
    config.pop("quantization_config", None)  # of a packed source; any other is refused
    if dtype != "auto":
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    durable.write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    for path in filter(Path.is_file, (source / name for name in files_around(source, tokenizer))):
        if path.suffix != ".py" or "auto_map" in config:
            shutil.copyfile(path, folder / path.name)
    if not (folder / GENERATION).exists() and model.can_generate():
        model.generation_config.save_pretrained(folder)
    names = () if tokenizer is None else _tokenizer_files(tokenizer)
    if tokenizer is not None and not any((folder / name).exists() for name in names):
        tokenizer.save_pretrained(folder)


def files_around(source: Path, tokenizer: Any | None) -> set[str]:
    """What the files beside a checkpoint's weights and its configuration may be called that the
    output has as well. They are copied as they are: what a tokenizer's `save_pretrained` writes
    depends on whether the hub was within reach."""
    names = {
        GENERATION,
        *PROCESSOR_FILES,
        *LICENCE_FILES,
        *(path.name for path in source.glob("*.py")),
    }
    return names if tokenizer is None else names | _tokenizer_files(tokenizer)


def _tokenizer_files(tokenizer: Any) -> set[str]:
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    names |= {"added_tokens.json", "chat_template.jinja", "chat_template.json"}
    return names | set(getattr(tokenizer, "vocab_files_names", {}).values())


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
