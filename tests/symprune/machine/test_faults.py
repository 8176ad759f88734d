"""Faults of files and disks are sentences that name the right culprit; the run goes on later."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from symprune import gram
from symprune.checkpoint import tensor_files
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.checkpoint.tensor_files import Shards
from symprune.cli import main
from symprune.errors import SympruneError
from symprune.machine import offload

SMALL = [
    "--calibration",
    "builtin",
    "--nsamples",
    "2",
    "--seqlen",
    "32",
    "--no-eval",
    "--no-samples",
]


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    numbers = torch.arange(5 * 2**20, dtype=torch.float32)
    save_file(
        {"a": numbers, "b": torch.ones(3), "c": torch.zeros(0, 4)}, tmp_path / "x.safetensors"
    )
    return Shards(tmp_path, ["x.safetensors"])


def test_tensors_are_read_as_they_are(shards: Shards) -> None:
    assert torch.equal(shards.read("a"), torch.arange(5 * 2**20, dtype=torch.float32))
    assert shards.read("b").tolist() == [1, 1, 1] and shards.read("c").shape == (0, 4)
    together = b"".join(piece.tobytes() for piece in shards.chunks("a"))
    assert together == shards.read("a").numpy().tobytes()


def test_a_file_cut_short_while_it_is_read_is_a_sentence(shards: Shards) -> None:
    path = shards.folder / "x.safetensors"
    pieces = shards.chunks("a")
    next(pieces)
    os.truncate(path, 9 * 2**20)
    with pytest.raises(SympruneError, match=r"x\.safetensors became shorter while it was read"):
        list(pieces)
    with pytest.raises(SympruneError, match="became shorter"):
        shards.read("a")


def test_a_file_that_is_gone_is_named(shards: Shards) -> None:
    (shards.folder / "x.safetensors").unlink()
    with pytest.raises(SympruneError, match=r"x\.safetensors cannot be read"):
        shards.read("b")


def test_a_run_whose_input_is_cut_short_says_so_and_goes_on_later(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_folder, model)
    weights = model / "model.safetensors"
    content, about = weights.read_bytes(), weights.stat()
    finish = StreamedBlocks.finish

    def cut(self: StreamedBlocks, index: int, *rest: object) -> None:
        finish(self, index, *rest)  # type: ignore[arg-type]
        os.truncate(weights, 4096)

    monkeypatch.setattr(StreamedBlocks, "finish", cut)
    command = ["prune", "--model", str(model), "-o", str(output), *SMALL]
    result = CliRunner().invoke(main.app, command)
    assert isinstance(result.exception, SympruneError)
    assert "model.safetensors became shorter while it was read" in str(result.exception)
    monkeypatch.undo()
    weights.write_bytes(content)
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert CliRunner().invoke(main.app, command).exit_code == 0
    assert output.is_dir()


def test_all_of_a_block_is_asked_for_ahead_in_pieces(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, at, size, how: asked.append((at, size)))
    shards._will_need([shards.entries["a"]])
    entry = shards.entries["a"]
    assert max(size for _, size in asked) <= tensor_files.ADVICE <= 8 * 2**20
    assert [at for at, _ in asked] == list(
        range(entry.start, entry.start + entry.size, tensor_files.ADVICE)
    )
    assert sum(size for _, size in asked) == entry.size


def fill(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_room_for_hidden_states_and_gram_matrices_is_taken_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = offload.allocate_in(tmp_path)
    held = allocate((4, 1024), torch.float32, torch.device("cpu"))
    held.fill_(1)
    assert held.sum() == 4096 and gram._square(64, "disk").sum() == 0
    monkeypatch.setattr(os, "posix_fallocate", fill)
    with pytest.raises(SympruneError, match=r"hidden states cannot be kept in .*No space left"):
        allocate((4, 1024), torch.float32, torch.device("cpu"))
    with pytest.raises(SympruneError, match=r"Gram matrix .* cannot be kept in .*No space left"):
        gram._square(64, "disk")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_under_the_log_names_the_log(tiny_folder: Path, tmp_path: Path) -> None:
    command = ["prune", "--model", str(tiny_folder), "-o", str(tmp_path / "out"), *SMALL]
    result = CliRunner().invoke(main.app, [*command, "--log", "/dev/full"])
    assert isinstance(result.exception, SympruneError)
    assert str(result.exception) == "Cannot write the log /dev/full: No space left on device."
    result = CliRunner().invoke(main.app, [*command, "--json", "/dev/full"])
    assert str(result.exception) == "Cannot write /dev/full: No space left on device."
    assert (tmp_path / "out").is_dir()
