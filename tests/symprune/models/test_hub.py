"""What a user's MODEL means, and what is said when it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from symprune.checkpoint.load import load_model, load_with_tokenizer
from symprune.errors import SympruneError
from symprune.models import hub


def test_a_name_no_file_system_has_room_for_is_a_sentence() -> None:
    with pytest.raises(SympruneError, match="No model has a name as long as 'someone/xxx"):
        hub.resolve("someone/" + "x" * 5000)


def test_names_folders_and_files_resolve(tiny_folder: Path, tmp_path: Path) -> None:
    assert hub.resolve("llama2-7b").path == "meta-llama/Llama-2-7b-hf"
    assert hub.resolve("LLAMA2-7B").path == "meta-llama/Llama-2-7b-hf"
    assert hub.resolve("someone/model").path == "someone/model"
    assert hub.resolve(str(tiny_folder)).is_local
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    options = hub.resolve(str(gguf)).options
    assert options == {"gguf_file": "model.gguf", "trust_remote_code": False}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/such/folder", "no model folder"),
        ("./nothing", "no model folder"),
        ("missing.gguf", "no GGUF file"),
    ],
)
def test_paths_that_are_no_models_are_named(name: str, said: str) -> None:
    with pytest.raises(SympruneError, match=said):
        hub.resolve(name)


def test_a_folder_that_is_not_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match=r"not a model.*config\.json"):
        hub.resolve(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(SympruneError, match="is a file"):
        hub.resolve(str(tmp_path / "file"))


def test_corrupt_weights_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SympruneError, match="corrupt safetensors"):
        load_with_tokenizer(str(tmp_path))


def test_loading_keeps_or_changes_the_dtype(tiny_folder: Path) -> None:
    origin = hub.resolve(str(tiny_folder))
    assert load_model(origin).dtype == torch.float32
    assert load_model(origin, "bfloat16").dtype == torch.bfloat16
    with pytest.raises(SympruneError, match="dtype 'int4'"):
        load_model(origin, "int4")


def test_hub_failures_say_what_to_do() -> None:
    origin = hub.resolve("llama2-7b")

    def raised(cause: Exception) -> str:
        error = OSError("cannot load")
        error.__cause__ = cause
        return str(hub.explain(origin, error))

    assert "gated" in raised(GatedRepoError.__new__(GatedRepoError))
    assert "hf auth login" in raised(GatedRepoError.__new__(GatedRepoError))
    assert "not on the hub" in raised(RepositoryNotFoundError.__new__(RepositoryNotFoundError))
    assert "cannot be reached" in raised(ConnectionError("offline"))
    assert "local folder" in raised(ConnectionError("offline"))


def test_devices() -> None:
    assert hub.pick_device("cpu").type == "cpu"
    assert hub.pick_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("gpu", "cuda:99"):
        with pytest.raises(SympruneError, match=name):
            hub.pick_device(name)
