"""Models and data of users' own across machines: each owner's code, never the server's."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import families
import pytest
import torch
from loopback import Loopback
from safetensors.torch import load_file
from text_owners import OPTIONS, Owners, write_owners
from typer.testing import CliRunner

from symprune.cli.main import app
from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.flower import apps
from symprune.fed.owner.policy import Policy
from symprune.fed.problems.datasets import text_data
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.models import user_code
from symprune.fed.problems.models.causal_lm import CausalLM
from symprune.fed.problems.models.fingerprint import digest_of_loss
from symprune.fed.remote.client import answer
from symprune.fed.remote.job import TrainingJob, identity
from symprune.fed.remote.server import serve
from symprune.fed.remote.transport import Node
from symprune.fed.simulate import simulate
from symprune.fed.wire.envelope import Letter, unpack


@pytest.fixture
def owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of code that every owner has; nothing is allowed before a test says so."""
    monkeypatch.setattr(user_code, "_allowed", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write_owners(tmp_path)


def task(owners: str, rounds: int = 2) -> TrainingJob:
    problem = {"model": f"{owners}:model", "data": f"{owners}:everyone", "clients": 3, "l2": 0.0}
    return TrainingJob("fedavg", OPTIONS, {**problem, "split": "user"}, rounds)


def test_owners_with_their_own_model_and_text_give_the_bits_of_the_in_process_run(
    owners: str, tmp_path: Path
) -> None:
    job = task(owners)
    there = serve(job, Owners(owners, tmp_path / "clients"), tmp_path / "server", pause=0)
    here = simulate(job.build_algorithm(), job.whole_problem(), 2, clients_at_once=1)
    assert torch.equal(there.model, here.model)
    assert there.history[-1]["perplexity"] == here.history[-1]["perplexity"]
    assert there.ledger.totals() == {key: here.history[-1][key] for key in there.ledger.totals()}


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")
def test_flower_carries_a_language_model_of_owners_to_the_same_bits(
    owners: str, tmp_path: Path
) -> None:
    job, settings = task(owners), Owners(owners, tmp_path).settings
    grid = Loopback(apps.client_app(answer), tmp_path / "nodes", 3, settings)
    config = {"job": job.to_json(), "folder": str(tmp_path), "clients": 3}
    grid.run(apps.server_app(apps.train), config)
    here = simulate(job.build_algorithm(), job.whole_problem(), 2, clients_at_once=1)
    there = load_file(tmp_path / "server" / "model.safetensors")
    assert there.keys() == here.parameters.keys()
    assert all(torch.equal(there[name], here.parameters[name]) for name in there)


def introduction(job: TrainingJob) -> bytes:
    """What a server asks client 0 first."""
    about = {"algorithm": job.algorithm, "options": job.options, "seed": 0, "client": 0}
    about |= identity(job.whole_problem())
    return Letter({"kind": "describe", "problem": job.problem, **about}).pack()


def test_an_owner_who_takes_code_off_the_policy_is_not_answered_for_by_it_any_longer(
    owners: str, tmp_path: Path
) -> None:
    """Also by a process that ran it before: it answers many letters."""
    job, node = task(owners), Owners(owners, tmp_path / "clients").node(0)
    letter = introduction(job)
    user_code._allowed.clear()  # what the server's own job has allowed in this process
    said = unpack(answer(letter, node)).header
    assert said["status"] == "described", said
    policy = Path(str(node.config["policy"]))
    for left in ("model", "first"):
        Policy(protection="plain", code=(f"{owners}:{left}",)).save(policy)
        said = unpack(answer(letter, node)).header
        assert "is code that it does not list" in said["reason"]
    Policy(protection="plain", code=(f"{owners}:model",), data=f"{owners}:first").save(policy)
    assert unpack(answer(letter, node)).header["status"] == "described"


def test_a_model_that_is_not_the_owners_is_not_trained(owners: str, tmp_path: Path) -> None:
    job, node = task(owners), Owners(owners, tmp_path / "clients").node(0)
    letter, problem = introduction(job), job.whole_problem()
    known = bytes(digest_of_loss(problem.loss, problem.words).tolist()).hex()
    policy = Path(str(node.config["policy"]))
    code = tuple(f"{owners}:{name}" for name in ("first", "model"))
    for digest, status in ((known, "described"), ("00", "error")):
        Policy(protection="plain", code=code, model_digest=digest).save(policy)
        said = unpack(answer(letter, node)).header
        assert said["status"] == status
    assert f"the digest {known}, not 00" in said["reason"]


@pytest.mark.parametrize("part", ["a weight", "the configuration", "the tokenizer"])
def test_the_digest_of_a_trained_model_is_of_all_that_it_is(part: str) -> None:
    def made(change: bool) -> tuple[CausalLM, bytes]:
        model = families.model("smollm")
        tokenizer = families.tokenizer()
        if change and part == "a weight":
            next(model.parameters()).data[0, 0] += 1
        if change and part == "the configuration":
            model.config.rms_norm_eps = 0.5
        if change and part == "the tokenizer":
            tokenizer.add_tokens(["another word"])
        return CausalLM(model), text_data(["some text"], tokenizer=tokenizer, length=4).words

    assert torch.equal(digest_of_loss(*made(False)), digest_of_loss(*made(False)))
    assert not torch.equal(digest_of_loss(*made(False)), digest_of_loss(*made(True)))


def test_a_client_runs_no_code_that_its_owner_has_not_named(owners: str, tmp_path: Path) -> None:
    poison = tmp_path / "poison.py"
    poison.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    job = task(owners)
    for what in ("model", "data"):
        asked = replace(job, problem={**job.problem, what: f"{poison}:anything"})
        about = {"algorithm": asked.algorithm, "options": asked.options, "seed": 0, "client": 0}
        letter = Letter({"kind": "describe", "problem": asked.problem, **about}).pack()
        settings = {"model": f"{owners}:model", "data": f"{owners}:first"}
        del settings[what]
        said = unpack(answer(letter, Node(0, tmp_path / "node", settings))).header
        assert f"The server's {what} {poison}:anything is code" in said["reason"]
        answer(letter, Node(0, tmp_path / "node", {**settings, what: f"{owners}:{what}"}))
        assert not (tmp_path / "ran").exists()


def test_another_model_at_a_client_is_refused_by_its_digest(owners: str, tmp_path: Path) -> None:
    nodes = Owners(owners, tmp_path / "clients", model="other_model")
    job = task(owners)
    ours = identity(job.whole_problem())
    header = {"algorithm": job.algorithm, "options": job.options, "problem": job.problem, **ours}
    letter = Letter({**header, "kind": "describe", "seed": 0, "client": 1}).pack()
    said = unpack(nodes.exchange({1: letter})[1]).header["reason"]
    assert said == "Client 1 has other parameters that are not trained than the server."


def test_a_name_is_not_loaded_before_who_runs_the_program_allows_it(owners: str) -> None:
    with pytest.raises(SympruneError, match=r"model .*:model is code, which runs only where"):
        make_problem(_data(owners), f"{owners}:model", clients=2)
    user_code.allow_code(f"{owners}:model", f"{owners}:wrong", f"{owners}:broken", "nowhere:f")
    assert make_problem(_data(owners), f"{owners}:model", clients=2).clients == 2
    for name, sentence in (
        (f"{owners}:wrong", "is a list, not an nn.Module or a Loss"),
        (f"{owners}:broken", "fails: ValueError, no such corpus"),
        ("nowhere:f", "Cannot load the model nowhere:f: ModuleNotFoundError"),
    ):
        with pytest.raises(SympruneError, match=sentence):
            make_problem(_data(owners), name, clients=2)
    with pytest.raises(SympruneError, match=r"is a list, not a symprune\.fed\.Dataset"):
        make_problem(f"{owners}:wrong", "mlp")
    with pytest.raises(SympruneError, match="does not read text"):
        make_problem(_data(owners), "mlp")


def _data(owners: str):  # type: ignore[no-untyped-def]
    user_code.allow_code(f"{owners}:everyone")
    return user_code.load_code(f"{owners}:everyone", "data")()


def test_a_plan_runs_no_code(owners: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"problem: {{model: '{owners}:model'}}\nrounds: 1\nalgorithms: [gd]\n")
    said = CliRunner().invoke(app, ["fed", "compare", str(plan), "--output", str(tmp_path / "o")])
    assert isinstance(said.exception, SympruneError) and "is code" in str(said.exception)


def test_the_command_line_takes_a_model_and_data_of_the_users_own(
    owners: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--algorithm fedavg --clients 3 --split user --rounds 2 --l2 0 --quiet --output out"
    sets = [text for k, v in OPTIONS.items() for text in ("--set", f"{k}={v}")]
    own = ["--model", "owners:model", "--data", "owners:everyone"]
    done = CliRunner().invoke(app, ["fed", "run", *options.split(), *own, *sets])
    sys.modules.pop("owners", None)
    assert done.exit_code == 0, done.exception
    history = json.loads((tmp_path / "out" / "history.json").read_text())["history"]
    problem = task(owners).whole_problem()
    here = simulate(build("fedavg", **OPTIONS), problem, 2)
    assert history[-1]["perplexity"] == here.history[-1]["perplexity"]
    assert user_code.locate_code("owners:model") == f"{owners}:model"
    assert os.getcwd() == str(tmp_path)
