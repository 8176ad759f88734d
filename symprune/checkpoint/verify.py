"""Whether a folder is as symprune wrote it: every file, and in a packed one every tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symprune.checkpoint.packed_shards import is_packed, open_packed
from symprune.errors import SympruneError
from symprune.machine.checksums import (
    ADDED,
    CHANGED,
    EDITED,
    EXTRA,
    FILE,
    MISSING,
    Finding,
    Tick,
    find_additions,
    find_damage,
    read_checksums,
)
from symprune.machine.foreign_files import check_links


@dataclass
class Verdict:
    """What was looked at, and what is not as it was. tensors: a sentence for each in a packed
    folder that is damaged or makes no sense."""

    files: int
    size: int
    findings: list[Finding] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return not self.tensors and not any(finding.is_damage for finding in self.findings)

    def named(self, kind: str) -> list[str]:
        """The files of which a kind of thing was found."""
        return [finding.name for finding in self.findings if finding.kind == kind]

    def describe(self) -> str:
        """What is wrong, in numbers: `1 file missing, 2 files changed`."""
        said = []
        for kind in (MISSING, CHANGED, ADDED):
            count = len(self.named(kind))
            said += [f"{count} file{'s' * (count > 1)} {kind}"] if count else []
        if self.tensors and not said:
            said = ["its packed weights make no sense"]
        return ", ".join(said)

    def to_dict(self) -> dict[str, Any]:
        kinds = {kind: self.named(kind) for kind in (MISSING, CHANGED, ADDED, EDITED, EXTRA)}
        about = {"whole": self.is_whole, "files": self.files, "bytes": self.size}
        return {**about, **kinds, "packed": self.tensors}


def verify(folder: Path, tick: Tick = lambda *_: None) -> Verdict:
    """Compare a folder with the list symprune left in it, byte for byte."""
    if not folder.is_dir():
        raise SympruneError(f"There is no folder {folder}.")
    check_links(folder, deep=True)
    listed = read_checksums(folder)
    if listed is None:
        raise SympruneError(
            f"{folder} has no {FILE}: it was not written by symprune, or by a version that left "
            "none, so there is nothing to compare it with."
        )
    verdict = Verdict(len(listed), sum(entry.size for entry in listed.values()))
    verdict.findings += find_damage(folder, listed, tick=tick)
    verdict.findings += find_additions(folder, listed)
    if is_packed(folder):
        verdict.tensors += _find_damaged_tensors(folder)
    return verdict


def _find_damaged_tensors(folder: Path) -> Iterator[str]:
    try:
        yield from open_packed(folder).find_damage()
    except SympruneError as error:
        yield str(error)
