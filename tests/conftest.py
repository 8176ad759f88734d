"""Fixtures every test may use: the devices there are, a tiny model on disk, the real data.

No run differs from the last: every test begins with the same seeds, hypothesis tries the same
examples, and a module that draws numbers while it is imported is refused.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import families
import hypothesis
import numpy as np
import pytest
import torch


def seed_everything(seed: int = 0) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what a library may still draw from
    random.seed(seed)


def next_draws() -> tuple[object, ...]:
    """What torch and numpy draw next where no generator is given."""
    _, words, place, *_ = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), bytes(words), place


seed_everything()
BEFORE_IMPORTS = next_draws()
# A deadline would be a test of the machine.
hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None)
hypothesis.settings.load_profile("seeded")
os.environ.pop("COLUMNS", None)  # a width fixed here would rule what tests ask for
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pytest_collection_finish() -> None:
    if next_draws() != BEFORE_IMPORTS:
        raise pytest.UsageError("A module of tests draws random numbers while it is imported.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    seed_everything(1)  # fixtures, made by whichever test asks for them first


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed_everything()  # whatever fixtures were there already


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
