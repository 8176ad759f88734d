"""Flower as the carrier: any algorithm, or any other protocol of bytes, as ServerApp and ClientApp.

The only file that knows Flower (1.41), which is imported when it is needed; torch is not, so that
a client's process for one message starts quickly. A letter travels as one
flat array of bytes; the server is a plain loop over the grid. To carry another protocol, give
`server_app` a function of (transport, run config) and `client_app` one of (bytes, node).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symprune.errors import SympruneError, check
from symprune.fed.owner.audit import audited
from symprune.fed.remote.sentences import sentence
from symprune.fed.remote.transport import Answer, Node, Setting, Transport, refusal_in
from symprune.machine.lock import alone

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from symprune.fed.pruning.remote import Task
    from symprune.fed.remote.job import TrainingJob

Main = Callable[[Transport, Mapping[str, Any]], None]
log = logging.getLogger("symprune.fed")
RECORD, FIELD = "symprune", "letter"
STYPE = "symprune.bytes"  # not numpy's format: its header may claim any size
UNANSWERED = "it does not answer; why is in its owner's audit log"
WHO = b"who"  # the question every node answers with its client's number
TIMEOUT = 600.0  # seconds a round waits for a client that is still connected
POLL = 0.2  # seconds between two looks at the mailbox
ROLL_CALL = 5.0  # seconds between two looks at who is still connected
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


_NOBODY: Mapping[int, int] = {}


def need_flower() -> None:
    """Say what to install where Flower is missing; keep it from calling home where it is not."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise SympruneError(
            "Flower is not installed: pip install 'symprune[flower]' (Python 3.11 or newer)."
        ) from None


def to_record(data: bytes) -> RecordDict:
    """Bytes as the content of a Flower message: one flat array."""
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
    return RecordDict({RECORD: ArrayRecord({FIELD: array})})


def from_record(content: RecordDict) -> bytes:
    """The bytes of `to_record`; any other content is refused."""
    from flwr.app import ArrayRecord

    record = content.get(RECORD)
    alone = len(content) == 1 and isinstance(record, ArrayRecord) and len(record) == 1
    array = record.get(FIELD) if isinstance(record, ArrayRecord) and alone else None
    if array is None or array.stype != STYPE or array.dtype != "uint8":
        raise SympruneError("A message is not one array of bytes.")
    check(tuple(array.shape) == (len(array.data),), "A message's array lies about its length.")
    return bytes(array.data)


class FlowerTransport:
    """Numbered clients behind Flower's grid. `numbers` says which node is which client."""

    def __init__(self, grid: Grid, numbers: Mapping[int, int], timeout: float = TIMEOUT) -> None:
        self.grid, self.numbers, self.timeout = grid, dict(numbers), timeout
        self.clients = len(self.numbers)

    def connected(self) -> set[int]:
        here = set(self.grid.get_node_ids())
        return {client for node, client in self.numbers.items() if node in here}

    def exchange(self, letters: Mapping[int, bytes]) -> dict[int, bytes]:
        from symprune.fed.remote.replies import deliveries

        nodes = {client: node for node, client in self.numbers.items()}
        addressed = {nodes[client]: data for client, data in sorted(letters.items())}
        mail = ask(self.grid, addressed, self.timeout, self.numbers)
        asked = {letter: self.numbers[node] for letter, node in mail.asked.items()}
        return deliveries(asked, mail.came, self.numbers)


@dataclass
class Mail:
    """Letters that were sent, by their id and node, and what was answered."""

    asked: dict[str, int]
    came: list[tuple[str, int, bytes]]


