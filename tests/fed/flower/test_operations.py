"""Running a federation: private files, an audit log, signals, keys that change, metrics."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import signal
import ssl
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from machines import job, run

from symprune.errors import SympruneError
from symprune.fed.owner.audit import audited, check_log
from symprune.fed.owner.ledger import Ledger
from symprune.fed.owner.policy import Policy
from symprune.fed.privacy import Release
from symprune.fed.pruning import messages
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.metrics import prometheus
from symprune.fed.remote.sentences import _head as read_head_of
from symprune.fed.remote.sentences import sentence
from symprune.fed.remote.transport import refusal_in
from symprune.fed.wire.envelope import Letter
from symprune.fed.wire.payload import encode_message

if TYPE_CHECKING:
    from symprune.fed.flower.deploy import Deployment

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="Flower is not installed"
)
TASK = TrainingJob("gd", {}, {"data": "digits", "clients": 2, "l2": 0.1}, rounds=1)
WHO = {"client": 0, "from": 7, "flower_run": 3}


def entries(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def write(folder: Path, number: int) -> None:
    """What one of several processes writes."""
    for i in range(12):
        Ledger(folder / "ledger.jsonl", 1e6, 1e-5).spend(Release(1.0, 9.0), "x", f"{number} {i}")
        who = {"client": number, "why": "x" * 3000}
        audited(lambda: b"", bytes(1000 + i), folder, {}, who)


def test_an_audit_log_says_who_asked_what_and_what_was_answered(tmp_path: Path) -> None:
    for asked in (b"first", b"second"):
        assert audited(lambda: b"reply", asked, tmp_path / "node", {}, WHO) == b"reply"
    first, second = entries(tmp_path / "node" / "audit.jsonl")
    assert first["asked"] == hashlib.sha256(b"first").hexdigest()
    assert second["answered"] == hashlib.sha256(b"reply").hexdigest()
    assert (first["from"], first["asked_bytes"], first["answered_bytes"]) == (7, 5, 5)
    assert mode(tmp_path / "node" / "audit.jsonl") == 0o600
    assert b"reply" not in (tmp_path / "node" / "audit.jsonl").read_bytes()


def test_an_audit_log_says_in_words_what_was_asked_and_answered(tmp_path: Path) -> None:
    header = {"kind": "turn", "turn": 4, "algorithm": "fedavg", "work": True, "problem": {}}
    asked, done = Letter(header).pack(), Letter({"status": "done", "turn": 4}).pack()
    heads = messages.head(messages.ROUND, 3, 0, 2), messages.head(messages.GRAMS, 3, 0, 9)
    pairs = [(asked, done), *((messages.write(head), messages.write(head)) for head in heads)]
    odd = Letter({**header, "algorithm": "x\n" * 99, "turn": 10**400}).pack()
    for question, reply in (*pairs, (odd, b"")):
        audited(partial(bytes, reply), question, tmp_path, {}, WHO, sentence)
    said = [(entry["what"], entry["with"]) for entry in entries(tmp_path / "audit.jsonl")]
    assert said[0] == ("work in round 4 of fedavg", "done in round 4")
    assert said[1] == ("the statistics of block 3",) * 2
    assert said[2] == ("the Gram matrices of block 3",) * 2
    assert said[3][1] == "bytes that are no message" and "\n" not in said[3][0]
    assert len(said[3][0]) < 99


@pytest.mark.parametrize("places", [(), (1,), (1, 2, 3, 7), tuple(range(8))])
def test_a_head_is_read_without_torch_as_with_it(places: tuple[int, ...]) -> None:
    head = torch.zeros(8, dtype=torch.int64).index_fill(0, torch.tensor(places).long(), 2)
    data = encode_message({"head": head, "more": torch.ones(3)})
    assert read_head_of(data) == head.tolist()


@pytest.mark.parametrize("damage", ["changed", "left out", "exchanged", "torn in the middle"])
def test_an_audit_log_that_was_changed_shows_it(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    for number in range(4):
        audited(lambda: b"", bytes(number), tmp_path, {}, WHO)
    assert check_log(file) == 4
    lines = file.read_text().splitlines(keepends=True)
    changed = {
        "changed": [lines[0], lines[1].replace(" ", "  ", 1), *lines[2:]],
        "left out": [lines[0], *lines[2:]],
        "exchanged": [lines[0], lines[2], lines[1], lines[3]],
        "torn in the middle": [lines[0], lines[1][:20] + "\n", *lines[2:]],
    }[damage]
    file.write_text("".join(changed))
    with pytest.raises(SympruneError, match=r"line \d of the audit log"):
        check_log(file)


def test_an_audit_log_goes_on_behind_a_line_that_a_crash_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    audited(lambda: b"", b"", tmp_path, {}, WHO)
    file.write_bytes(file.read_bytes() + b'{"time": "2')
    audited(lambda: b"", b"", tmp_path, {}, WHO)
    assert json.loads(file.read_text().splitlines()[-1])["client"] == 0
    with pytest.raises(SympruneError, match="line 2 of the audit log"):
        check_log(file)


def test_a_refusal_is_in_the_audit_log_too_where_the_policy_wants_it(tmp_path: Path) -> None:
    Policy(audit=str(tmp_path / "log")).save(tmp_path / "policy.yaml")

    def refuse() -> bytes:
        raise SympruneError("The owner's policy refuses: so it is.")

    config = {"policy": str(tmp_path / "policy.yaml")}
    with pytest.raises(SympruneError, match="so it is"):
        audited(refuse, b"asked", tmp_path / "node", config, WHO)
    (entry,) = entries(tmp_path / "log")
    assert "so it is" in str(entry["refused"]) and "answered" not in entry
    said = Letter({"status": "error", "reason": "No, since it is so."}).pack()
    audited(lambda: said, b"asked", tmp_path / "node", config, WHO, sentence, refusal_in)
    entry = entries(tmp_path / "log")[-1]
    assert entry["refused"] == "No, since it is so." and "answered" in entry


def test_processes_that_write_one_audit_log_and_ledger_at_once_lose_nothing(
    tmp_path: Path,
) -> None:
    """Four processes, twelve releases each: every line is there, behind the one before."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=write, args=(tmp_path, number)) for number in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * 4
    audit = entries(tmp_path / "audit.jsonl")
    assert sorted((e["client"], e["asked_bytes"]) for e in audit) == [
        (number, 1000 + i) for number in range(4) for i in range(12)
    ]
    assert check_log(tmp_path / "audit.jsonl") == 48
    ledger = Ledger(tmp_path / "ledger.jsonl", 1e6, 1e-5)
    lines = entries(ledger.file)
    assert len(lines) == 48 and [line["entry"] for line in lines] == list(range(48))
    assert [line["before"] for line in lines[1:]] == [line["hash"] for line in lines[:-1]]
    assert ledger.spent() > 0  # reads it with all of its checks


