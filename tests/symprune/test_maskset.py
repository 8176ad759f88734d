"""Masks as artifacts."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch

from symprune import MaskSet, Recipe, prune
from symprune.errors import SympruneError


def pruned(method: str = "wanda", family: str = "llama") -> tuple[torch.nn.Module, MaskSet]:
    model = families.model(family)
    return model, prune(model, families.tokens(), Recipe(method=method)).masks


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_masks_survive_the_disk_and_fit_another_checkpoint(tmp_path: Path, family: str) -> None:
    model, masks = pruned(family=family)
    masks.save(tmp_path)
    loaded = MaskSet.load(tmp_path)
    assert all(torch.equal(loaded[name], masks[name]) for name in masks)
    fresh = families.model(family)
    loaded.apply(fresh)
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), fresh.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_the_same_masks_make_the_same_file(tmp_path: Path) -> None:
    """Although safetensors writes what a file says of itself in any order."""
    masks = pruned()[1]
    files = set()
    for _ in range(16):
        masks.save(tmp_path)
        files.add((tmp_path / "masks.safetensors").read_bytes())
    assert len(files) == 1


def test_masks_are_found_in_the_zeros_of_a_model() -> None:
    model, masks = pruned()
    found = MaskSet.of(model)
    assert set(found) == set(masks)
    assert found.sparsity() == masks.sparsity() == 0.5
    assert all(value == 1.0 for value in found.overlap(masks).values())


def test_overlap_is_the_share_of_kept_weights_in_common() -> None:
    one, two = MaskSet(), MaskSet()
    one["w"] = torch.tensor([[True, True, False, False]])
    two["w"] = torch.tensor([[True, False, True, False]])
    assert one.overlap(two) == {"w": 1 / 3}
    assert one.sparsity("w") == 0.5


def test_a_mask_that_does_not_fit_changes_nothing() -> None:
    masks = pruned()[1]
    masks["model.norm.weight"] = torch.ones(3, dtype=torch.bool)
    fresh = families.model()
    with pytest.raises(SympruneError, match=r"model\.norm\.weight"):
        masks.apply(fresh)
    before = families.model().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def test_unreadable_masks_are_named(tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match="no masks"):
        MaskSet.load(tmp_path / "nothing.safetensors")
    (tmp_path / "masks.safetensors").write_bytes(b"garbage")
    with pytest.raises(SympruneError, match="corrupt"):
        MaskSet.load(tmp_path)


def test_zeros_stay_zero_through_fine_tuning(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model, masks = pruned()
    before = model.model.layers[0].mlp.up_proj.weight.clone()  # type: ignore[union-attr,index]
    rows = [{"input_ids": row, "labels": row} for row in families.tokens(8, 12)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2,
        learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[masks.trainer_callback()]
    ).train()
    after = model.model.layers[0].mlp.up_proj.weight  # type: ignore[union-attr,index]
    assert not torch.equal(after, before)
    assert MaskSet.of(model).sparsity() == 0.5
    assert all(value == 1.0 for value in MaskSet.of(model).overlap(masks).values())
