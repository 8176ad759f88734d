"""Federated pruning over a transport: the server's job, and a client that lives on its own machine.

A client may be a new process for every message, so it reads the model each time and keeps its state
in its folder. What it calibrates on, how much of it and what protection it insists on are the
owner's settings on that machine (`text`, `nsamples`, `seqlen`, `seed`, `epsilon`, `delta`, `clip`,
`secure`, `node_key`, `peers`, `least_clients`, `gram`, `allow_few_tokens`, `bos`, `revision`,
`trust_remote_code`, `compute_dtype`); the server decides none of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from symprune import calibration
from symprune.checkpoint import output_folder
from symprune.checkpoint.load import load_with_tokenizer
from symprune.engine import decide
from symprune.engine.text import bos
from symprune.engine.text.bos import Bos
from symprune.engine.text.tokens import cap_seqlen
from symprune.errors import SympruneError
from symprune.fed.owner.guard import guard_of_text
from symprune.fed.owner.policy import NOISE, PLAIN, PRUNING, SECURE_SUM, SHARED_NOISE, Policy
from symprune.fed.problems.models.fingerprint import digest, tokenizer_digest
from symprune.fed.protocol import check
from symprune.fed.pruning import server_state
from symprune.fed.pruning.aggregate import grams
from symprune.fed.pruning.aggregate.ballots import STATISTICS
from symprune.fed.pruning.aggregate.bounds import DEPLOYED
from symprune.fed.pruning.client import Client
from symprune.fed.pruning.driver import PruningResult, run
from symprune.fed.pruning.job import REFERENCE_WINDOWS, PruningJob
from symprune.fed.pruning.noise import Privacy
from symprune.fed.pruning.refusals import check_defence, check_recipe
from symprune.fed.pruning.server import Server
from symprune.fed.remote.metrics import write_metrics
from symprune.fed.remote.transport import Node, Setting, Transport, wait_for_all
from symprune.fed.secure.graph import threshold
from symprune.fed.secure.party import Trust
from symprune.fed.threads import limited_threads
from symprune.machine import compute, durable
from symprune.machine.lock import alone
from symprune.models import hub
from symprune.recipe import Recipe
from symprune.validation import has_kinds, parse_json

log = logging.getLogger("symprune.fed")
STATE = "pruning.safetensors"
BEGINNING = "bos.json"
MODEL = "model"
TASK = {"model": str, "recipe": dict, "clients": int, "secure": bool, "reference": str}
TASK |= {"trust_remote_code": bool, "compute_dtype": str, "aggregate": str, "gram_bits": int}
TASK |= {"robust": str}
PATIENCE = 20  # pauses until everyone is connected; who is missing then is left out


@dataclass(frozen=True)
class Task:
    """What the server is to do. The recipe's calibration set is the clients' affair."""

    server_main: ClassVar[str] = "prune"
    client_module: ClassVar[str] = "symprune.fed.pruning.remote"
    result_file: ClassVar[str] = "model/symprune.json"
    extendable: ClassVar[bool] = False
    title: ClassVar[str] = "Pruning"

    model: str
    recipe: Recipe
    clients: int
    secure: bool = False
    privacy: Privacy | None = None
    reference: str = "builtin"
    revision: str | None = None
    trust_remote_code: bool = False
    compute_dtype: str = "auto"
    aggregate: str = STATISTICS
    gram_bits: int = grams.EXACT
    robust: str = DEPLOYED

    def __post_init__(self) -> None:
        check_recipe(self.recipe, self.aggregate, self.privacy, self.gram_bits)
        check_defence(self.robust, self.recipe, self.aggregate, self.secure, self.privacy)

    def policy(self, own: Mapping[str, Setting]) -> Policy:
        """What an owner who wants just this allows; its settings are no code."""
        least = SECURE_SUM if self.secure else PLAIN
        if self.privacy is not None:
            shared = self.privacy.sharing(self.clients, self.secure) > 1
            least = SHARED_NOISE if shared else NOISE
        policy = Policy(
            jobs=(PRUNING,),
            algorithms=(self.aggregate,),
            protection=least,
            least_clients=min(self.clients, threshold(self.clients)),
        )
        if self.privacy is None:
            return policy
        epsilon, delta = self.privacy.epsilon, self.privacy.delta
        return replace(policy, epsilon=epsilon, delta=delta, least_noise=0.0)

    def steps_done(self, folder: Path) -> int:
        """The blocks the server has decided and saved."""
        return server_state.blocks_done(folder / STATE)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "recipe": self.recipe.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> Task:
        try:
            values = parse_json(text)
            if not has_kinds(values, TASK):
                raise ValueError("a value is not of its kind")
            private = values.pop("privacy")
            recipe = Recipe.from_dict(values.pop("recipe"))
            return cls(recipe=recipe, privacy=Privacy(**private) if private else None, **values)
        except (ValueError, TypeError, KeyError) as error:
            raise SympruneError(f"This is no pruning task: {error}.") from error


def of_job(job: PruningJob) -> tuple[Task, tuple[dict[str, Setting], ...]]:
    """A command's job for a federation: the server's task, and what each owner would set."""
    check(bool(job.texts), "Nodes have texts of their own: name one --client for each.")
    elsewhere = {
        "output": job.output is not None,
        "force": job.force,
        "dtype": job.dtype != "auto",
        "device": job.device != "auto",
        "eval-data": bool(job.eval_data),
        "eval-windows": job.eval_windows is not None,
    }
    for option in (name for name, given in elsewhere.items() if given):
        sentence = "the model is left in server/model of its folder, as it is and not measured"
        raise SympruneError(f"--{option} does not go with --deploy: {sentence}.")
    if job.access.token is not None:
        raise SympruneError(
            "--token does not go with --deploy, which writes settings down: log in on every "
            "machine with `hf auth login` instead."
        )
    origin = hub.resolve(job.model, job.access)
    seqlen, _ = cap_seqlen(hub.load_config(origin), job.recipe.seqlen)
    recipe = job.recipe.with_changes(seqlen=seqlen)
    model = str(Path(job.model).resolve()) if Path(job.model).exists() else job.model
    version, trusted = job.access.revision, job.access.trust_remote_code
    task = Task(
        model, recipe, len(job.texts), job.secure, job.privacy, job.reference, version, trusted,
        job.compute_dtype, job.aggregate, job.gram_bits, job.robust,
    )  # fmt: skip
    shared: dict[str, Setting] = {"model": model, "nsamples": recipe.nsamples, "seqlen": seqlen}
    shared |= {"secure": job.secure, "trust_remote_code": trusted, "bos": recipe.bos}
    shared |= {"compute_dtype": job.compute_dtype, "allow_few_tokens": job.allow_few_tokens}
    shared["gram"] = decide.needs(recipe).gram and job.aggregate == STATISTICS
    if version is not None:
        shared["revision"] = version
    if job.privacy is not None:
        shared |= {name: v for name, v in asdict(job.privacy).items() if v is not None}
    return task, tuple(
        {
            **shared,
            "text": calibration.with_whole_paths(text),
            "seed": recipe.text_seed + number,
        }
        for number, text in enumerate(job.texts)
    )


def serve(task: Task, transport: Transport, folder: Path, *, pause: float = 3.0) -> PruningResult:
    """Prune with the clients behind the transport. A run that was stopped goes on; in the end the
    model is in `model` below the folder."""
    check(task.clients == transport.clients, f"The task is for {task.clients} clients.")
    output = folder / MODEL
    output_folder.check_output(output, force=False)
    access = hub.Access(task.revision, trust_remote_code=task.trust_remote_code)
    model, tokenizer = load_with_tokenizer(task.model, device="cpu", access=access)
    stored = compute.widen(model, task.compute_dtype, torch.device("cpu"))
    beginning = bos.decide(task.recipe.bos, tokenizer, model.config, bos.in_memory(model))
    reference = None
    if task.privacy is not None:
        length, seed = task.recipe.seqlen, task.recipe.text_seed
        reference = calibration.calibration_tokens(
            task.reference, tokenizer, REFERENCE_WINDOWS, length, seed
        )
        reference = calibration.begin_with(reference, beginning.token)
    server = Server(
        model, task.recipe, task.clients, task.secure, task.privacy, reference, stored,
        task.aggregate, task.gram_bits, tokenizer_digest(tokenizer), task.robust,
    )  # fmt: skip
    server.report.bos = beginning
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / STATE
    wait_for_all(transport, PATIENCE, pause)
    named = hashlib.sha256(task.to_json().encode()).hexdigest()[:12]
    result = run(
        server, transport.exchange, checkpoint=state, tell=log.info,
        measured=lambda record: write_metrics(folder, record, named),
    )  # fmt: skip
    record = {"model": task.model, "description": task.recipe.describe(), **result.to_dict()}
    record["compute_dtype"] = compute.name_of(model.dtype)
    compute.restore(model, stored)
    record["federated"]["secure_sum"] = task.secure
    output_folder.save(output, model, tokenizer, record, result.report.masks)
    server_state.remove(state)
    return result


def answer(data: bytes, node: Node) -> bytes:
    """A client's reply. One that cannot answer says nothing and is left out, with the reason in its
    own log."""
    settings = NodeSettings.of(node.config)
    guard = guard_of_text(node.config, settings.text)
    if guard.data is not None:
        settings = replace(settings, text=guard.data)
    with alone(node.lock), limited_threads():
        model, tokens, stored, words = settings.load(node.folder)
        guard.policy.check_model(digest(model, stored, words))
        owner = (settings.privacy, settings.secure, node.folder)
        allowed: dict[str, Any] = {"gram": settings.gram, "guard": guard, "words": words}
        least = max(settings.least_clients, guard.policy.least_clients)
        trust = replace(settings.trust, least_clients=least)
        allowed |= {"allow_few_tokens": settings.allow_few_tokens, "trust": trust}
        return Client(model, tokens, *owner, stored=stored, **allowed)(data)


@dataclass(frozen=True)
class NodeSettings:
    """What the owner of a client has set on its machine."""

    model: str
    text: str
    nsamples: int = 128
    seqlen: int = 2048
    seed: int = 0
    secure: bool = False
    epsilon: float | None = None
    delta: float = 1e-5
    clip: float = 0.5
    revision: str | None = None
    trust_remote_code: bool = False
    bos: str = "auto"
    compute_dtype: str = "auto"
    gram: bool = False
    allow_few_tokens: bool = False
    node_key: str | None = None
    peers: str | None = None
    least_clients: int = 2

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> NodeSettings:
        known = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        for name in ("model", "text"):
            check(name in known, f"This node's configuration does not name its {name}.")
        return cls(**known)

    @property
    def privacy(self) -> Privacy | None:
        return None if self.epsilon is None else Privacy(self.epsilon, self.delta, self.clip)

    @property
    def trust(self) -> Trust:
        key, peers = (None if not at else Path(at) for at in (self.node_key, self.peers))
        return Trust(key, peers, self.least_clients)

    def load(self, folder: Path) -> tuple[nn.Module, Tensor, dict[str, torch.dtype], bytes]:
        """The model, the owner's tokens, what of the model is stored in another type, and the
        tokenizer's digest. What was measured for the tokens is kept in the folder."""
        access = hub.Access(self.revision, trust_remote_code=self.trust_remote_code)
        model, tokenizer = load_with_tokenizer(self.model, device="cpu", access=access)
        stored = compute.widen(model, self.compute_dtype, torch.device("cpu"))
        tokens = calibration.calibration_tokens(
            self.text, tokenizer, self.nsamples, self.seqlen, self.seed
        )
        tokens = calibration.begin_with(tokens, self._first(model, tokenizer, folder))
        return model, tokens, stored, tokenizer_digest(tokenizer)

    def _first(self, model: Any, tokenizer: Any, folder: Path) -> int | None:
        """The token that windows begin with, decided once: every message is a new process."""
        file, of = folder / BEGINNING, [self.model, self.revision, self.bos]
        kept = parse_json(file.read_text()) if file.is_file() else {}
        if kept.get("of") != of:
            beginning = bos.decide(self.bos, tokenizer, model.config, bos.in_memory(model))
            kept = {"of": of, "found": beginning.to_dict()}
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            durable.write_text(file, json.dumps(kept))
        return Bos(**kept["found"]).token
