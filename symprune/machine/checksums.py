"""`checksums.json`: the size and the SHA-256 of every file in a folder that symprune wrote, so that
damage is noticed and named. It is no signature: who changes a file can change the list as well."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from symprune.errors import SympruneError
from symprune.machine import durable
from symprune.validation import parse_json

if TYPE_CHECKING:
    from torch import Tensor

FILE = "checksums.json"
FORMAT = "symprune-checksums"
VERSION = 1
CHUNK = 8 * 2**20
SAFETENSORS = ".safetensors"
LARGEST_HEADER = 100 * 2**20
CARD = "README.md"
MISSING, CHANGED, ADDED, EDITED, EXTRA = "missing", "changed", "added", "edited", "extra"
READ_BY_KIND = (SAFETENSORS, ".bin", ".py", ".jinja", ".model")
READ_BY_NAME = (
    "config.json", "generation_config.json", "adapter_config.json", "packed.json", "symprune.json",
    "model.safetensors.index.json", "pytorch_model.bin.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json",
    "vocab.json", "vocab.txt", "merges.txt", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
"""What loaders look for in a model's folder: where one of these is added, another model is read."""
Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class Entry:
    """What is known of a file. header: of a safetensors file, the SHA-256 of the bytes that say
    what it holds, which are compared where reading all of it would take too long."""

    size: int
    sha256: str
    header: str | None = None


@dataclass(frozen=True)
class Finding:
    """A file that is not as it was written: missing, changed, added where loaders read it; or the
    card, edited or left out, which is for people, and what is extra: those damage nothing."""

    name: str
    kind: str

    @property
    def is_damage(self) -> bool:
        return self.kind not in (EDITED, EXTRA)

    def describe(self) -> str:
        said = {
            ADDED: "added, and loaders would read it",
            EDITED: "not as symprune wrote it, no damage: it is for readers",
            EXTRA: "not symprune's, no damage",
        }
        return said.get(self.kind, self.kind)


def write_checksums(folder: Path) -> None:
    """List what is in a folder, read from the disk in one pass. Equal folders get equal lists."""
    durable.new_name(folder / FILE).unlink(missing_ok=True)  # of an attempt that was killed here
    files = {name: asdict(_describe(folder / name)) for name in _names(folder)}
    about = {"format": FORMAT, "version": VERSION, "list": _digest_of(files), "files": files}
    durable.write_text(folder / FILE, json.dumps(about, indent=1) + "\n")


def read_checksums(folder: Path) -> dict[str, Entry] | None:
    """The files a folder should have; None where there is no list."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        about = parse_json(path.read_text())
        if about["format"] != FORMAT:
            raise ValueError("it is not one of symprune's lists")
        if about["version"] != VERSION:
            raise ValueError(f"its version is {about['version']!r}, not {VERSION}")
        if about.keys() != {"format", "version", "list", "files"}:
            raise ValueError("its fields are others")
        if about["list"] != _digest_of(about["files"]):
            raise ValueError("its own checksum does not match")
        found = {name: Entry(**entry) for name, entry in about["files"].items()}
        if not all(type(entry.size) is int and entry.size >= 0 for entry in found.values()):
            raise ValueError("a size is not one")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SympruneError(f"{path} is corrupt: {error}.") from error
    for name in found:
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\0" in name or str(place) != name:
            raise SympruneError(f"{path} names {name[:80]!r}, which is not a file beside it.")
    return found


def find_damage(
    folder: Path,
    listed: Mapping[str, Entry],
    headers_only: Collection[str] = (),
    tick: Tick = lambda *_: None,
) -> Iterator[Finding]:
    """Which of the listed files are not as they were. headers_only: those of which no more than the
    size and the header is compared. tick is told how many files are done, and of how many."""
    for number, (name, entry) in enumerate(listed.items()):
        tick(number, len(listed))
        path = folder / name
        if not path.is_file():
            yield Finding(name, EDITED if name == CARD else MISSING)
        elif not _is_as_listed(path, entry, name in headers_only):
            yield Finding(name, EDITED if name == CARD else CHANGED)
    tick(len(listed), len(listed))


def find_additions(folder: Path, listed: Mapping[str, Entry]) -> Iterator[Finding]:
    """Files that are not listed."""
    for name in _names(folder):
        if name not in listed:
            yield Finding(name, ADDED if is_read_by_loaders(name) else EXTRA)


def is_read_by_loaders(name: str) -> bool:
    """Whether a file in a model's folder makes another model of it."""
    return "/" not in name and (name.endswith(READ_BY_KIND) or name in READ_BY_NAME)


def is_whole(folder: Path) -> bool:
    """Whether there is a folder whose listed files are all as they were written."""
    try:
        listed = read_checksums(folder)
        return listed is not None and not any(find_damage(folder, listed))
    except SympruneError:
        return False


def check_listed(
    folder: Path,
    headers_only: Collection[str] = (),
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fail where a listed file that is wanted is not as it was written; a folder without a list
    passes."""
    listed = read_checksums(folder) or {}
    chosen = {name: e for name, e in listed.items() if wanted(name) and name != CARD}
    found = next(find_damage(folder, chosen, headers_only), None)
    if found is not None:
        raise SympruneError(
            f"{folder / found.name} is {found.kind}: {folder} is not as symprune wrote it. "
            f"`symprune verify` lists all damage; if the change is yours, delete {FILE}."
        )


def digest_file(path: Path) -> str:
    """The SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's bytes."""
    import torch

    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _describe(path: Path) -> Entry:
    header = _digest_header(path) if path.name.endswith(SAFETENSORS) else None
    return Entry(path.stat().st_size, digest_file(path), header)


def _is_as_listed(path: Path, entry: Entry, header_only: bool) -> bool:
    try:
        if path.stat().st_size != entry.size:
            return False
        if header_only and entry.header is not None:
            return _digest_header(path) == entry.header
        return digest_file(path) == entry.sha256
    except OSError as error:
        raise SympruneError(f"{path} cannot be read: {error.strerror}.") from error


def _digest_header(path: Path) -> str:
    """Of the length of a safetensors file's header, and so many bytes."""
    with path.open("rb") as file:
        length = file.read(8)
        rest = file.read(min(int.from_bytes(length, "little"), LARGEST_HEADER))
    return hashlib.sha256(length + rest).hexdigest()


def _names(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in paths)
    return sorted(name for name in names if name != FILE)


def _digest_of(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
