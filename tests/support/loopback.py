"""A Flower grid without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def posted(message: Any) -> Any:
    """A message as it comes out of Flower's wire format."""
    from flwr.common.serde import message_from_proto, message_to_proto

    proto = message_to_proto(message)
    return message_from_proto(type(proto).FromString(proto.SerializeToString()))


class Loopback:
    """A grid without an engine: a message goes through the wire format to its node's ClientApp."""

    def __init__(
        self, app: Any, folder: Path, clients: int, settings: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as an engine does
        self.app, self.folder, self.settings = app, folder, settings
        self.nodes = {900 - i: i for i in range(clients)}  # ids that are not in order
        self.mail: dict[str, Any] = {}
        self.gone: set[int] = set()

    def run(self, app: Any, config: Mapping[str, Any]) -> None:
        """A ServerApp from its start to its end, with this run configuration."""
        from flwr.app import Context, RecordDict

        app(self, Context(1, 1, {}, RecordDict(), dict(config)))

    def get_node_ids(self) -> list[int]:
        return [node for node in self.nodes if node not in self.gone]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        from flwr.app import Context, RecordDict

        out = []
        for message in messages:
            node = message.metadata.dst_node_id
            letter = f"{len(self.mail)}"
            message.metadata.__dict__["_message_id"] = letter
            number = self.nodes[node]
            config = {"partition-id": number, "folder": str(self.folder / str(node))}
            config |= self.settings[number] if self.settings else {}
            context = Context(1, node, config, RecordDict(), {})  # type: ignore[arg-type]
            reply = None if node in self.gone else self.app(posted(message), context)
            if reply is not None:
                reply.metadata.__dict__["_src_node_id"] = node
            self.mail[letter] = reply and posted(reply)
            out.append(letter)
        return out

    def pull_messages(self, letters: Iterable[str]) -> list[Any]:
        return [self.mail[letter] for letter in letters if self.mail[letter] is not None]


def without_processes() -> Any:
    """Deployments whose letters go through a `Loopback`: Flower's apps and wire format, the owners'
    settings and policies, and no process."""
    from symprune.fed.flower import apps
    from symprune.fed.flower.deploy import Deployment
    from symprune.fed.owner.policy import SETTING
    from symprune.fed.remote.client import answer

    class HereDeployment(Deployment):
        def start(self) -> None:
            """Nothing has to be started."""

        def submit(self) -> str:
            clients = self.job.clients
            own = self.settings or ({},) * clients
            settings = [
                {"folder": str(self.folder / f"client-{n}"), SETTING: str(self.policy_file(n))}
                | dict(own[n])
                for n in range(clients)
            ]
            grid = Loopback(apps.client_app(answer), self.folder, clients, settings)
            config = {"job": self.job.to_json(), "folder": str(self.folder), "clients": clients}
            grid.run(apps.server_app(apps.train), config)
            return "here"

    return HereDeployment