def test_what_cannot_be_written_down_is_not_answered(tmp_path: Path) -> None:
    (tmp_path / "node").write_text("a file in the place of the folder")
    with pytest.raises(SympruneError, match=r"audit log .* cannot be written"):
        audited(lambda: b"reply", b"asked", tmp_path / "node", {}, WHO)


def test_a_run_leaves_its_metrics_as_lines_and_as_prometheus_text(tmp_path: Path) -> None:
    outcome = run(job("gd", 2), tmp_path)
    lines = entries(tmp_path / "server" / "metrics.jsonl")
    assert [line["round"] for line in lines] == [1, 2]
    assert lines[-1]["loss"] == outcome.history[-1]["loss"] and lines[0]["run"] == outcome.run
    text = (tmp_path / "server" / "metrics.prom").read_text()
    assert text == prometheus(outcome.history[-1], outcome.run)
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert f'symprune_fed_round{{run="{outcome.run}"}} 2.0' in samples
    assert all(float(line.split()[-1]) >= 0 for line in samples)


def make(folder: Path, node_keys: Path | None = None) -> Deployment:
    from symprune.fed.flower.deploy import Deployment

    return Deployment(folder, TASK, 18731, 18741, node_keys=node_keys)


@needs_flower
def test_rotated_keys_are_new_and_the_authority_stays(tmp_path: Path) -> None:
    from cryptography import x509

    make(tmp_path).prepare()
    keys = tmp_path / "keys"
    before = {file.name: file.read_bytes() for file in keys.iterdir()}
    (tmp_path / "nodes.json").write_text("[11, 12]")
    make(tmp_path).rotate_keys()
    after = {file.name: file.read_bytes() for file in keys.iterdir()}
    assert before.keys() == after.keys()
    assert {name for name in after if after[name] == before[name]} == {"ca.crt", "ca.key"}
    root, leaf = (x509.load_pem_x509_certificate(after[n]) for n in ("ca.crt", "superlink.crt"))
    leaf.verify_directly_issued_by(root)
    assert all(mode(file) == 0o600 for file in keys.glob("*.key"))
    make(tmp_path).rotate_keys()
    assert json.loads((tmp_path / "nodes.json").read_text()) == [-11, -12]


