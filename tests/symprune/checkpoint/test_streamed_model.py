"""A model that stays on disk is pruned to the bits of one that is in memory.

Bits can be compared, since where a weight is kept changes no call that computes with it.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from symprune import MaskSet, Recipe
from symprune.checkpoint.load import load_model
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.checkpoint.tensor_files import Shards
from symprune.engine import forward, walk
from symprune.errors import SympruneError
from symprune.eval.perplexity import perplexity
from symprune.jobs import pruning
from symprune.jobs.streamed_perplexity import perplexity as streamed_perplexity
from symprune.models import hub

RECIPE = Recipe(calibration=__file__, nsamples=3, seqlen=16, sparsity=0.5)


def save(folder: Path, family: str, dtype: torch.dtype = torch.float32, **options: str) -> Path:
    families.model(family).to(dtype).save_pretrained(folder, **options)
    families.tokenizer().save_pretrained(folder)
    return folder


def job(dense: Path, output: Path) -> pruning.Job:
    """In bf16 on every processor, as the library computes a model that is in bf16."""
    return pruning.Job(str(dense), RECIPE, output, evaluate=False, compute_dtype="bfloat16")


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("model*.safetensors"):
        found |= load_file(path)
    return found


def in_memory(folder: Path, recipe: Recipe = RECIPE, dtype: str = "auto") -> tuple[object, MaskSet]:
    origin = hub.resolve(str(folder))
    model = load_model(origin, dtype)
    report = walk.prune(model, hub.load_tokenizer(origin), recipe)
    return model, report.masks


@pytest.mark.parametrize("family", [*families.FAMILIES, *families.UNUSUAL])
def test_every_family_gets_the_bits_it_gets_in_memory(family: str, tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", family, torch.bfloat16, max_shard_size="20KB")
    pruning.prune(job(dense, tmp_path / "out"))
    model, masks = in_memory(dense)
    model.save_pretrained(tmp_path / "memory")  # type: ignore[attr-defined]
    expected, got = tensors(tmp_path / "memory"), tensors(tmp_path / "out")
    assert expected.keys() == got.keys()
    stored = tensors(dense)
    for name, value in expected.items():
        assert torch.equal(value, got[name]) and got[name].dtype == stored[name].dtype, name
    written = MaskSet.load(tmp_path / "out")
    assert set(written) == set(masks)
    assert all(torch.equal(written[name], masks[name]) for name in masks)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types_names_and_files_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    for name, size in (("single", "1GB"), ("sharded", "10KB")):
        dense = save(tmp_path / name, "smollm", dtype, max_shard_size=size)
        out = tmp_path / f"{name}-out"
        pruning.prune(pruning.Job(str(dense), RECIPE, out, evaluate=False))
        files = {path.name for path in dense.iterdir()}
        assert {path.name for path in out.iterdir()} == files | {
            "symprune.json",
            "masks.safetensors",
            "checksums.json",
            "README.md",
        }
        before, after = tensors(dense), tensors(out)
        assert {n: v.dtype for n, v in before.items()} == {n: v.dtype for n, v in after.items()}
        assert {v.dtype for v in after.values()} == {dtype}
        if name == "sharded":
            index = json.loads((out / "model.safetensors.index.json").read_text())
            assert len(set(index["weight_map"].values())) > 2
            assert index["weight_map"].keys() == after.keys()
            assert index["metadata"]["total_size"] == sum(v.nbytes for v in after.values())


def test_another_type_can_be_asked_for(tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", "llama", max_shard_size="10KB")
    pruning.prune(replace(job(dense, tmp_path / "out"), dtype="bfloat16"))
    model, _ = in_memory(dense, dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    for name, value in model.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_only_one_block_has_its_weights_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = save(tmp_path / "dense", "llama")
    streamed = StreamedModel(Shards(dense), AutoConfig.from_pretrained(dense))

    def there() -> set[str]:
        return {name for name, p in streamed.model.named_parameters() if not p.is_meta}

    assert there() == set()
    with streamed.around():
        assert there() == {"model.embed_tokens.weight", "model.norm.weight"}
    with streamed.around(head=True):
        assert there() == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for index in range(2):
        with streamed.block(index):
            assert len(there()) == 9
            assert all(name.startswith(f"model.layers.{index}.") for name in there())
    assert there() == set()


def test_nothing_of_a_block_is_held_when_the_next_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, block = save(tmp_path / "dense", "llama"), StreamedModel.block
    before: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    @contextmanager
    def watched(self: StreamedModel, index: int, source: Any = None) -> Iterator[nn.Module]:
        alive.append(sum(parameter() is not None for parameter in before))
        with block(self, index, source) as entered:
            before[:] = [weakref.ref(parameter) for parameter in entered.parameters()]
            yield entered

    monkeypatch.setattr(StreamedModel, "block", watched)
    pruning.prune(pruning.Job(str(dense), RECIPE, tmp_path / "out", evaluate=False))
    assert len(alive) > 1 and not any(alive)


@pytest.mark.parametrize("family", ["smollm", "gemma2", "gpt2", "falcon", "mixtral"])
def test_perplexity_block_by_block_is_that_of_the_model_in_memory(
    family: str, tmp_path: Path
) -> None:
    dense = save(tmp_path / "dense", family)
    streamed = StreamedModel(Shards(dense), AutoConfig.from_pretrained(dense))
    ids = families.tokens(1, 170)[0]
    ticks: list[int] = []
    found = streamed_perplexity(
        streamed, ids, 32, tick=lambda done, total: ticks.append(done), at_once=2
    )
    model = AutoModelForCausalLM.from_pretrained(dense)
    with forward.ready(model):
        assert found == perplexity(model, ids, 32)
    assert found.windows == 5 and ticks == sorted(ticks) and ticks[-1] == 5


def test_a_library_user_can_load_the_whole_model(tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", "qwen3-moe")
    streamed = StreamedModel(Shards(dense), AutoConfig.from_pretrained(dense))
    expected = AutoModelForCausalLM.from_pretrained(dense).state_dict()
    got = streamed.load_all().state_dict()
    assert expected.keys() == got.keys()
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_a_release_of_transformers_that_lacks_what_is_needed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = save(tmp_path / "dense", "llama")
    monkeypatch.delattr("transformers.core_model_loading.rename_source_key")
    with pytest.raises(SympruneError, match=r"transformers \d.*rename_source_key.*install"):
        StreamedModel(Shards(dense), AutoConfig.from_pretrained(dense))


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", "llama", max_shard_size="10KB")
    broken = pruning.Job(str(dense), RECIPE, tmp_path / "out", evaluate=False)
    lost = sorted(dense.glob("model-*.safetensors"))[1]
    whole = lost.read_bytes()
    lost.write_bytes(whole[:-8])
    with pytest.raises(SympruneError, match=rf"{lost.name} is a corrupt safetensors file.*bytes"):
        pruning.prune(broken)
    lost.unlink()
    with pytest.raises(SympruneError, match=f"not complete: {lost.name}"):
        pruning.prune(broken)
    save(tmp_path / "few", "llama")
    few = load_file(tmp_path / "few" / "model.safetensors")
    del few["model.layers.1.mlp.up_proj.weight"]
    save_file(few, tmp_path / "few" / "model.safetensors")
    with pytest.raises(SympruneError, match=r"no weights for model\.layers\.1\.mlp\.up_proj"):
        pruning.prune(pruning.Job(str(tmp_path / "few"), RECIPE, tmp_path / "out", evaluate=False))
    assert not (tmp_path / "out").exists()
