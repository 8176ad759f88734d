from __future__ import annotations

from collections.abc import Iterator

import pytest

from symprune.fed.threads import limited_threads


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As every run does: small products are faster and sums are added in one order."""
    with limited_threads():
        yield