def ask(
    grid: Grid, letters: Mapping[int, bytes], timeout: float, clients: Mapping[int, int] = _NOBODY
) -> Mail:
    """Send bytes to nodes; look into the mailbox until all have replied, left, or are too late.
    clients: which node is which, to name who did not reply."""
    from flwr.app import Message

    mail = Mail({}, [])
    for node, data in letters.items():
        content = to_record(data)
        message = Message(content=content, dst_node_id=node, message_type="query", ttl=timeout)
        mail.asked |= {letter: node for letter in grid.push_messages([message]) if letter}
    end, waiting = time.monotonic() + timeout, set(mail.asked)
    roll_call = time.monotonic() + ROLL_CALL
    while waiting and time.monotonic() < end:
        for letter in sorted(waiting):
            replies = _pull(grid, letter, mail.asked[letter])
            if replies is not None:
                mail.came += replies
                waiting.discard(letter)
        if waiting and time.monotonic() > roll_call:
            here = set(grid.get_node_ids())
            for letter in [letter for letter in waiting if mail.asked[letter] not in here]:
                who = _name(mail.asked[letter], clients)
                log.warning("%s has left; the round goes on.", who)
                waiting.discard(letter)
            roll_call = time.monotonic() + ROLL_CALL
        if waiting:
            time.sleep(POLL)
    for letter in waiting:
        who = _name(mail.asked[letter], clients)
        log.warning("%s did not reply in %g seconds; the round goes on.", who, timeout)
    return mail


def _name(node: int, clients: Mapping[int, int]) -> str:
    return f"Client {clients[node]} (node {node})" if node in clients else f"Node {node}"


def _pull(grid: Grid, letter: str, node: int) -> list[tuple[str, int, bytes]] | None:
    """The reply to one letter, alone, so that what is wrong with it is its own affair."""
    from httpx import HTTPError

    try:
        messages = list(grid.pull_messages([letter]))
        return [_open(message) for message in messages] if messages else None
    except HTTPError:  # the SuperLink cannot be reached: no client's fault
        raise
    except Exception as error:
        log.warning("The reply of node %s is refused: %s", node, error)
        return []


def _open(message: Message) -> tuple[str, int, bytes]:
    metadata = message.metadata
    if message.has_error():
        raise SympruneError(f"it failed, {message.error.reason or message.error.code}")
    return metadata.reply_to_message_id, metadata.src_node_id, from_record(message.content)


def client_app(answer: Answer, given: Mapping[str, Any] | None = None) -> ClientApp:
    """A ClientApp that answers letters. The node's configuration gives `client`, its number, and
    `folder`; in the simulation Flower numbers the clients and the run names a common folder.
    `given` are settings of the run that its configuration need not repeat."""
    need_flower()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def reply(message: Message, context: Context) -> Message:
        node = _node(dict(context.node_config), {**(given or {}), **context.run_config})
        data = from_record(message.content)
        if data == WHO:
            return Message(content=to_record(str(node.number).encode()), reply_to=message)
        about = message.metadata
        who = {"client": node.number, "from": about.src_node_id, "flower_run": about.run_id}
        try:
            ask = partial(answer, data, node)
            said = audited(ask, data, node.folder, node.config, who, sentence, refusal_in)
        except Exception:  # Flower tells the server what an exception says: names of files, for one
            log.exception("Client %s did not answer.", node.number)
            raise SympruneError(UNANSWERED) from None
        return Message(content=to_record(said), reply_to=message)

    return app


def _node(config: dict[str, Setting], run: Mapping[str, Any]) -> Node:
    number = config.get("client", config.get("partition-id"))
    check(isinstance(number, int), "This node's configuration does not say which client it is.")
    assert isinstance(number, int)
    own, common = config.get("folder"), run.get("folder")
    check(bool(own or common), "Neither node nor run says where the client's state is kept.")
    folder = Path(str(own)) if own else Path(str(common)) / f"client-{number}"
    return Node(number, folder, config)


def server_app(main: Main, given: Mapping[str, Any] | None = None) -> ServerApp:
    """A ServerApp that runs `main` with a transport to all clients and the run's configuration:
    `clients`, `timeout` in seconds, and `nodes`, the ids of the clients' nodes in order. Without
    `nodes` every node is asked for its number, which is for the simulation only: a stranger could
    take another's."""
    need_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        _speak()
        config = {**(given or {}), **context.run_config}
        numbers = _numbers(grid, int(config["clients"]), str(config.get("nodes", "")))
        main(FlowerTransport(grid, numbers, float(config.get("timeout", TIMEOUT))), config)

    return app


