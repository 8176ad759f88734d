"""A whole Flower deployment on one machine: SuperLink with a database, SuperNodes, TLS, node keys.

For trying before nodes go to real machines: every process, certificate and message is what it will
be there. Everything lives in one folder; starting again in the same folder goes on with its run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import psutil

from symprune.errors import SympruneError
from symprune.fed.flower.app_files import APP, CODE, CONNECTION, PROJECT
from symprune.fed.flower.apps import QUIET, need_flower
from symprune.fed.flower.keys import make_keys, renew_authority, renew_keys, take_node_keys
from symprune.fed.flower.signals import ending_as_exceptions, postponed, undisturbed
from symprune.fed.flower.waiting import listens, says
from symprune.fed.owner.policy import SETTING
from symprune.fed.remote.deployable import Deployable
from symprune.fed.remote.transport import Setting
from symprune.machine import durable
from symprune.machine.patience import stretched
from symprune.validation import check_positive, parse_json

LOOPBACK = "127.0.0.1"
MARK = "SYMPRUNE_DEPLOYMENT"  # in the environment of all processes of a deployment
ASKED = "asked.json"
LAST_PORT = 65535
BEFORE = ("lock", "error*.txt", ".*")  # what the server's folder may have before a run has begun
NODE_ID = r'"node-id":\s*"?(\d+)'  # as `flwr ... --format json` says it
START = 300.0  # seconds a process may take until it is ready
HEARTBEATS = 90.0  # seconds after which Flower has missed two heartbeats of a node, 30 s each
LAST_WORDS = 60.0  # seconds a process has to end by itself
RETRY = 5.0  # seconds until a node that was refused tries again
ACTIVE = b"SuperNode ID: "  # what a node says once the SuperLink has let it in


@dataclass
class Deployment:
    """A federation in a folder. The SuperLink is `host`, a name or an address of this machine, with
    `port`; node i has `node_port + i`, on loopback."""

    folder: Path
    job: Deployable
    port: int = 8000
    node_port: int = 9094
    timeout: float = 600.0  # seconds a round waits for a client that is still connected
    telemetry: bool = False
    settings: tuple[Mapping[str, Setting], ...] = ()  # what the owner of client 0, 1, ... has set
    host: str = LOOPBACK
    node_keys: Path | None = None  # public keys of nodes that run elsewhere
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    attempt: str = ""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        need_flower()
        self.folder = self.folder.resolve()
        check_positive(timeout=self.timeout)
        last = self.node_port + self.job.clients - 1
        for port in (self.port, self.node_port, last):
            if not 0 < port <= LAST_PORT:
                raise SympruneError(f"Port {port} is not between 1 and {LAST_PORT}.")
        if self.settings and len(self.settings) != self.job.clients:
            raise SympruneError(f"{len(self.settings)} data sets for {self.job.clients} clients.")

    @property
    def result(self) -> Path:
        return self.folder / "server" / self.job.result_file

    def prepare(self) -> None:
        """App folder, keys and Flower's own folder, which must not be inside the app's."""
        self._refuse_another_run()
        self.folder.mkdir(parents=True, exist_ok=True)
        durable.write_text(self.folder / ASKED, self._asked())  # says whose folder this is
        app, home, keys = (self.folder / name for name in ("app", "flower", "keys"))
        for place in (app, home, self.folder / "logs", self.folder / "server"):
            place.mkdir(parents=True, exist_ok=True)
        for place in (home, self.folder / "logs"):  # what was made before: as from now on
            for file in (place, *place.glob("*.db*"), *place.glob("*.log")):
                file.chmod(0o700 if file.is_dir() else 0o600)
        if self.node_keys is not None:
            self._retire(take_node_keys(keys, self.node_keys, self.job.clients))
        make_keys(keys, self.hosts, self.job.clients)
        quoted = json.dumps  # a JSON string is a TOML string
        project = PROJECT.format(
            app=APP,
            title=self.job.title,
            clients=self.job.clients,
            timeout=float(self.timeout),
            folder=quoted(str(self.folder)),
            job=quoted(self.job.to_json()),
        )
        durable.write_text(app / "pyproject.toml", project)
        code = CODE.format(client=self.job.client_module, main=self.job.server_main)
        durable.write_text(app / f"{APP}.py", code)
        for number in range(self.job.clients):
            if not self.policy_file(number).exists():  # an owner may have changed it
                own = self.settings[number] if self.settings else {}
                self.job.policy(own).save(self.policy_file(number))
        authority = quoted(str(keys / "ca.crt"))
        connection = CONNECTION.format(host=self.host, port=self.port, authority=authority)
        durable.write_text(home / "config.toml", connection)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.host, LOOPBACK, "localhost")))

    def rotate_keys(self) -> None:
        """A new certificate and key for the SuperLink and a new key for every node, while nothing
        runs; the nodes' old keys are taken off the SuperLink's list when it starts again."""
        if self.processes:
            raise SympruneError("Keys are rotated while the deployment does not run.")
        self.prepare()
        self._retire(renew_keys(self.folder / "keys", self.hosts, self.job.clients))

    def rotate_authority(self) -> bool:
        """The next step to another certificate authority, while nothing runs; whether it was the
        last. Between the two every owner gets the `ca.crt` that accepts both."""
        if self.processes:
            raise SympruneError("An authority is rotated while the deployment does not run.")
        self.prepare()
        return renew_authority(self.folder / "keys", self.hosts)

    def _retire(self, numbers: Sequence[int]) -> None:
        """These nodes have new keys: their old ones come off the SuperLink's list."""
        file = self.folder / "nodes.json"
        if file.exists() and numbers:
            known = enumerate(parse_json(file.read_text()))
            old = [-abs(node) if number in numbers else node for number, node in known]
            durable.write_text(file, json.dumps(old))

    def policy_file(self, number: int) -> Path:
        """What the owner of a node allows, written for this job and the owner's from then on."""
        return self.folder / "policies" / f"node-{number}.yaml"

    def _asked(self) -> str:
        """The job and the owners' settings, without how far it is to go."""
        job = {**json.loads(self.job.to_json()), "rounds": None}
        return json.dumps({"job": job, "settings": [dict(own) for own in self.settings]})

    def _refuse_another_run(self) -> None:
        """What has begun goes on as it was asked for, or not at all; in a folder with anything else
        nothing begins."""
        asked = self.folder / ASKED
        if self.folder.exists() and not self.folder.is_dir():
            raise SympruneError(f"{self.folder} is a file, not a folder.")
        if self.folder.is_dir() and not asked.exists() and any(self.folder.iterdir()):
            raise SympruneError(
                f"{self.folder} holds files that are no deployment's: use another folder."
            )
        if self._begun() and asked.exists() and asked.read_text() != self._asked():
            raise SympruneError(f"{self.folder} holds another run: use another folder.")

    def _begun(self) -> bool:
        """Whether a server has left something of a run in its folder, whatever it ran."""
        names = [file.name for file in (self.folder / "server").glob("*")]
        return any(not any(fnmatch(name, idle) for idle in BEFORE) for name in names)

    def start(self) -> None:
        """SuperLink, registration of the nodes' public keys, SuperNodes."""
        self.start_superlink()
        self.register()
        for number in range(self.job.clients):
            if (self.folder / "keys" / f"node-{number}.key").exists():  # else it runs elsewhere
                self.start_node(number)

    def start_superlink(self) -> None:
        keys = self.folder / "keys"
        options = {
            "--host": self.host,
            "--port": self.port,
            "--database": self.folder / "flower" / "superlink.db",
            "--ssl-certfile": keys / "superlink.crt",
            "--ssl-keyfile": keys / "superlink.key",
            "--ssl-ca-certfile": keys / "ca.crt",
        }
        switches = ("--enable-supernode-auth", "--disable-runtime-dependency-installation")
        command = ["flower-superlink", *_flags(options), *switches]
        self._start("superlink", self.host, self.port, command)
        if not self._wait("superlink", lambda: listens(self.host, self.port)):
            log = self.folder / "logs" / "superlink.log"
            raise SympruneError(f"The SuperLink did not start, see {log}.")

    def register(self) -> list[int]:
        """The nodes' ids in the order of their clients; each key is registered once."""
        file = self.folder / "nodes.json"
        nodes: list[int] = parse_json(file.read_text()) if file.exists() else []
        retired = [-node for node in nodes if node < 0]  # whose keys were rotated
        for node in retired:
            self.flwr("supernode", "unregister", str(node), "symprune")
        for number in range(self.job.clients):
            if number < len(nodes) and nodes[number] > 0:
                continue
            key = self.folder / "keys" / f"node-{number}.pub"
            said = self.flwr("supernode", "register", str(key), "symprune")
            ids = [int(node) for node in re.findall(NODE_ID, said)]
            if not ids:  # if it is registered and a crash kept its id from us, this is the one
                listed = re.findall(NODE_ID, self.flwr("supernode", "list", "symprune"))
                ids = [node for node in map(int, listed) if node not in (*nodes, *retired)]
            if len(ids) != 1:
                raise SympruneError(f"Node {number} was not registered: {said.strip()}.")
            nodes[number : number + 1] = ids
            durable.write_text(file, json.dumps(nodes))
        return nodes

    def start_node(
        self, number: int, key: Path | None = None, patience: float = HEARTBEATS
    ) -> None:
        """A SuperNode with its key, its own state folder and its owner's settings.

        The SuperLink takes a node that died without a word for connected until it has missed two
        heartbeats and turns its successor away; so a node that is refused tries again meanwhile.
        """
        config = f'client={number} folder="{self.folder / f"client-{number}"}"'
        keys, port = self.folder / "keys", self.node_port + number
        own: dict[str, Setting] = {SETTING: str(self.policy_file(number))}
        own |= self.settings[number] if self.settings else {}
        if own.get("secure"):  # the node's key vouches for it, and it knows the others'
            own = {"node_key": str(keys / f"node-{number}.key"), "peers": str(keys), **own}
        for name, value in own.items():
            config += f" {name}={json.dumps(value)}"
        options = {
            "--superlink": f"{self.host}:{self.port}",
            "--host": LOOPBACK,
            "--port": port,
            "--root-certificates": keys / "ca.crt",
            "--auth-supernode-private-key": key or keys / f"node-{number}.key",
            "--node-config": config,
        }
        name, command = f"node-{number}", ["flower-supernode", *_flags(options)]
        log, end = self.folder / "logs" / f"{name}.log", time.monotonic() + patience
        while True:
            before = log.stat().st_size if log.exists() else 0
            self._start(name, LOOPBACK, port, command)
            if self._wait(name, partial(says, log, before, ACTIVE)):
                return
            self._bury(name)
            if time.monotonic() > end:
                raise SympruneError(f"The SuperLink refused node {number}, see {log}.")
            time.sleep(RETRY)

    def submit(self) -> str:
        """Hand the app to the SuperLink; the id of the run."""
        if self.job.extendable:
            self.result.unlink(missing_ok=True)
        for old in (self.folder / "server").glob("error*.txt"):
            old.unlink()
        self.attempt = f"-{time.time_ns()}"
        nodes = ",".join(str(node) for node in self.register())
        config = f'nodes="{nodes}" attempt="{self.attempt}"'
        said = self.flwr("run", str(self.folder / "app"), "symprune", "--run-config", config)
        run = re.search(r'"run-id":\s*"?(\d+)', said)
        if run is None:
            raise SympruneError(f"The SuperLink did not take the run: {said.strip()}.")
        return run[1]

    def rounds_done(self) -> int:
        """The rounds (of pruning: blocks) the server has finished and saved."""
        return self.job.steps_done(self.folder / "server")

    def over(self) -> bool:
        """Whether an earlier run in this folder did all that is asked for: a pruned model is not
        pruned again, training may be asked for more rounds."""
        self._refuse_another_run()
        return not self.job.extendable and self.result.exists()

    def finished(self) -> bool:
        """Whether the result is there; why not, if there will be none."""
        error = self.folder / "server" / f"error{self.attempt}.txt"
        if error.exists():
            raise SympruneError(error.read_text().strip())
        link = self.processes.get("superlink")
        if link is not None and link.poll() is not None and not self.result.exists():
            raise SympruneError(f"The SuperLink has stopped, see {self.folder / 'logs'}.")
        return self.result.exists()

    def check_alive(self, run: str) -> None:
        """Refuse to wait for a run that Flower has given up, its server process killed or dead
        before it could say why."""
        said = self.flwr("list", "symprune", "--run-id", run)
        status = re.search(r'"status":\s*"(finished[^"]*)"', said)
        if status is not None and not self.finished():
            logs = self.folder / "logs"
            raise SympruneError(f"Run {run} is {status[1]} and left no result, see {logs}.")

    def flwr(self, *arguments: str) -> str:
        """What the `flwr` command says to these arguments, as JSON if it can."""
        command = [_program("flwr"), *arguments, "--format", "json"]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True)
        return done.stdout + done.stderr

    def stop(self) -> None:
        """End every process that was started, nodes first, however often this is interrupted."""
        with undisturbed():
            for name in sorted(self.processes, key=lambda name: name == "superlink"):
                self.kill(name, signal.SIGTERM)
            end = time.monotonic() + stretched(LAST_WORDS)
            while strays := [p for p in psutil.process_iter() if self._started(p)]:
                for stray in strays:  # one may have started another since they were listed
                    with suppress(psutil.Error):
                        stray.kill()
                psutil.wait_procs(strays, max(0.0, end - time.monotonic()))
                if time.monotonic() > end:
                    break

    def kill(self, name: str, how: signal.Signals) -> None:
        """End one process. Those that Flower started for it watch it and should follow by
        themselves; `stop` sees to it."""
        process = self.processes.pop(name)
        if process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(stretched(LAST_WORDS))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self, name: str, host: str, port: int, command: list[str]) -> None:
        if listens(host, port):
            raise SympruneError(f"Port {port} of this machine is taken; choose another.")
        kept = self.folder / "logs" / f"{name}.log"
        private = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(private, "ab") as log, postponed():
            self.processes[name] = subprocess.Popen(
                [_program(command[0]), *command[1:]],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
                umask=0o077,  # the SuperLink's database holds every message
            )

    def _wait(self, name: str, ready: Callable[[], bool]) -> bool:
        """Whether a process that was started became ready before it ended."""
        end = time.monotonic() + stretched(START)
        while not ready():
            if self.processes[name].poll() is not None:
                return ready()
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def _bury(self, name: str) -> None:
        """End a process and what it started: a later one has the same port."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
        process.wait()

    def _environment(self) -> dict[str, str]:
        bin_folder = str(Path(sys.executable).parent)
        path = bin_folder + os.pathsep + os.environ.get("PATH", "")
        home = {"FLWR_HOME": str(self.folder / "flower"), "PATH": path}
        asked = {name: str(1 - int(value)) for name, value in QUIET.items()}
        return {**os.environ, **(asked if self.telemetry else QUIET), **home, MARK: self.mark}

    def _started(self, process: psutil.Process) -> bool:
        """Whether a process, however remotely, was started by this object."""
        try:
            mine = process.environ().get(MARK) == self.mark
            return mine and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@contextmanager
def running(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment while it runs; afterwards nothing of it is left running."""
    deployment.prepare()
    with ending_as_exceptions():
        try:
            try:
                deployment.start()
                yield deployment
            finally:
                deployment.stop()
        except BaseException:  # a signal may have come before the line above; no other one does
            deployment.stop()
            raise


def _flags(options: Mapping[str, object]) -> list[str]:
    return [text for name, value in options.items() for text in (name, str(value))]


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    if not beside.exists():
        raise SympruneError(f"{name} is not installed beside {sys.executable}.")
    return str(beside)
