"""safetensors files of strangers, and when what is written is on the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from symprune.checkpoint.tensor_files import OutputFile, make_header, read_header
from symprune.errors import SympruneError


def write(path: Path, described: dict[str, Any], size: int) -> Path:
    text = json.dumps(described).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    return path


def about(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("places", "size"),
    [([(0, 4), (2, 6)], 8), ([(0, 4), (0, 4)], 8), ([(0, 4), (6, 8)], 6), ([(2, 4)], 2)],
    ids=["overlapping", "the same place", "a hole between", "a hole in front"],
)
def test_tensors_that_do_not_lie_one_behind_the_other_are_refused(
    places: list[tuple[int, int]], size: int, tmp_path: Path
) -> None:
    described = {f"t{number}": about(*place) for number, place in enumerate(places)}
    with pytest.raises(SympruneError, match="does not begin where"):
        read_header(write(tmp_path / "x.safetensors", described, size))


def test_a_header_as_long_as_no_model_has_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:  # a hole, which takes no room on the disk
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(8 + 2**30)
    with pytest.raises(SympruneError, match="its header is not one"):
        read_header(path)


def test_a_file_is_as_long_as_its_header_says(tmp_path: Path) -> None:
    for size in (3, 5):
        with pytest.raises(SympruneError, match="bytes, not"):
            read_header(write(tmp_path / "x.safetensors", {"a": about(0, 4)}, size))


def test_what_is_written_is_on_the_disk_after_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    fsync = os.fsync

    def note(file: int) -> None:
        fsync(file)
        synced.append(os.pread(file, 1000, 0))

    monkeypatch.setattr(os, "fsync", note)
    file = OutputFile(tmp_path / "x.safetensors", make_header([("a", torch.uint8, (4,))], {}))
    file.create()
    file.write("a", torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    assert not synced
    file.sync()
    file.close()
    assert len(synced) == 1 and synced[0].endswith(bytes([1, 2, 3, 4]))
