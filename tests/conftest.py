"""Fixtures every test may use: the devices there are, a tiny model on disk, the real data."""

from __future__ import annotations

import os
from pathlib import Path

import families
import pytest
import torch

torch.manual_seed(0)
os.environ.pop("COLUMNS", None)  # a width fixed here would rule what tests ask for
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer, as `save_pretrained` leaves it. Do not change it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    families.model("smollm").save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real data; tests that use it are skipped where it is not given."""
    folder = os.environ.get("SYMPRUNE_ASSETS")
    if not folder:
        pytest.skip("SYMPRUNE_ASSETS is not set")
    return Path(folder)
