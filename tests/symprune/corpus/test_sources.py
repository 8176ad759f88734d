"""Text of users: JSON lines, Parquet, folders, data sets of the hub, conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import families
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fuzzing import EXAMPLES, ODD_VALUES, changed_json, damaged, fuzz
from hypothesis import strategies as st

from symprune import SympruneError, calibration
from symprune.corpus import documents, files, hub
from symprune.corpus.mixture import parse

SENTENCE = "the value of an expression in a lambda form "
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('no odd ones') }}"
    "{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)


@pytest.fixture
def tokenizer() -> Any:
    made = families.tokenizer()
    made.chat_template = TEMPLATE
    return made


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def table(path: Path, columns: dict[str, list[Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def messages(*contents: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": content} for content in contents]


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path) -> None:
    texts = ["first", "second one", "third\nof them"]
    made = [
        lines(tmp_path / "a.jsonl", [{"id": i, "text": text} for i, text in enumerate(texts)]),
        table(tmp_path / "b.parquet", {"id": [1, 2, 3], "text": texts}),
        table(tmp_path / "c.parquet", {"only": texts}),
    ]
    folder = tmp_path / "folder" / "sub"
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    (folder / ".hidden.txt").write_text("not this")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    made.append(str(tmp_path / "folder"))
    assert all(files.read_documents(source) == texts for source in made)


def test_a_column_is_named_behind_a_colon_or_found(tmp_path: Path) -> None:
    rows = [{"question": "why", "answer": "because"}]
    source = lines(tmp_path / "a.jsonl", rows)
    assert files.read_documents(f"{source}:answer") == ["because"]
    with pytest.raises(SympruneError, match="question, answer; name one behind a colon"):
        files.read_documents(source)
    with pytest.raises(SympruneError, match=r"has no column 'x'; it has question, answer"):
        files.read_documents(f"{source}:x")


def test_rows_without_text_are_passed_over(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"text": None}, {"text": " "}, {"text": "kept"}, {}])
    assert files.read_documents(source) == ["kept"]
    with pytest.raises(SympruneError, match="There is no text in"):
        files.read_documents(lines(tmp_path / "b.jsonl", [{"text": ""}]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\nnot json\n', r"^Line 2 of .*Mine\.jsonl is not JSON\.$"),
        ("[1]\n", "Line 1 of .* is not a JSON object"),
        ('{"text": 5}\n', "'text' of line 1 of .* is neither text nor a conversation"),
        ('{"messages": [{"role": "user"}]}\n', "not a list of messages"),
        ('{"messages": ["hi"]}\n', "not a list of messages"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "Mine.jsonl"
    path.write_text(content)
    with pytest.raises(SympruneError, match=said):
        files.read_documents(str(path))


def test_a_folder_may_not_lead_out_of_itself(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(SympruneError, match="outside of its folder"):
        files.read_documents(str(tmp_path / "texts"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SympruneError, match="has no file of text"):
        files.read_documents(str(tmp_path / "empty"))


def test_conversations_are_written_by_the_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    sharegpt = [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]
    plain = [messages("why")[0], messages("so", role="assistant")[0]]
    made = [
        lines(tmp_path / "a.jsonl", [{"n": 1, "conversations": sharegpt}]),
        lines(tmp_path / "b.jsonl", [{"messages": plain, "text": "not this"}]),
        table(tmp_path / "c.parquet", {"messages": [plain], "n": [1]}),
    ]
    for source in made:
        found = files.read_documents(source)
        assert documents.join(found, tokenizer, source) == "[user] why\n[assistant] so\n"
    with pytest.raises(SympruneError, match=r"'messages' of .* no chat template"):
        calibration.calibration_tokens(made[1], families.tokenizer(), 1, 4, 0)


def test_conversations_that_the_template_refuses_are_left_out_if_they_are_few(
    tokenizer: Any,
) -> None:
    good, odd = (
        documents.Conversation(tuple(messages("hi", role=role)), "messages")
        for role in ("user", "odd")
    )
    assert documents.join([good, odd, good], tokenizer, "x") == "[user] hi\n" * 2
    with pytest.raises(SympruneError, match=r"refuses 2 of 3 .* of x: no odd ones"):
        documents.join([good, odd, odd], tokenizer, "x")


def test_of_many_documents_plenty_are_drawn_the_same_for_a_seed() -> None:
    every = [f"{number:03}" + "x" * 100_000 for number in range(100)]
    few = documents.draw(every, 10, seed=1)
    assert len(few) == 40 and few == documents.draw(every, 10, seed=1)
    assert few != documents.draw(every, 10, seed=2)
    assert documents.draw(every[:39], 10, seed=1) == every[:39]
    assert len(documents.draw(every, 10**6, seed=1)) == 100


def test_a_mixture_has_the_windows_of_each_text(tmp_path: Path, tokenizer: Any) -> None:
    a = lines(tmp_path / "a.jsonl", [{"text": SENTENCE * 9}, {"text": SENTENCE * 20}])
    b = lines(tmp_path / "b.jsonl", [{"messages": messages(SENTENCE * 9)}])
    mixed = calibration.calibration_tokens(f"{a}*3 + {b}", tokenizer, 4, 8, 0)
    alone = calibration.calibration_tokens(a, tokenizer, 3, 8, 0)
    of_a, of_b = calibration.windows_by_source(f"{a}*3 + {b}", 4)
    assert torch.equal(mixed[of_a[2]], alone)
    assert torch.equal(mixed[of_b[2]], calibration.calibration_tokens(b, tokenizer, 1, 8, 0))
    with pytest.raises(SympruneError, match=r"b\.jsonl would give none of 2 windows"):
        calibration.calibration_tokens(f"{a}*9 + {b}", tokenizer, 2, 8, 0)


def test_held_out_windows_of_a_mixture_are_of_all_its_texts(tmp_path: Path) -> None:
    def numbered(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(range(5000)) if "a" in text else list(range(5000, 9000))}

    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    source = f"{tmp_path / 'a.txt'} + {tmp_path / 'b.txt'}"
    tokens = calibration.calibration_tokens(source, numbered, 16, 32, seed=3)
    others = calibration.held_out_tokens(source, numbered, 16, 32, seed=3, more=4)
    assert others is not None and others.shape == (6, 32)
    assert (others[:, 0] >= 5000).tolist() == [False, True, False, False, True, True]
    assert not set(tokens.flatten().tolist()) & set(others.flatten().tolist())


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder as the hub has them, with a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "org" / "name"
    table(folder / "data" / "train-0.parquet", {"text": [SENTENCE * 9], "other": ["o " * 99]})
    table(folder / "data" / "test-0.parquet", {"text": ["held out " * 99], "other": ["t"]})
    (folder / "name.py").write_text("raise SystemExit('a script has run')")
    return f"hf:{folder}"


@pytest.mark.parametrize("offline", [False, True])
def test_a_data_set_is_read_with_and_without_a_network(
    data_set: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(data_set[3:]) / "name.py").unlink()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    assert hub.read_hub(data_set, "train") == [SENTENCE * 9]
    assert hub.read_hub(data_set, "test") == ["held out " * 99]
    assert hub.read_hub(f"{data_set}::train:other", "test") == ["o " * 99]
    tokens = calibration.calibration_tokens(data_set, families.tokenizer(), 2, 8, 0)
    assert tokens.shape == (2, 8)
    assert len(calibration.evaluation_tokens(data_set, families.tokenizer())) > 99
    with pytest.raises(SympruneError, match="no split 'dev'; it has train, test"):
        hub.read_hub(f"{data_set}::dev", "train")
    with pytest.raises(SympruneError, match="no column 'x'; it has text, other"):
        hub.read_hub(f"{data_set}:::x", "train")


def test_a_script_of_a_data_set_never_runs(data_set: str) -> None:
    with pytest.raises(SympruneError, match="made by a script, and scripts are not run"):
        hub.read_hub(data_set, "train")


def test_a_data_set_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SympruneError, match=r"hf:no-such-org/nothing can neither.*builtin, self"):
        hub.read_hub("hf:no-such-org/nothing", "train")


@pytest.mark.parametrize("name", ["hf:", "hf:pandas", "hf:a/b:c:d:e:f", "hf:a b/c", "hf:x\0/y"])
def test_what_names_no_data_set_is_refused(name: str) -> None:
    with pytest.raises(SympruneError, match="is not a data set of the hub: write hf:ORG/NAME"):
        hub.read_hub(name, "train")


def test_perplexity_is_measured_on_one_text(tmp_path: Path, tokenizer: Any) -> None:
    source = lines(tmp_path / "a.jsonl", [{"text": SENTENCE}, {"text": "more"}])
    whole = calibration.encode(tokenizer, f"{SENTENCE}\n\nmore\n\n")
    assert torch.equal(calibration.evaluation_tokens(source, tokenizer), whole)
    for several in ("self", "builtin + c4"):
        with pytest.raises(SympruneError, match="measured on one text"):
            calibration.evaluation_tokens(several, tokenizer)


def test_a_source_is_the_same_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(tmp_path / "a.jsonl", [{"text": "a"}])
    monkeypatch.chdir(tmp_path)
    whole = calibration.with_whole_paths("a.jsonl:text*2 + c4 + hf:org/name")
    assert [part.source for part in parse(whole)] == [
        f"{tmp_path}/a.jsonl:text",
        "c4",
        "hf:org/name",
    ]
    assert calibration.without_folders(whole).startswith("a.jsonl:text*2 + c4*1")
    assert calibration.files_of(whole) == [f"{tmp_path}/a.jsonl", "c4"]


@EXAMPLES
def test_json_lines_are_read_or_refused(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        files.read_documents(str(path))

    rows = [{"text": "one"}, {"messages": [{"role": "user", "content": "why"}]}]
    every = [changed_json(row) for row in rows]
    fuzz(read, st.one_of(every), examples)


@EXAMPLES
def test_parquet_files_are_read_or_refused(examples: int, tmp_path: Path) -> None:
    good = Path(
        table(tmp_path / "good.parquet", {"text": ["one", "two"], "n": [1, 2]})
    ).read_bytes()
    path = tmp_path / "a.parquet"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        files.read_documents(str(path))

    fuzz(read, damaged(good, len(good)), examples)


@EXAMPLES
def test_names_of_texts_are_read_or_refused(examples: int) -> None:
    odd = [value for value in ODD_VALUES if isinstance(value, str)]
    pieces = st.sampled_from(["c4", "*", "0.5", " + ", ":", "hf:", "a/b", "self", *odd])
    names = st.lists(pieces | st.text(max_size=4), max_size=8).map("".join)

    def read(name: str) -> None:
        for part in parse(name):
            if part.source.startswith(hub.PREFIX):
                hub.parse_name(part.source)
        calibration.with_whole_paths(name)
        calibration.windows_by_source(name, 5)

    fuzz(read, names, examples)
