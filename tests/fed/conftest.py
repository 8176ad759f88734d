from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from symprune.fed.threads import limited_threads


@pytest.fixture(autouse=True)
def owners_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Privacy ledgers of tests are not those of whoever runs them."""
    monkeypatch.setenv("SYMPRUNE_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As every run does: small products are faster and sums are added in one order.

    That is why tests compare the bits of two runs here: they make the same calls on the same
    numbers, or calls that differ by a factor of one or a term of zero. Clients that are computed in
    a stack and alone agree since every row is computed for itself.
    """
    with limited_threads():
        yield
