"""A server that is killed goes on where it was, and ends where an undisturbed run ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import families
import pytest
import torch

from symprune.engine import walk
from symprune.errors import SympruneError
from symprune.fed import pruning
from symprune.fed.pruning import Client, Server
from symprune.recipe import Recipe

RECIPE = Recipe(method="symwanda", refine="dsnot")


class Killed(Exception):
    """Stands for the server's end."""


def attempt(folder: Path, lives: int, secure: bool = False, heard: bool = False) -> pruning.Result:
    """A server that dies at a message, before or after the clients heard it. Every message is
    answered by new processes, which have only their folders."""
    tokens = families.tokens(5, 12).split((2, 3))
    model = families.model()
    sent = 0

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        nonlocal sent
        if sent == lives and not heard:
            raise Killed
        new = {
            n: Client(families.model(), tokens[n], folder=folder / str(n), allow_few_tokens=True)
            for n in outgoing
        }
        replies = {n: new[n](data) for n, data in outgoing.items()}
        if sent == lives:
            raise Killed
        sent += 1
        return replies

    server = Server(model, RECIPE, 2, secure)
    result = pruning.run(server, send, checkpoint=folder / "run.safetensors")
    expected = families.model()
    report = walk.prune(expected, families.tokens(5, 12), RECIPE)
    pairs = zip(expected.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert result.report.layers == report.layers
    return result


@pytest.mark.parametrize(("secure", "heard"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("message", range(4))
def test_any_message_may_be_the_servers_last(
    tmp_path: Path, message: int, secure: bool, heard: bool
) -> None:
    """Four messages: the introduction, two blocks, the end."""
    with pytest.raises(Killed):
        attempt(tmp_path, message, secure, heard)
    result = attempt(tmp_path, 99, secure)
    assert result.clients_left == [0, 1]
    assert all(block["up"] > 0 and block["down"] > 0 for block in result.traffic.blocks)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        attempt(tmp_path, 1)
    file = tmp_path / "run.safetensors"

    def resumed(server: Server) -> None:
        pruning.run(server, lambda _: {}, checkpoint=file)

    with pytest.raises(SympruneError, match="another recipe"):
        resumed(Server(families.model(), Recipe(), 2))
    with pytest.raises(SympruneError, match="another number of clients"):
        resumed(Server(families.model(), RECIPE, 3))
    with pytest.raises(SympruneError, match="another model"):
        resumed(Server(families.model(seed=5), RECIPE, 2))
    file.write_bytes(b"nonsense")
    with pytest.raises(SympruneError, match="corrupt"):
        resumed(Server(families.model(), RECIPE, 2))