def accepts(keys: Path, authority: bytes) -> bool:
    """Whether who has these authorities' certificates talks to the server, by a handshake of TLS
    in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys / "superlink.crt", keys / "superlink.key")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=authority.decode())
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname="localhost"),
        server.wrap_bio(there, back, server_side=True),
    ]
    done = [False, False]
    while not all(done):
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
                done[number] = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
    return True


@needs_flower
def test_an_authority_is_followed_by_another_and_both_are_accepted_for_a_time(
    tmp_path: Path,
) -> None:
    make(tmp_path).prepare()
    keys = tmp_path / "keys"
    old = (keys / "ca.crt").read_bytes()
    assert accepts(keys, old)
    assert not make(tmp_path).rotate_authority()
    both = (keys / "ca.crt").read_bytes()
    assert both.startswith(old) and both.count(b"BEGIN CERTIFICATE") == 2
    assert accepts(keys, old) and accepts(keys, both)  # the server's is the old one's still
    make(tmp_path).rotate_keys()
    assert accepts(keys, old) and accepts(keys, both)
    assert make(tmp_path).rotate_authority()
    new = (keys / "ca.crt").read_bytes()
    assert new == both.removeprefix(old)
    assert accepts(keys, both) and accepts(keys, new) and not accepts(keys, old)
    make(tmp_path).rotate_keys()
    assert accepts(keys, both) and accepts(keys, new) and not accepts(keys, old)
    assert not list(keys.glob("next-*")) and mode(keys / "ca.key") == 0o600


@needs_flower
def test_an_owner_makes_its_own_key_and_hands_over_the_public_half(tmp_path: Path) -> None:
    from symprune.fed.flower.keys import make_node_key

    owner, given, keys = (tmp_path / name for name in ("owner", "given", "fed/keys"))
    owner.mkdir()
    given.mkdir()
    public = make_node_key(owner / "node-1.key")
    assert mode(owner / "node-1.key") == 0o600 and b"PRIVATE" not in public.read_bytes()
    with pytest.raises(SympruneError, match="exists and is left as it is"):
        make_node_key(owner / "node-1.key")
    with pytest.raises(SympruneError, match="has no public keys of nodes"):
        make(tmp_path / "fed", given).prepare()
    (given / "node-1.pub").write_text("nonsense")
    with pytest.raises(SympruneError, match="does not hold public node keys"):
        make(tmp_path / "fed", given).prepare()
    (given / "node-1.pub").write_bytes(public.read_bytes())
    make(tmp_path / "fed", given).prepare()
    assert {file.name for file in keys.glob("node-*")} == {"node-0.key", "node-0.pub", "node-1.pub"}
    assert (keys / "node-1.pub").read_bytes() == public.read_bytes()
    before = (keys / "node-0.pub").read_bytes()
    (tmp_path / "fed" / "nodes.json").write_text("[11, 12]")
    make(tmp_path / "fed").rotate_keys()
    assert (keys / "node-1.pub").read_bytes() == public.read_bytes()
    assert not (keys / "node-1.key").exists() and (keys / "node-0.pub").read_bytes() != before
    assert json.loads((tmp_path / "fed" / "nodes.json").read_text()) == [-11, 12]
    other = make_node_key(tmp_path / "again.key")
    (given / "node-1.pub").write_bytes(other.read_bytes())
    make(tmp_path / "fed", given).prepare()
    assert json.loads((tmp_path / "fed" / "nodes.json").read_text()) == [-11, -12]


@needs_flower
def test_logs_and_databases_of_before_become_private(tmp_path: Path) -> None:
    for name in ("flower/superlink.db", "logs/node-0.log", "asked.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(0o644)
    make(tmp_path).prepare()
    assert mode(tmp_path / "flower" / "superlink.db") == mode(tmp_path / "logs/node-0.log") == 0o600
    assert mode(tmp_path / "flower") == mode(tmp_path / "logs") == 0o700


STARTER = """
import sys
from pathlib import Path
from symprune.fed.flower import deploy
from symprune.fed.remote.job import TrainingJob

CHILD = '''
import signal, subprocess, sys, time
def slowly(*_):
    time.sleep(1)
    sys.exit()
signal.signal(signal.SIGTERM, slowly)
stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print("stray", stray.pid, flush=True)
time.sleep(600)
'''

