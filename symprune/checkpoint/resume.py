"""What an interrupted run leaves behind, so that the same command goes on where it was.

Beside the output grows a hidden folder, marked as ours: the files of the output, made at full size
and filled block by block, and `progress.json`, replaced as a whole after every block whose tensors
are on the disk. Hidden states are kept at some block boundaries only: a run that goes on passes
them through the finished blocks behind the last boundary. The input is never changed, so a block
cut short is simply done again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune.checkpoint.output_folder import folder_size, publish
from symprune.checkpoint.tensor_files import Shards, TensorEntry
from symprune.engine.report import LayerReport, is_layer
from symprune.errors import SympruneError
from symprune.machine import durable
from symprune.machine.checksums import write_checksums
from symprune.machine.work_folder import clear, hold, remove, remove_left_over
from symprune.validation import parse_json

FILE = "progress.json"
DIGEST = "sha256"
OUTPUT = "output"
READY = "ready"
KEEPING = 0.05
"""At most this share of the time goes into keeping hidden states."""


def work_folder(output: Path) -> Path:
    """Where an unfinished run of `output` is kept."""
    output = output.absolute()
    return output.parent / f".{output.name}.partial"


@contextmanager
def workspace(output: Path, restart: bool = False, owner: bool = True) -> Iterator[Path]:
    """A folder to work in whose `output` becomes the output at the end.

    If anything fails it stays, provided a block was finished. Only the owner changes it.
    """
    work = work_folder(output)
    if not owner:
        yield work
        return
    with hold(work, output):
        if restart:
            clear(work)
        remove_left_over(output.absolute())
        try:
            yield work
            _publish(work, output.absolute())
            remove(work)
        except BaseException as error:
            finished = _count_finished(work)
            if finished == 0:
                remove(work)
            again = f"run the same command again to go on after block {finished}"
            explained = durable.explain(output, error, again if finished else "")
            if explained is error:
                raise
            raise explained from error


def _publish(work: Path, output: Path) -> None:
    """Put the finished folder in the place of `output`. It has another name meanwhile: a run that
    comes after a kill does not take the old output, which is there then, for it."""
    write_checksums(work / OUTPUT)
    durable.sync_tree(work / OUTPUT)
    ready = work / READY
    shutil.rmtree(ready, ignore_errors=True)  # of a run that was killed here
    (work / OUTPUT).rename(ready)
    new = ready.stat().st_ino
    try:
        publish(ready, output)
    except BaseException:
        if ready.exists() and ready.stat().st_ino == new:
            ready.rename(work / OUTPUT)
        raise


def describe_kept(output: Path) -> str:
    """What an interrupted run of `output` leaves behind, and what that is good for."""
    work = work_folder(output)
    finished = _count_finished(work)
    if finished == 0:
        return "Interrupted before a block was finished: nothing is kept."
    size = folder_size(work) / 1e6
    blocks = "1 finished block is" if finished == 1 else f"{finished} finished blocks are"
    kept = f"{blocks} kept in {work} ({size:,.1f} MB)"
    return f"Interrupted: {kept}; the same command goes on from there."


def _count_finished(work: Path) -> int:
    try:
        return int(parse_json((work / FILE).read_text())["finished"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0


@dataclass
class Progress:
    """How far a run is, and what it needs to go on. Its fields are `progress.json`.

    said: how many layers and notes there were after each block. written, read: digests of what the
    finished blocks are on the disk, and of the input's tensors. files: what changes with each of
    the input's files, see `watch_input`.
    """

    folder: Path
    owner: bool
    run: dict[str, Any]
    finished: int = 0
    hidden: int = 0
    said: list[list[int]] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, run: dict[str, Any], output: Path, owner: bool = True) -> Progress:
        """The progress of `run`, or a fresh one; a sentence when another run was begun here."""
        try:
            read = parse_json((folder / FILE).read_text())
        except FileNotFoundError:
            return cls._begin(folder, owner, run)
        except (OSError, ValueError, RecursionError) as error:
            raise SympruneError(f"{folder / FILE} cannot be read: {error}.") from error
        whole = isinstance(read, dict) and read.pop(DIGEST, None) == digest(read)
        if cls._is_progress(read) and not whole:
            raise SympruneError(f"{folder / FILE} is damaged; pass --restart to begin anew.")
        if not cls._is_progress(read):
            raise SympruneError(
                f"{folder / FILE} was not written by symprune; pass --restart to begin anew."
            )
        changed = differences(read["run"], json.loads(json.dumps(run)))
        if changed and not (folder / OUTPUT).exists():
            return cls._begin(folder, owner, run)  # nothing is there to go on with
        if changed:
            raise SympruneError(
                f"An unfinished run of {output} differs in {'; '.join(changed)}. Repeat its "
                "command to go on with it, or pass --restart to throw it away."
            )
        return cls(folder, owner, **read)

    @classmethod
    def _begin(cls, folder: Path, owner: bool, run: dict[str, Any]) -> Progress:
        clear(folder)
        begun = cls(folder, owner, run)
        begun.save()
        return begun

    @classmethod
    def _is_progress(cls, read: Any) -> bool:
        """Whether a value has the fields of a progress, each of its kind."""
        begun = vars(cls(Path(), True, {}))
        kinds = {name: type(value) for name, value in begun.items()}
        del kinds["folder"], kinds["owner"]
        if not isinstance(read, dict) or read.keys() != kinds.keys():
            return False
        alike = all(type(read[name]) is kind for name, kind in kinds.items())
        return (
            alike
            and 0 <= read["hidden"] <= read["finished"] == len(read["said"])
            and all(map(is_layer, read["layers"]))
            and all(isinstance(note, str) for note in read["notes"])
            and all(isinstance(spent, int | float) for spent in read["seconds"].values())
        )

    def reports(self) -> list[LayerReport]:
        """What happened to the matrices of the finished blocks."""
        return [LayerReport(**layer) for layer in self.layers]

    def save(self) -> None:
        """On the disk, as a whole; by its owner alone."""
        if self.owner:
            plain = {k: v for k, v in vars(self).items() if k not in ("folder", "owner")}
            plain[DIGEST] = digest(json.loads(json.dumps(plain)))
            durable.write_text(self.folder / FILE, json.dumps(plain))

    def finish_block(self) -> None:
        """One block more is on the disk."""
        self.finished += 1
        self.said.append([len(self.layers), len(self.notes)])
        self.save()

    def go_back(self, finished: int) -> None:
        """So many blocks are finished, as when they were; the others are to be done again."""
        if finished == 0:
            self.restart()
            return
        self.finished, self.said = finished, self.said[:finished]
        self.hidden = self.hidden if self.hidden <= finished else 0
        layers, notes = self.said[-1]
        self.layers, self.notes = self.layers[:layers], self.notes[:notes]
        self._forget_result()
        self.save()

    def restart(self) -> None:
        """Nothing is done yet, but what was measured stays measured."""
        self.finished = self.hidden = 0
        self.layers, self.notes, self.seconds = [], [], {}
        self.said, self.written = [], {}
        self._forget_result()
        self.save()

    def _forget_result(self) -> None:
        self.values = {k: v for k, v in self.values.items() if not k.startswith("pruned")}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """A value JSON can hold, made in the first of all attempts."""
        if name not in self.values:
            self.values[name] = make()
            self.save()
        return self.values[name]


class HiddenStates:
    """The hidden states at a block boundary, on disk; one file for each process."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self._last = time.monotonic()
        self._cost = 0.0

    def due(self) -> bool:
        """Whether enough work would be lost to make keeping them worth its time."""
        return time.monotonic() - self._last >= self._cost / KEEPING

    def path(self, block: int) -> Path:
        return self.folder / f"hidden-{block:05}.{self.rank}"

    def keep(self, block: int, hidden: Tensor) -> None:
        start = time.monotonic()
        found = hashlib.sha256()

        def parts() -> Iterator[bytes | memoryview]:
            for part in map(_bytes, hidden):
                found.update(part)
                yield part
            yield found.digest()

        durable.write_durably(self.path(block), parts())
        self._last = time.monotonic()
        self._cost = self._last - start

    def drop_but(self, block: int) -> None:
        for path in self.folder.glob(f"hidden-*.{self.rank}"):
            if path != self.path(block):
                path.unlink(missing_ok=True)

    def restore(self, block: int, hidden: Tensor) -> bool:
        """Fill `hidden` with what was kept; False if that is damaged, or not there."""
        one = hidden[0].numel() * hidden.element_size()
        found = hashlib.sha256()
        try:
            with self.path(block).open("rb") as file:
                for sample in hidden:
                    read = bytearray(file.read(one))
                    found.update(read)
                    sample.copy_(torch.frombuffer(read, dtype=hidden.dtype).view(sample.shape))
                return file.read() == found.digest()
        except (OSError, RuntimeError, ValueError):
            return False


