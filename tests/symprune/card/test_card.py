"""What a card says, and that a reader, the hub and `symprune repeat` can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import EXAMPLES, damaged, fuzz
from gguf import GGUFWriter

from symprune import Recipe
from symprune.card.base import describe_base, read_front_matter
from symprune.card.forms import BEGIN, change_form
from symprune.card.gguf_facts import read_gguf_facts
from symprune.card.plan import FIRST_LINES, Plan, SourceFile, read_plan, write_block
from symprune.card.text import write_card
from symprune.errors import SympruneError

FILE = {"use": "calibration", "name": "/home/ada/mine.txt", "sha256": "ab" * 32, "size": 1234}
RECORD: dict[str, Any] = {
    "versions": {"symprune": "0.1.0", "torch": "2.9"},
    "model": "/home/ada/models/tiny",
    "base": {"name": "tiny", "id": "org/tiny", "license": "other", "license_name": "mine",
             "license_link": "https://example.org", "language": ["en", "no"]},
    "description": "wanda, 50 % per row",
    "recipe": Recipe("wanda", calibration=FILE["name"], nsamples=4, seqlen=32).to_dict(),
    "run": {"dtype": "auto", "compute_dtype": "auto", "evaluate": True, "eval_data": "builtin"},
    "texts": {"tokens": "0123456789abcdef", "files": [FILE]},
    "sparsity": 0.5, "prunable": 200, "removed": 100,
    "dtype": "bfloat16", "compute_dtype": "float32", "device": "cpu", "bits_per_weight": 16,
    "perplexity": [{"data": "builtin", "dense": 36.0, "pruned": 58.3, "windows": 4, "seqlen": 32}],
    "notes": ["a note"],
}  # fmt: skip


def front(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_metadata_names_the_base_and_carries_its_licence_over() -> None:
    values = front(write_card(RECORD))
    assert values["base_model"] == "org/tiny" and values["language"] == ["en", "no"]
    assert (values["license"], values["license_name"]) == ("other", "mine")
    assert values["license_link"] == "https://example.org"
    assert values["library_name"] == "transformers" and "sparse" in values["tags"]


def test_the_figures_are_the_records() -> None:
    card = write_card(RECORD)
    assert "perplexity on Python's documentation 36.00 -> 58.30 (+62 %)" in card
    assert "| Python's documentation | 4 x 32 | 36.000 | 58.300 |" in card
    assert "100 of 200 weights" in card and "- a note" in card and "torch 2.9" in card
    unmeasured = write_card({**RECORD, "perplexity": []})
    assert "58.3" not in unmeasured and "not measured" in unmeasured


def test_no_folder_of_the_machine_is_in_a_card() -> None:
    assert "/home/ada" not in write_card(RECORD) and "mine.txt" in write_card(RECORD)


def test_text_in_a_record_stays_in_its_line() -> None:
    card = write_card({**RECORD, "notes": ["first\n## Not a heading\x1b[31m"]})
    assert "\n## Not" not in card and "\x1b" not in card


def test_a_record_that_says_little_still_makes_a_card() -> None:
    card = write_card({})
    assert front(card)["library_name"] == "transformers" and "How to load it" in card
    assert "does not say enough" in card and "none" in card


def test_the_card_changes_its_form_and_back_to_the_byte() -> None:
    plain = write_card(RECORD)
    packed = change_form(plain, packed=True)
    assert packed == write_card(RECORD, packed=True) != plain
    assert "import symprune" in packed and front(packed)["library_name"] == "symprune"
    assert change_form(packed, packed=False) == plain
    own = plain.replace(BEGIN, "mine")
    assert change_form(own, packed=True) == own


def test_the_plan_in_a_card_is_the_records(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(write_card(RECORD))
    plan = read_plan(tmp_path)
    assert plan.model == "tiny" and plan.tokens == "0123456789abcdef"
    assert plan.files == (SourceFile(**{**FILE, "name": "mine.txt"}),)
    assert plan.recipe == {**RECORD["recipe"], "calibration": "mine.txt"}
    assert plan.run == RECORD["run"] and plan.versions == RECORD["versions"]
    assert Recipe.load(tmp_path / "README.md").to_dict() == plan.recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# somebody's page", "no block"),
        (f"{FIRST_LINES}model: x\n", "no block"),
        (f"{FIRST_LINES}a: [\n```", "not YAML"),
        (f"{FIRST_LINES}model: 3\nrecipe: {{}}\nrun: {{}}\n```", "does not say how"),
        (f"{FIRST_LINES}model: x\nrecipe: {{}}\nrun: {{trust_remote_code: true}}\n```", "not say"),
    ],
)
def test_what_is_no_card_is_refused_in_a_sentence(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(SympruneError, match=said):
        read_plan(tmp_path / "README.md")


@EXAMPLES
def test_any_card_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    good = write_block(Plan("tiny", "main", {"method": "ria"}, {}, (SourceFile(**FILE),))).encode()

    def read(data: bytes) -> None:
        card.write_bytes(data)
        read_plan(card)

    fuzz(read, damaged(good), examples)
    record = tmp_path / "symprune.json"

    def read_front(data: bytes) -> None:
        record.write_bytes(data)
        read_front_matter(record)

    fuzz(read_front, damaged(write_card(RECORD).encode()), examples // 2)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_string("general.source.huggingface.repository", "org/tiny")
    writer.add_context_length(64)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_name("Tiny, behind the tokens")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_says_its_licence(gguf: Path) -> None:
    assert read_gguf_facts(gguf)["name"] == "Tiny, behind the tokens"
    found = describe_base("tiny.gguf", None, gguf, None)
    assert found == {
        "name": "tiny.gguf", "license": "apache-2.0", "language": ["en"], "id": "org/tiny",
    }  # fmt: skip


@EXAMPLES
def test_a_gguf_file_that_is_damaged_says_less(examples: int, gguf: Path, tmp_path: Path) -> None:
    tried = tmp_path / "tried.gguf"

    def read(data: bytes) -> None:
        tried.write_bytes(data)
        assert isinstance(read_gguf_facts(tried), dict)

    fuzz(read, damaged(gguf.read_bytes()), examples)


def test_a_folder_says_its_licence_by_its_card(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nlicense: llama3\nbase_model: [org/base]\nlanguage: en\nextra: 3\n---\n# x\n"
    )
    found = describe_base("mine", tmp_path, None, None)
    assert found == {"name": "mine", "license": "llama3", "language": "en", "id": "org/base"}
    assert describe_base("a/b", tmp_path, None, "a/b")["id"] == "a/b"
    (tmp_path / "README.md").write_text("---\nlicense: [1\n---\n")
    assert describe_base("mine", tmp_path, None, None) == {"name": "mine"}