def _speak() -> None:
    """Progress and refusals on the standard error stream, which Flower keeps as the run's log."""
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def _numbers(grid: Grid, clients: int, nodes: str) -> dict[int, int]:
    """Which node is which client."""
    if nodes:
        known = [int(node) for node in nodes.split(",")]
        check(len(known) == clients, f"{len(known)} nodes are listed for {clients} clients.")
        return {node: client for client, node in enumerate(known)}
    end = time.monotonic() + TIMEOUT
    while len(here := sorted(grid.get_node_ids())) < clients:
        check(time.monotonic() < end, f"Only {len(here)} of {clients} nodes are connected.")
        time.sleep(POLL)
    numbers: dict[int, int] = {}
    for _, node, said in ask(grid, dict.fromkeys(here, WHO), TIMEOUT).came:
        number = int(said) if said.isdigit() else -1
        if not 0 <= number < clients or number in numbers.values():
            log.warning("Node %s is refused: it says it is client %s.", node, said[:20])
        else:
            numbers[node] = number
    absent = sorted(set(range(clients)) - set(numbers.values()))
    check(not absent, f"No node is client {absent}.")
    return numbers


def train(transport: Transport, config: Mapping[str, Any]) -> None:
    """The server of `symprune.fed`'s algorithms: runs the configuration's `job`, a `Job` as JSON.
    Checkpoint, model and history are in `server` below its `folder`."""
    from symprune.fed.remote.job import job_from_json
    from symprune.fed.remote.server import serve

    with _server_folder(config) as folder:
        job = job_from_json(str(config["job"]))
        serve(job, transport, folder).write(folder, job.whole_problem())


def prune(transport: Transport, config: Mapping[str, Any]) -> None:
    """The server of federated pruning: runs the configuration's `job`, a `remote.Task` as JSON. The
    pruned model is in `server/model` below its `folder`."""
    from symprune.fed.pruning import remote

    with _server_folder(config) as folder:
        remote.serve(remote.Task.from_json(str(config["job"])), transport, folder)


@contextmanager
def _server_folder(config: Mapping[str, Any]) -> Iterator[Path]:
    """The server's own folder. Why there is no result is written there; the configuration's
    `attempt` tells the failure of this run from that of an earlier one."""
    folder = Path(str(config["folder"])) / "server"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with alone(folder / "lock"):  # after a crash the last process may linger
            yield folder
    except Exception as error:
        sentence = str(error) if isinstance(error, SympruneError) else repr(error)
        (folder / f"error{config.get('attempt', '')}.txt").write_text(f"{sentence}\n")
        raise


def simulation(job: TrainingJob, folder: Path, cpus: int = 1) -> None:
    """Run a job in Flower's simulation: clients are actors of Ray on this machine."""
    from symprune.fed.remote.client import answer

    _simulate(train, answer, job.to_json(), job.clients, folder, cpus)


def prune_simulation(
    task: Task, settings: Sequence[Mapping[str, Setting]], folder: Path, cpus: int = 1
) -> None:
    """Federated pruning in Flower's simulation; `settings` are those of each client's node."""
    from symprune.fed.pruning import remote

    def answer(data: bytes, node: Node) -> bytes:
        return remote.answer(data, replace(node, config=settings[node.number]))

    _simulate(prune, answer, task.to_json(), task.clients, folder, cpus)


def _simulate(main: Main, answer: Answer, job: str, clients: int, folder: Path, cpus: int) -> None:
    need_flower()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves on a busy machine
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from flwr.simulation import run_simulation

    config = {"job": job, "folder": str(folder), "clients": clients}
    server, client = server_app(main, config), client_app(answer, config)
    resources: Any = {"client_resources": {"num_cpus": 1.0}, "init_args": {"num_cpus": cpus}}
    run_simulation(server, client, clients, backend_config=resources)
