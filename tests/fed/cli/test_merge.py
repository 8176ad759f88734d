"""`fed merge`: adapters from a federated run become part of the pruned model, whose zeros stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from symprune.checkpoint.verify import verify
from symprune.errors import SympruneError
from symprune.fed import Problem, add_lora, build, simulate
from symprune.fed.cli.main import _write, app
from symprune.maskset import MaskSet

pytest.importorskip("peft")
TARGETS = ("q_proj", "down_proj")


@dataclass(frozen=True)
class Trained:
    """A pruned model in a folder, a run's folder with adapters on it, what they come to."""

    base: Path
    run: Path
    perplexity: float
    tokens: torch.Tensor


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("merge")
    base, run = place / "base", place / "run"
    shutil.copytree(tiny_folder, base)
    (base / "LICENSE").write_text("yours")
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator, masks = torch.Generator().manual_seed(0), MaskSet()
    for name, weight in model.named_parameters():
        if "_proj" in name:
            masks[name] = torch.rand(weight.shape, generator=generator) < 0.5
    masks.apply(model)
    model.save_pretrained(base)
    masks.save(base)
    words = model.config.vocab_size
    tokens = torch.randint(3, words, (5, 8), generator=generator)
    adapted = add_lora(model, masks, rank=2, alpha=6.0, targets=TARGETS)
    problem = Problem.causal_lm(adapted, [tokens[:2], tokens[2:4]], length=8, test=tokens[4:])
    result = simulate(build("fedavg", gamma=1.0, p=0.5, batch=2), problem, 2)
    run.mkdir()
    _write(run, result, problem, result.ledger.bill(2))
    return Trained(base, run, result.history[-1]["perplexity"], tokens[4:])


def merge(trained: Trained, output: Path, *more: str, adapters: Path | None = None) -> Result:
    arguments = ["merge", str(adapters or trained.run), "--model", str(trained.base)]
    return CliRunner().invoke(app, [*arguments, "-o", str(output), *more], env={"COLUMNS": "200"})


def test_the_merged_checkpoint_is_the_model_that_was_trained_with_its_zeros(
    trained: Trained, tmp_path: Path
) -> None:
    done = merge(trained, tmp_path / "merged")
    assert done.exit_code == 0, done.exception
    masks = MaskSet.load(trained.base)
    assert f"{masks.sparsity():.1%} of the weights with masks are still zero" in done.output
    made: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base: Any = AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.float32)
    weights, before = dict(made.named_parameters()), dict(base.named_parameters())
    assert weights.keys() == before.keys()
    for name, keep in masks.items():
        assert not weights[name][~keep].any()
        changed = any(target in name for target in TARGETS)
        assert bool((weights[name] != before[name]).any()) == changed
    problem = Problem.causal_lm(made, [trained.tokens], length=8, test=trained.tokens)
    found = problem.evaluate(problem.initial())["perplexity"]
    assert found == pytest.approx(trained.perplexity, rel=1e-4)
    assert MaskSet.load(tmp_path / "merged").sparsity() == masks.sparsity()
    assert (tmp_path / "merged" / "LICENSE").read_text() == "yours"
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    assert verify(tmp_path / "merged").is_whole


def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A run's file with something else in it."""

    def write(file: Path) -> None:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"lora_alpha": "6.0"})

    return write


def first(tensors: dict[str, Any], half: str = "A") -> str:
    return next(name for name in sorted(tensors) if f"lora_{half}" in name)


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "damaged": (lambda file: file.write_bytes(b"nonsense"), "cannot be read"),
    "gone": (Path.unlink, "There are no adapters at"),
    "another network's": (
        lambda file: save_file({"1.weight": torch.ones(2, 2)}, file),
        "it has a tensor 1.weight",
    ),
    "empty": (lambda file: save_file({}, file), "holds no adapters"),
    "half": (changed(lambda t: t.pop(first(t))), "one half of the adapter of model.layers.0"),
    "not numbers": (changed(lambda t: t[first(t)].fill_(torch.nan)), "no matrix of numbers"),
    "two ranks": (
        changed(
            lambda t: t.update(
                {first(t): t[first(t)][:1], first(t, "B"): t[first(t, "B")][:, :1].contiguous()}
            )
        ),
        "have the ranks [1, 2], not one",
    ),
    "unfit": (changed(lambda t: t.update({first(t): t[first(t)][:1]})), "do not fit each other"),
    "narrower": (
        changed(lambda t: t.update({first(t): t[first(t)][:, :3].contiguous()})),
        "it must be (2, ",
    ),
    "of other layers": (
        changed(lambda t: [t.update({n.replace("_proj", "_net"): t.pop(n)}) for n in list(t)]),
        "the adapters are another model's",
    ),
    "silent about alpha": (
        lambda file: save_file(load_file(file), file),
        "does not say the adapters' alpha",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_adapters_that_do_not_fit_are_refused_in_a_sentence(
    case: str, trained: Trained, tmp_path: Path
) -> None:
    shutil.copytree(trained.run, tmp_path / "run")
    spoil, sentence = CASES[case]
    spoil(tmp_path / "run" / "model.safetensors")
    done = merge(trained, tmp_path / "merged", adapters=tmp_path / "run")
    assert isinstance(done.exception, SympruneError) and sentence in str(done.exception)
    assert not (tmp_path / "merged").exists()


def test_the_output_and_the_masks_are_the_users(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    for output, more, sentence in (
        (tmp_path / "full", (), "exists; choose another"),
        (tmp_path / "new", ("--masks", str(tmp_path / "none")), "There are no masks at"),
        (tmp_path / "new", ("--alpha", "16"), "trained with alpha = 6, not 16"),
    ):
        done = merge(trained, output, *more)
        assert isinstance(done.exception, SympruneError) and sentence in str(done.exception)
    assert not (tmp_path / "new").exists()
    masks = MaskSet.load(trained.base)
    other = MaskSet()
    for name in masks:
        other[name] = ~masks[name]
    other.save(tmp_path / "other.safetensors")
    done = merge(trained, tmp_path / "new", "--masks", str(tmp_path / "other.safetensors"))
    assert isinstance(done.exception, SympruneError)
    assert "has weights that its mask prunes" in str(done.exception)
