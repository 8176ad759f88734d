"""What clients say of themselves before a run, from which the server takes its step sizes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from machines import Network, job

from symprune.errors import SympruneError
from symprune.fed.remote.server import FAR, serve
from symprune.fed.wire.envelope import Letter, unpack

L2 = 0.1


def start(folder: Path, algorithm: str = "gd", rounds: int = 1, **lies: Any) -> Any:
    """A run whose clients all have data of their own, as they say; the first one lies."""

    def after(number: int, client: int, reply: bytes) -> bytes:
        header = {**unpack(reply).header, "own": True}
        if header["status"] != "described":
            return reply
        return Letter({**header, **(lies if client == 0 else {})}).pack()

    return serve(job(algorithm, rounds), Network(folder / "c", after=after), folder / "s", pause=0)


@pytest.mark.parametrize("said", [1e30, 1e6])
def test_a_smoothness_of_1e30_leaves_the_step_above_zero(
    said: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    honest = start(tmp_path / "honest").algorithm.gamma
    with caplog.at_level(logging.WARNING, "symprune.fed"):
        gamma = start(tmp_path / "lied to", L=said).algorithm.gamma
    assert honest / (2 * FAR) < gamma < honest
    assert f"Client 0 says its L is {said:g}" in caplog.text


@pytest.mark.parametrize("lie", [{"mu": 0.0}, {"mu": 1e-300}, {"mu": 1e30}, {"L": 0.0}])
def test_a_convexity_of_nothing_leaves_no_client_silent_for_ever(
    lie: dict[str, float], tmp_path: Path
) -> None:
    """ProxSkip communicates with a chance of sqrt(gamma mu)."""
    honest, lied_to = (start(tmp_path / name, "proxskip", **said).algorithm
                       for name, said in (("honest", {}), ("lied to", lie)))  # fmt: skip
    assert honest.p / 11 < lied_to.p <= 1
    assert 0 < lied_to.gamma < 2 * honest.gamma


@pytest.mark.parametrize(
    "lie",
    [
        {"rows": 10**400},
        {"rows": -1},
        {"rows": True},
        {"L": 10**400},
        {"L": "1"},
        {"L": -1.0},
        {"mu": [1]},
    ],
    ids=lambda lie: str(lie)[:20],
)
def test_a_description_that_is_none_is_refused_by_name(
    lie: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SympruneError, match="Clients 0 did not say what they hold"):
        start(tmp_path, **lie)
    assert "Client 0 cannot start: Client 0" in caplog.text
    assert len(max(caplog.text.splitlines(), key=len)) < 300
