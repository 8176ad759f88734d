"""Language models as problems: the model's own loss, padded windows, masks, devices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_device import PretendDevice
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from symprune import MaskSet
from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.problems.models.causal_lm import cut_windows
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import simulate

VOCABULARY, LENGTH = 40, 8
EXEMPT = ("*embed*", "*norm*")
FEDAVG = {"gamma": 0.5, "p": 0.5, "random_steps": False, "batch": 2}


def llama(tied: bool = False, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def tokens(rows: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


TEXTS = [tokens(3), tokens(1, 4 * LENGTH + 3, 1)[0], [tokens(1, n, n)[0] for n in (5, 11, 2)]]


def small(model: Any = None, **options: Any) -> Problem:
    options = {"length": LENGTH, "client_tests": TEXTS, "test": tokens(2, seed=5), **options}
    return Problem.causal_lm(model or llama(), TEXTS, **options)


def half(problem: Problem) -> MaskSet:
    masks, generator = MaskSet(), torch.Generator().manual_seed(3)
    for name, shape in zip(problem.layout.names, problem.layout.shapes, strict=True):
        if "_proj" in name:
            masks[name] = torch.rand(shape, generator=generator) < 0.5
    return masks


def test_the_loss_and_gradient_of_full_windows_are_the_models_own() -> None:
    model = llama()
    problem = Problem.causal_lm(model, [tokens(3)], length=LENGTH, rows_at_once=2)
    own = model(input_ids=tokens(3), labels=tokens(3)).loss
    own.backward()
    assert problem.mean_value(problem.initial()) == pytest.approx(own.item(), rel=1e-6)
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    gradient = problem.gradient(problem.initial())[0]
    assert torch.allclose(gradient, expected, atol=1e-6 * float(expected.abs().max()) * LENGTH)


def test_padding_changes_nothing_and_every_token_weighs_the_same() -> None:
    model = llama()
    documents = [tokens(1, n, n)[0] for n in (5, 11, 2)]
    problem = Problem.causal_lm(model, [documents], length=11)
    total = predicted = 0.0
    for document in documents:
        own = model(input_ids=document.unsqueeze(0), labels=document.unsqueeze(0)).loss
        total += own.item() * (len(document) - 1)
        predicted += len(document) - 1
    assert problem.mean_value(problem.initial()) == pytest.approx(total / predicted, rel=1e-5)
    wide = Problem.causal_lm(model, [documents], length=16)
    assert wide.mean_value(wide.initial()) == pytest.approx(total / predicted, rel=1e-5)


def test_perplexity_is_the_exponential_of_the_mean_loss_on_test_text() -> None:
    problem = small()
    w = problem.initial()
    assert problem.evaluate(w)["perplexity"] == pytest.approx(
        math.exp(Problem.causal_lm(llama(), [tokens(2, seed=5)], length=LENGTH).mean_value(w))
    )
    each = [score["perplexity"] for score in problem.evaluate_each(w)]
    assert each == pytest.approx(problem.value(w).exp().tolist())
    personal = problem.evaluate_personal(w.expand(3, -1))["personal_perplexity"]
    assert personal == pytest.approx(sum(each) / 3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
def test_clients_together_alone_over_the_wire_and_resumed_are_the_same_bits(
    dropout: float, masked: bool, tmp_path: Path
) -> None:
    def problem() -> Problem:
        return small(llama(dropout=dropout), exempt=EXEMPT)

    file = tmp_path / "run.safetensors"
    masks = half(problem()) if masked else None
    algorithm = build("fedavg", **FEDAVG)
    together = simulate(algorithm, problem(), 2, masks=masks)
    assert dropout or together.history[-1]["loss"] < together.history[0]["loss"]
    alone = {"masks": masks, "clients_at_once": 1, "wire": True, "checkpoint": file}
    simulate(algorithm, problem(), 1, **alone)  # type: ignore[arg-type]
    again = simulate(algorithm, problem(), 2, **alone)  # type: ignore[arg-type]
    assert again.history == together.history and torch.equal(again.model, together.model)
    for name, keep in (masks or {}).items():
        assert not again.parameters[name][~keep].any()


@pytest.mark.parametrize("name", ["sparse-proxskip", "ef21", "fedspa", "scaffold", "fedp3"])
def test_algorithms_train_a_language_model_with_masks(name: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "sparse-proxskip": {"gamma": 0.2, "p": 0.5, "sparsity": 0.0},
        "ef21": {"gamma": 0.2, "compressor": "top-k:0.2+int8"},
        "fedspa": {"batch": 4, "epochs": 1, "lr": 0.2},
        "scaffold": {"batch": 4},
        "fedp3": {"lr": 0.2, "batch": 4},
    }
    problem = small(exempt=EXEMPT)
    masks = half(problem)
    result = simulate(build(name, **options[name]), problem, 2, masks=masks)
    assert math.isfinite(result.history[-1]["perplexity"])
    assert not any(result.parameters[each][~keep].any() for each, keep in masks.items())


def test_exempt_and_tied_weights_are_not_counted_or_trained() -> None:
    problem = small(llama(tied=True))
    assert "lm_head.weight" not in problem.layout.names
    kept = small(llama(tied=True), exempt=EXEMPT)
    assert all("_proj" in name for name in kept.layout.names)
    assert problem.dimension - kept.dimension == VOCABULARY * 16 + 5 * 16


def test_a_model_elsewhere_gives_the_same_numbers() -> None:
    model = llama()
    model.set_attn_implementation("eager")  # no gradient passes the device's fused attention
    here = small(model, exempt=EXEMPT)
    w = here.initial()
    with PretendDevice() as device:
        there = small(device.take(model), exempt=EXEMPT)
        assert there.loss.device.type == "lazy"  # type: ignore[attr-defined]
        assert torch.equal(there.initial(), w)
        assert torch.equal(there.value(w), here.value(w))
        gradient = there.gradient(w.expand(3, -1))
        assert gradient.device.type == "cpu"
        assert torch.allclose(gradient, here.gradient(w), atol=1e-6)


class Letters:
    """A tokenizer: every letter is a token."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 96 for letter in text]}


def test_text_is_cut_into_windows_document_by_document() -> None:
    rows, sizes = cut_windows(["abcde", "fgh", "i"], 3, Letters())
    assert rows.tolist() == [[1, 2, 3], [4, 5, 0], [6, 7, 8]]
    assert sizes.tolist() == [3, 2, 3]
    assert cut_windows("abcd", 4, Letters())[0].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("abc", {}, "needs a tokenizer"),
        (torch.ones(4), {}, r"whole numbers.*float32 of shape \(4,\)"),
        (torch.tensor([1]), {}, "no window of two tokens"),
        (torch.tensor([1, VOCABULARY]), {}, f"Token {VOCABULARY} .* vocabulary of {VOCABULARY}"),
        (torch.tensor([1, 2]), {"length": 1}, "two tokens at least, not 1"),
        (tokens(2, 9), {}, "Windows of 9 tokens are longer than length = 8"),
        (torch.tensor([1, 2]), {"rows_at_once": 0}, "rows_at_once must be above 0"),
        (torch.tensor([1, 2]), {"client_tests": []}, "0 tests for 1 clients"),
        (None, {}, "not a NoneType"),
    ],
)
def test_text_that_is_none_is_refused(text: Any, options: dict[str, Any], sentence: str) -> None:
    given = [[text]] if text is None else [text]
    with pytest.raises(SympruneError, match=sentence):
        Problem.causal_lm(llama(), given, **{"length": LENGTH, **options})