@dataclass
class _Reader:
    """Compares the tensors of the input with what they were when the run first read them. Each is
    looked at once in an attempt."""

    progress: Progress
    shards: Shards
    seen: set[str] = field(default_factory=set)

    def wants(self, name: str) -> bool:
        return name not in self.seen

    def tell(self, entry: TensorEntry, found: str) -> None:
        if self.progress.read.setdefault(entry.name, found) != found:
            raise SympruneError(
                f"{entry.name} in {self.shards.folder / entry.file} has changed since the "
                "unfinished run began; bring it back, or pass --restart to begin anew."
            )
        self.seen.add(entry.name)


def watch_input(progress: Progress, shards: Shards) -> None:
    """Have every tensor that is read compared with what earlier attempts read.

    Those that are not needed again are read only if the system says that somebody wrote to their
    file: its inode or the time of its last change, which no user can set, is another. Nothing that
    is finished depends on a tensor that was never read.
    """
    shards.witness = _Reader(progress, shards)
    if shards.folder.parent == progress.folder:
        return  # a copy of our own, which was compared with its checksums
    for name in shards.files:
        about = (shards.folder / name).stat()
        now = [about.st_ino, about.st_ctime_ns]
        if progress.files.get(name, now) != now:
            for entry in shards.headers[name].entries:
                if entry.name in progress.read:
                    shards.digest(entry.name)
        progress.files[name] = now
    progress.save()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two plain values, by name: `recipe.sparsity (0.5, now 0.6)`."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = list(dict.fromkeys([*before, *now]))
        found = (
            differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
            for key in names
        )
        return [difference for part in found for difference in part]
    return [] if before == now else [f"{name} ({before}, now {now})"]


def digest(*parts: Any) -> str:
    """A short fingerprint of tensors, bytes and plain values."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            found.update(_bytes(part))
        else:
            found.update(part if isinstance(part, bytes) else json.dumps(part).encode())
    return found.hexdigest()[:16]
