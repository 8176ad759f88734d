"""Pruning to a grid writes packed files: those of the model in memory, whole, resumable, and plain
again when unpacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from stopping import Killed, die_after
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import symprune
from symprune import MaskSet, Recipe
from symprune.checkpoint import packed, resume
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.checkpoint.tensor_files import Shards
from symprune.cli import main
from symprune.jobs import pruning
from symprune.runtime import blob

FAMILIES = ["llama", "smollm", "gpt2", "mixtral"]


def recipe(**changes: Any) -> Recipe:
    chosen: dict[str, Any] = {"values": "int4", "values_head": "int8", "update": "lsq"}
    return Recipe("wanda", calibration=__file__, nsamples=2, seqlen=32, **(chosen | changes))


def make_dense(folder: Path, family: str = "llama") -> Path:
    model = families.model(family).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30KB")
    families.tokenizer().save_pretrained(folder)
    return folder


def prune(dense: Path, output: Path, chosen: Recipe, **options: Any) -> dict[str, Any]:
    job = pruning.Job(str(dense), chosen, output, eval_data=__file__, eval_windows=2, **options)
    return pruning.prune(job)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("amount", [{"sparsity": 0.5}, {"pattern": "2:4"}, {"sparsity": 0.0}])
def test_the_files_hold_the_codes_of_the_model_in_memory(
    family: str, amount: dict[str, Any], tmp_path: Path
) -> None:
    dense, chosen = make_dense(tmp_path / "dense", family), recipe(**amount)
    prune(dense, tmp_path / "packed", chosen)
    model = AutoModelForCausalLM.from_pretrained(dense)
    report = symprune.prune(model, AutoTokenizer.from_pretrained(dense), chosen)
    stored = Shards(tmp_path / "packed")
    names = {blob.parameter_name(name) for name in stored if name.endswith("packed")}
    assert names == {name.rpartition(".")[0] if name[-1].isdigit() else name
                     for name in report.values}  # fmt: skip
    for name in names:
        pieces = blob.decode_codes(stored.read(blob.packed_name(name)))
        for number, (codes, scales, _) in enumerate(pieces):
            value = report.values[name if name in report.values else f"{name}.{number}"]
            assert torch.equal(codes, value.codes) and torch.equal(scales, value.scales)
    masks = MaskSet.load(tmp_path / "packed")
    assert set(masks) == set(report.masks)
    assert all(torch.equal(masks[name], report.masks[name]) for name in masks)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpacked_it_is_a_plain_model_with_the_same_weights(family: str, tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense", family)
    prune(dense, tmp_path / "packed", recipe())
    packed.unpack(tmp_path / "packed", tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert Shards(tmp_path / "plain").files == Shards(dense).files
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    running = symprune.load(tmp_path / "packed", dtype="float32", dequantize=True)
    for name, weight in plain.state_dict().items():
        other = running.state_dict()[name]
        assert torch.allclose(weight, other, rtol=2**-8, atol=0), name  # the plain one is bfloat16
    masks = MaskSet.load(tmp_path / "plain")
    assert masks.sparsity() == pytest.approx(0.5)


def test_values_of_the_head_alone_leave_the_blocks_in_16_bits(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense", "smollm")
    prune(dense, tmp_path / "packed", recipe(values=None, update=None))
    stored = Shards(tmp_path / "packed")
    kinds = {
        name: blob.describe(stored.read(name)).kind for name in stored if name.endswith("packed")
    }
    assert kinds.pop("model.embed_tokens.packed") == "int8"
    assert kinds and set(kinds.values()) == {"bfloat16"}


def test_a_matrix_that_is_pruned_but_no_smaller_is_written_plain(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense")
    chosen = recipe(values=None, update=None, sparsity=0.04)
    prune(dense, tmp_path / "packed", chosen)
    prune(
        dense, tmp_path / "plain", recipe(values=None, values_head=None, update=None, sparsity=0.04)
    )
    view, plain = open_shards(tmp_path / "packed"), Shards(tmp_path / "plain")
    name = "model.layers.0.mlp.up_proj.weight"
    assert name in Shards(tmp_path / "packed") and (plain.read(name) == 0).any()
    assert torch.equal(view.read(name), plain.read(name))


@pytest.mark.parametrize("states_kept", [True, False])
@pytest.mark.parametrize("block", [0, 1])
def test_a_killed_run_goes_on_to_the_same_bytes(
    block: int, states_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = make_dense(tmp_path / "dense")
    prune(dense, tmp_path / "whole", recipe())
    monkeypatch.setattr(resume.HiddenStates, "due", lambda _: states_kept)
    with monkeypatch.context() as patch:
        die_after(block, patch)
        with pytest.raises(Killed):
            prune(dense, tmp_path / "out", recipe())
    assert not (tmp_path / "out").exists()
    prune(dense, tmp_path / "out", recipe())
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_norms_with_more_digits_than_the_weights_are_rounded_again_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished blocks are run again with their values as they were computed with, not rounded to
    the checkpoint's type, but with everything else in that type."""
    dense = tmp_path / "dense"
    model = families.model("llama").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + torch.rand(parameter.shape, generator=generator) / 2
    model.save_pretrained(dense)
    families.tokenizer().save_pretrained(dense)
    exactly = {"compute_dtype": "float32"}  # where a CPU has instructions for bfloat16 too
    prune(dense, tmp_path / "whole", recipe(), **exactly)
    monkeypatch.setattr(resume.HiddenStates, "due", lambda _: False)
    with monkeypatch.context() as patch:
        die_after(0, patch)
        with pytest.raises(Killed):
            prune(dense, tmp_path / "out", recipe(), **exactly)
    prune(dense, tmp_path / "out", recipe(), **exactly)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_lost_part_of_a_killed_run_begins_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = make_dense(tmp_path / "dense")
    prune(dense, tmp_path / "whole", recipe())
    with monkeypatch.context() as patch:
        patch.setattr(StreamedBlocks, "begin", _interrupt_after(StreamedBlocks.finish, patch))
        with pytest.raises(KeyboardInterrupt):
            prune(dense, tmp_path / "out", recipe())
    (tmp_path / ".out.partial" / "blocks" / "block-00000.safetensors").unlink()
    prune(dense, tmp_path / "out", recipe())
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def _interrupt_after(finish: Any, patch: pytest.MonkeyPatch) -> Any:
    begin = StreamedBlocks.begin

    def then_stop(self: StreamedBlocks, *rest: Any) -> None:
        finish(self, *rest)
        raise KeyboardInterrupt

    patch.setattr(StreamedBlocks, "finish", then_stop)
    return begin


def test_the_record_and_the_commands_know_packed_models(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense")
    record = prune(dense, tmp_path / "packed", recipe())
    stored = Shards(tmp_path / "packed")
    sizes = {
        name: entry.size
        for name, entry in stored.entries.items()
        if name.endswith("packed") and ".layers." in name
    }
    weights = record["prunable"]
    assert record["bits_per_weight"] == pytest.approx(8 * sum(sizes.values()) / weights)
    runner = CliRunner()
    for command in (
        ["inspect", str(tmp_path / "packed")],
        ["report", str(tmp_path / "packed"), "-o", str(tmp_path / "page.html")],
        ["refine", "--model", str(dense), "--masks", str(tmp_path / "packed"), "--refine", "swap",
         "--no-eval", "-o", str(tmp_path / "refined")],
        ["eval", "--model", str(tmp_path / "packed"), "--data", __file__, "--seqlen", "32",
         "--windows", "2"],
    ):  # fmt: skip
        shown = runner.invoke(main.app, command, catch_exceptions=False)
        assert shown.exit_code == 0, shown.output
