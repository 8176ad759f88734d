"""`symprune fed node-key`: an owner makes its node's key, on its own machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symprune.cli import console


def node_key(
    file: Annotated[Path, typer.Argument(help="Where the private key goes, as node-0.key.")],
) -> None:
    """Make this machine's node key; only its public half is handed over."""
    from symprune.fed.flower.keys import make_node_key
    from symprune.fed.secure.keys import need_cryptography

    need_cryptography()
    public = make_node_key(file)
    console.say(f"{file} stays here, readable by you alone; hand {public} over.")