class Small(deploy.Deployment):
    def start(self):
        self._start("superlink", "127.0.0.1", self.port, ["python", "-c", CHILD])
        log = self.folder / "logs" / "superlink.log"
        self._wait("superlink", lambda: b"stray" in log.read_bytes())
        said = log.read_text().split()
        print("pids", self.processes["superlink"].pid, said[said.index("stray") + 1], flush=True)

task = TrainingJob("gd", {}, {"data": "digits", "clients": 2}, rounds=1)
with deploy.running(Small(Path(sys.argv[1]), task, 18751, 18761)):
    import time
    time.sleep(600)
"""


@needs_flower
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_deployment_that_is_told_to_stop_again_and_again_leaves_no_process_behind(
    first: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "fed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()[1:]]
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        process.send_signal(first)
        for again in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            time.sleep(0.1)
            process.send_signal(again)
        assert process.wait() != 0
    assert not any(_alive(pid) for pid in pids)
    assert mode(tmp_path / "fed" / "logs" / "superlink.log") == 0o600


@needs_flower
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_process_is_started_ends_that_process_too(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the process and the name it is known by there is no moment to be interrupted in."""
    from symprune.fed.flower import deploy

    class Asked(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            for again in (number, signal.SIGINT, number):
                signal.raise_signal(again)

    made = make(tmp_path)
    monkeypatch.setattr(deploy.subprocess, "Popen", Asked)
    monkeypatch.setattr(
        deploy.Deployment,
        "start",
        lambda self: self._start("superlink", "127.0.0.1", self.port,
                                 ["python", "-c", "import time; time.sleep(60)"]),
    )  # fmt: skip
    monkeypatch.setattr(deploy.Deployment, "_started", lambda self, process: False)
    known: list[subprocess.Popen[bytes]] = []
    ended = deploy.Deployment.kill

    def kill(self: deploy.Deployment, name: str, how: signal.Signals) -> None:
        known.append(self.processes[name])
        ended(self, name, how)

    monkeypatch.setattr(deploy.Deployment, "kill", kill)
    with pytest.raises(SystemExit), deploy.running(made):
        pytest.fail("it was told to stop")  # pragma: no cover
    assert [process.poll() is not None for process in known] == [True]


AT_ONCE = """
import subprocess, sys, time
from symprune.fed.flower.deploy import running
from symprune.fed.flower.signals import undisturbed

class Little:
    def prepare(self): pass
    def start(self):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(self.child.pid, flush=True)
    def stop(self):
        with undisturbed():
            time.sleep(0.05)
            self.child.kill()
            self.child.wait()

with running(Little()):
    while True:
        time.sleep(1)
"""
PAIRS = [
    (signal.SIGTERM, signal.SIGHUP),
    (signal.SIGHUP, signal.SIGTERM),
    (signal.SIGINT, signal.SIGTERM),
    (signal.SIGTERM, signal.SIGINT),
]


def test_two_signals_without_a_pause_between_them_leave_no_process_behind() -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", AT_ONCE], stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL)
        for _ in PAIRS
    ]  # fmt: skip
    children = []
    for process, pair in zip(started, PAIRS, strict=True):
        assert process.stdout is not None
        children.append(int(process.stdout.readline()))
        for number in pair:
            process.send_signal(number)
    for process in started:
        with process:
            assert process.wait() != 0
    left = [pid for pid in children if _alive(pid)]
    for pid in left:
        psutil.Process(pid).kill()
    assert not left


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@needs_flower
@pytest.mark.slow
def test_a_superlink_keeps_its_database_private_and_takes_rotated_keys(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.prepare()
    try:
        first.start_superlink()
        before = first.register()
    finally:
        first.stop()
    assert mode(tmp_path / "flower" / "superlink.db") == 0o600
    second = make(tmp_path)
    second.rotate_keys()
    try:
        second.start_superlink()
        after = second.register()
        assert len(after) == 2 and not set(before) & set(after)
        second.start_node(0)
    finally:
        second.stop()
    third, authorities = make(tmp_path), tmp_path / "keys" / "ca.crt"
    assert not third.rotate_authority()
    both = authorities.read_bytes()
    assert third.rotate_authority() and authorities.read_bytes() != both
    authorities.write_bytes(both)  # as whoever has not taken the last one yet
    try:
        third.start_superlink()
        assert third.register() == after
        third.start_node(0)
    finally:
        third.stop()
