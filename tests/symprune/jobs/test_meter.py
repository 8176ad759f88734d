"""What a long run shows, in its log and to a person; where its hidden states and blocks are."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
import torch
from rich.console import Console
from transformers import AutoConfig
from typer.testing import CliRunner

from symprune import Recipe
from symprune.checkpoint import device_map
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.checkpoint.tensor_files import Shards
from symprune.cli import console, main
from symprune.cli.screen.progress import Live
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.jobs.meter import Meter
from symprune.machine import memory, offload

RECIPE = Recipe(calibration=__file__, nsamples=3, seqlen=16)


def test_the_log_says_where_how_fast_how_long_and_how_much(
    tiny_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    command = ["prune", "--model", str(tiny_folder), "--calibration", __file__, "--nsamples", "3"]
    command += ["--seqlen", "16", "--no-eval", "-o", str(tmp_path / "out"), "--log", str(log)]
    assert CliRunner().invoke(main.app, command, catch_exceptions=False).exit_code == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["stage"] for line in lines if not line["layer"]] == [
        "embed", "collect", "advance", "done", "collect", "done",
    ]  # fmt: skip
    layers = [line["layer"] for line in lines if line["layer"]]
    assert len(layers) == 14 and layers[0] == "model.layers.0.self_attn.q_proj.weight"
    last = lines[-1]
    assert (last["block"], last["blocks"], last["seconds_left"]) == (2, 2, 0)
    assert last["tokens_per_second"] > 0
    assert 0 < last["memory_bytes"] <= last["peak_memory_bytes"]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


def test_speed_and_time_left_follow_from_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 12.0, 14.0, 14.0, 20.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    meter = Meter(seqlen=100)
    meter("embed", 0, 4, 0, 2)
    meter("collect", 0, 4, 0, 2)
    meter("collect", 0, 4, 1, 2)
    assert meter.figures["seconds_left"] is None
    meter("mask", 0, 4, 0, 1, "layer")
    meter("done", 0, 4, 2, 2)
    assert meter.figures["seconds_left"] == 30.0
    assert meter.figures["tokens_per_second"] == 100.0


@pytest.mark.parametrize(
    ("columns", "doing", "speed", "memory"),
    [
        (160, "block 2: masking self_attn.q_proj", "tokens/s", "GB, peak"),
        (80, "block 2: masking", "tok/s", "GB"),
    ],
)
def test_a_person_sees_the_same(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    doing: str,
    speed: str,
    memory: str,
) -> None:
    there = Console(stderr=True, width=columns, force_terminal=True)
    monkeypatch.setattr(console, "err", there)
    shown: list[str] = []
    with console.display() as display:
        assert isinstance(display, Live)

        def show(figures: dict[str, object]) -> None:
            display.show(figures)
            task = display.progress.tasks[0]
            shown.append(f"{task.description} {task.fields['figures']}")

        pruning.prune(
            pruning.Job(str(tiny_folder), RECIPE, tmp_path / "out", evaluate=False), show=show
        )
    assert any(doing in line for line in shown)
    assert speed in shown[-1] and memory in shown[-1]
    assert all(len(line) < columns - 30 for line in shown)


def test_a_log_that_cannot_be_written_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    job = pruning.Job(str(tiny_folder), RECIPE, tmp_path / "out", evaluate=False, log=tmp_path)
    with pytest.raises(SympruneError, match="Cannot write "):
        pruning.prune(job)


def test_hidden_states_on_disk_change_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "states"
    job = pruning.Job(
        str(tiny_folder), RECIPE, tmp_path / "one", eval_data=__file__, eval_windows=2
    )
    pruning.prune(job)
    pruning.prune(
        pruning.Job(
            str(tiny_folder), RECIPE, tmp_path / "two", eval_data=__file__, eval_windows=2,
            offload=there,
        )
    )  # fmt: skip
    assert list(there.iterdir()) == []
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_offloaded_memory_is_that_of_a_file(tmp_path: Path) -> None:
    tensor = offload.allocate_in(tmp_path)((3, 1000, 7), torch.bfloat16, torch.device("cpu"))
    assert tensor.shape == (3, 1000, 7) and tensor.dtype == torch.bfloat16
    tensor.fill_(2)
    assert float(tensor.float().sum()) == 42000
    maps = Path("/proc/self/maps").read_text()
    assert any(str(tmp_path) in line and "rw-s" in line for line in maps.splitlines())
    (tmp_path / "file").touch()
    with pytest.raises(SympruneError, match="cannot be kept"):
        offload.allocate_in(tmp_path / "file")


def test_blocks_are_divided_among_devices_as_accelerate_does(tmp_path: Path) -> None:
    config = families.config("llama")
    config.num_hidden_layers = 6
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    streamed = StreamedModel(Shards(tmp_path), AutoConfig.from_pretrained(tmp_path))
    block = sum(p.numel() for p in streamed.layout.blocks[0].parameters()) * 4
    room = {0: 4 * block, 1: 4 * block, "cpu": 10**9}
    devices = device_map.choose_devices(streamed, "sequential", room)
    assert len(devices) == 6
    assert [str(device) for device in devices] == sorted(str(device) for device in devices)
    assert {str(device) for device in devices} >= {"cuda:0", "cuda:1"}
    small = device_map.choose_devices(streamed, "auto", {"cpu": 10**9})
    assert {str(device) for device in small} == {"cpu"}
    with pytest.raises(SympruneError, match="Unknown device map 'spread'"):
        device_map.choose_devices(streamed, "spread")


def test_the_device_map_of_one_device_changes_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    for name, how in (("one", None), ("two", "auto")):
        out = tmp_path / name
        job = pruning.Job(
            str(tiny_folder), RECIPE, out, "auto", "cpu", evaluate=False, device_map=how
        )
        pruning.prune(job)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_memory_now_is_at_most_the_peak() -> None:
    memory.return_large_blocks()
    assert 0 < memory.now() <= memory.peak()
