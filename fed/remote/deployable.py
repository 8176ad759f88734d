"""What a deployment runs: a training job, a pruning task, or whatever else has these few words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol

from symprune.fed.owner.policy import Policy
from symprune.fed.remote.transport import Setting


class Deployable(Protocol):
    """A description that fits into a configuration file, and where its parts and results are."""

    server_main: ClassVar[str]  # the function of `symprune.fed.flower` that is its server
    client_module: ClassVar[str]  # the module whose `answer` is a client
    result_file: ClassVar[str]  # in the server's folder once all is done
    extendable: ClassVar[bool]  # whether it may be asked for more when all is done

    @property
    def title(self) -> str:
        """What it does, in a word or two."""

    @property
    def clients(self) -> int:
        """How many clients take part."""

    def to_json(self) -> str:
        """The description from which its server can read it again."""

    def policy(self, own: Mapping[str, Setting]) -> Policy:
        """What an owner who wants just this, and has set that, allows: no more."""

    def steps_done(self, folder: Path) -> int:
        """The rounds, or blocks, that a server with this folder has finished and saved."""
