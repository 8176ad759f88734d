"""What the tests of measuring share: documents per task, a tiny random model, a run, a sweep."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import reports
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Rows = dict[str, list[dict[str, Any]]]


def _quiz(stem: str, texts: list[str], answer: str) -> dict[str, Any]:
    labels = ["A", "B", "C", "D"][: len(texts)]
    return {stem: "What do cows drink?", "choices": {"text": texts, "label": labels}} | {
        "id": texts[0],
        "answerKey": answer,
    }


ROWS: Rows = {
    "boolq": [
        {"passage": "Ice is frozen water.", "question": "is ice water", "answer": True},
        {"passage": "The sun is a star.", "question": "is the sun a planet", "answer": False},
    ],
    "rte": [
        {"sentence1": "Ann has a cat.", "sentence2": "Ann has a pet.", "label": 0, "idx": 0},
        {"sentence1": "Ann has a cat.", "sentence2": "Ann has a dog.", "label": 1, "idx": 1},
    ],
    "hellaswag": [
        {
            "ind": number,
            "activity_label": "Baking [step] bread",
            "ctx_a": "A man kneads dough.",
            "ctx_b": "he",
            "ctx": "A man kneads dough. he",
            "endings": ["bakes it.", "swims [title] away.", "sings.", "is dough."],
            "source_id": "here",
            "split": "val",
            "split_type": "indomain",
            "label": str(number),
        }
        for number in range(2)
    ],
    "winogrande": [
        {
            "sentence": "The cup did not fit in the bag as _ was too big.",
            "option1": "the cup",
            "option2": "the bag",
            "answer": answer,
        }
        for answer in ("1", "2")
    ],
    "arc_easy": [
        _quiz("question", ["water", "sand", "iron"], "A"),
        _quiz("question", ["sand", "water", "tin", "glass"], "B"),
    ],
    "arc_challenge": [_quiz("question", ["sand", "iron", "water", "tin"], "C")],
    "openbookqa": [_quiz("question_stem", ["sand", "iron", "tin", "water"], "D")],
    "piqa": [
        {"goal": "Cut bread", "sol1": "Use a knife.", "sol2": "Use a spoon.", "label": 0},
        {"goal": "Boil an egg", "sol1": "Freeze it for an hour.", "sol2": "Heat it.", "label": 1},
        {"goal": "Dry a shirt", "sol1": "Put it in a river.", "sol2": "Hang it up.", "label": 1},
    ],
}


@pytest.fixture(scope="session")
def task_rows() -> Rows:
    return ROWS


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of local task data."""
    folder = tmp_path_factory.mktemp("task-data")
    for name, rows in ROWS.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the rows; it has no padding token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([json.dumps(ROWS)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<s>")


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        # Large weights make the random model opinionated, so that no two choices tie.
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def published_data() -> Path:
    if "SYMPRUNE_ASSETS" not in os.environ:
        pytest.skip("SYMPRUNE_ASSETS is not set")
    return Path(os.environ["SYMPRUNE_ASSETS"]) / "zeroshot"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of two methods, one with several seeds."""
    return reports.sweep_file(tmp_path / "sweep.jsonl", reports.grid())


@pytest.fixture(scope="session")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A refined run with its errors. Do not change it."""
    refine = {"name": "dsnot", "layers": "all"}
    return reports.make_run(tmp_path_factory.mktemp("run") / "out", refine=refine)
