"""Two real processes that share the calibration samples end where one process ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import families
import pytest
import several_processes
import torch
from transformers import AutoModelForCausalLM

from symprune import Recipe
from symprune.engine.collect import Collector
from symprune.engine.reduce import reduce
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.machine import distributed
from symprune.stats import SQUARE, ChannelStats

OPTIONS = [
    "--calibration", __file__, "--nsamples", "5", "--seqlen", "32", "--eval-data", __file__,
    "--eval-windows", "3", "--device", "cpu", "--no-samples",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "--main_process_port", str(free_port()), "-m", "symprune", *map(str, arguments),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=300
    )


def assert_same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert sorted(path.name for path in other.iterdir()) == names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_launcher_s_processes_make_the_files_of_one(tmp_path: Path) -> None:
    """To the byte: each sample is summed alone, and the sum over samples is exact in any order."""
    families.model().save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    log = tmp_path / "log.jsonl"
    done = launch(
        "prune", "--model", tmp_path / "dense", "--method", "symwanda", "-o", tmp_path / "two",
        "--log", log, *OPTIONS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Saved to") == 1
    recipe = Recipe(method="symwanda", calibration=__file__, nsamples=5, seqlen=32)
    one = pruning.Job(
        str(tmp_path / "dense"), recipe, tmp_path / "one", "auto", "cpu", True, __file__, 3
    )
    pruning.prune(one)
    assert_same_files(tmp_path / "one", tmp_path / "two")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["of"] for line in lines if line["stage"] == "collect"} == {3}


@pytest.mark.parametrize(("family", "count"), [("smollm", 3), ("mixtral", 2)])
def test_processes_make_the_files_of_one_whatever_they_share(
    family: str, count: int, tmp_path: Path
) -> None:
    """To the byte: sums of Gram matrices are exact as well, and a search finds the same."""
    families.model(family).save_pretrained(tmp_path / "dense")
    assert_one_prunes_as_several(tmp_path, count, several_processes.WAYS)
    found = json.loads((tmp_path / "one" / "search" / "symprune.json").read_text())["allocation"]
    assert found["windows"] == 2 and len(found["first"]["divergence"]) > 4


def test_processes_that_train_different_blocks_make_the_files_of_one(tmp_path: Path) -> None:
    """To the byte, of a run that was interrupted between two blocks that are done together."""
    config = families.config("llama")
    config.num_hidden_layers = 5
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    assert_one_prunes_as_several(tmp_path, 2, several_processes.APART)


def assert_one_prunes_as_several(folder: Path, count: int, names: Iterable[str]) -> None:
    """Of the model in folder/dense, in each of these ways."""
    dense = folder / "dense"
    families.tokenizer().save_pretrained(dense)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count),
        "--master_port", str(free_port()), several_processes.__file__, str(dense), __file__,
        str(folder / "several"), *names,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in names:
        several_processes.prune(dense, __file__, folder / "one", name)
        assert_same_files(folder / "one" / name, folder / "several" / name)
    torch.set_num_threads(threads)


def test_more_processes_than_samples_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "size", lambda: 4)
    with pytest.raises(SympruneError, match="3 calibration samples are too few for 4 processes"):
        distributed.share(families.tokens(3))


def test_samples_are_divided_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = families.tokens(7)
    monkeypatch.setattr(distributed, "size", lambda: 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(distributed.share(tokens))
    assert [len(share) for share in shares] == [3, 2, 2]
    assert torch.equal(torch.cat(shares), tokens)


def test_the_order_of_the_sum_does_not_show_in_the_norms() -> None:
    """What lets two processes make the masks of one: fp64 sums of fp32 sums."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(64, 256, generator=generator) * 10**scale for scale in range(-3, 5)]
    parts = []
    for order in (range(8), reversed(range(8))):
        stats = ChannelStats(256, [SQUARE])
        for number in order:
            stats.add(samples[number])
        parts.append(stats.norm)
    left, right = ChannelStats(256, [SQUARE]), ChannelStats(256, [SQUARE])
    for number, sample in enumerate(samples):
        (left if number % 2 else right).add(sample)
    left.merge(right)
    assert torch.equal(parts[0], parts[1]) and torch.equal(parts[0], left.norm)


def test_one_process_reduces_to_itself() -> None:
    collector = Collector()
    reduce(collector)
    assert distributed.size() == 1 and distributed.rank() == 0 and distributed.is_first()
