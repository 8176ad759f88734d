"""Federated pruning with clients of their own: over any transport, and on Flower."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from symprune import MaskSet, Recipe, calibration
from symprune.checkpoint.load import load_with_tokenizer
from symprune.engine.walk import prune
from symprune.errors import SympruneError
from symprune.fed.owner.policy import Policy
from symprune.fed.pruning import Privacy, remote
from symprune.fed.pruning import prune as prune_in_process
from symprune.fed.remote import metrics
from symprune.fed.remote.transport import LocalTransport, Node

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="Flower is not installed"
)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None,
    reason="Flower's simulation is not installed",
)
RECIPE = Recipe(method="ria", pattern="2:4", refine="dsnot", seqlen=32, calibration="federated")
TEXTS = ("the lambda expression returns a function object ", "while it is true it is executed ")


@pytest.fixture
def settings(tiny_folder: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """What two owners have set on their machines, and that they let plain sums out."""
    found: list[dict[str, Any]] = []
    Policy(protection="plain").save(tmp_path / "policy.yaml")
    for number, text in enumerate(TEXTS):
        file = tmp_path / f"{number}.txt"
        file.write_text(text * 60)
        own = {"model": str(tiny_folder), "text": str(file), "nsamples": 3 + number, "seqlen": 32}
        policy = str(tmp_path / "policy.yaml")
        found.append({**own, "seed": number, "policy": policy, "allow_few_tokens": True})
    return found


@pytest.fixture
def central(tiny_folder: Path, settings: list[dict[str, Any]]) -> MaskSet:
    """The masks of one machine that has all the tokens."""
    model, tokenizer = load_with_tokenizer(str(tiny_folder), device="cpu")
    tokens = [
        calibration.calibration_tokens(s["text"], tokenizer, s["nsamples"], 32, s["seed"])
        for s in settings
    ]
    return prune(model, torch.cat(tokens), RECIPE).masks


def assert_same(folder: Path, central: MaskSet) -> None:
    found = MaskSet.load(folder / "model")
    assert len(found) == len(central)
    assert all(torch.equal(found[name], keep) for name, keep in central.items())


class Owners(LocalTransport):
    """Clients in this process, each with its owner's settings."""

    def __init__(self, settings: list[dict[str, Any]], folder: Path) -> None:
        super().__init__(remote.answer, len(settings), folder)
        self.settings = settings

    def node(self, number: int) -> Node:
        return replace(super().node(number), config=self.settings[number])


@pytest.mark.parametrize("secure", [False, True])
def test_clients_that_start_anew_for_every_message_give_the_central_masks(
    tiny_folder: Path, tmp_path: Path, settings: Any, central: MaskSet, secure: bool
) -> None:
    task = remote.Task(str(tiny_folder), RECIPE, 2, secure)
    result = remote.serve(task, Owners(settings, tmp_path), tmp_path / "server")
    assert_same(tmp_path / "server", central)
    record = json.loads((tmp_path / "server" / "model" / "symprune.json").read_text())
    assert record["federated"]["traffic"] == result.traffic.to_dict()
    assert record["federated"]["secure_sum"] is secure
    assert not (tmp_path / "server" / remote.STATE).exists()
    figures = json.loads((tmp_path / "server" / metrics.LINES).read_text().splitlines()[-1])
    assert (figures["block"], figures["blocks"], figures["clients"]) == (2, 2, 2)
    assert figures["clients_left_out"] == 0 and figures["sparsity"] == 0.5
    assert 0 < figures["bytes_up"] <= result.traffic.to_dict()["bytes_up"]
    said = (tmp_path / "server" / metrics.TEXT).read_text()
    assert f'symprune_fed_sparsity{{run="{figures["run"]}"}} 0.5' in said.splitlines()


UPDATE = RECIPE.with_changes(refine="swap", update="lsq")


def assert_same_weights(folder: Path, tiny_folder: Path, settings: Any) -> None:
    """As if one machine had all the tokens."""
    model, tokenizer = load_with_tokenizer(str(tiny_folder), device="cpu")
    tokens = [
        calibration.calibration_tokens(s["text"], tokenizer, s["nsamples"], 32, s["seed"])
        for s in settings
    ]
    prune(model, torch.cat(tokens), UPDATE)
    found, _ = load_with_tokenizer(str(folder / "model"), device="cpu")
    pairs = zip(found.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_updated_weights_are_the_central_ones_and_a_killed_server_goes_on(
    tiny_folder: Path, tmp_path: Path, settings: Any
) -> None:
    class Killed(Exception):
        pass

    class Mortal(Owners):
        letters = 0

        def exchange(self, letters: Mapping[int, bytes]) -> dict[int, bytes]:
            self.letters += 1
            if self.letters == 4:
                raise Killed
            return super().exchange(letters)

    for own in settings:
        own["gram"] = True
    task, server = remote.Task(str(tiny_folder), UPDATE, 2), tmp_path / "server"
    with pytest.raises(Killed):
        remote.serve(task, Mortal(settings, tmp_path), server)
    assert task.steps_done(server) == 1
    remote.serve(task, Owners(settings, tmp_path), server)
    assert_same_weights(server, tiny_folder, settings)
    assert {path.name for path in server.iterdir()} == {"model", metrics.LINES, metrics.TEXT}
    lines = [json.loads(line) for line in (server / metrics.LINES).read_text().splitlines()]
    assert [line["block"] for line in lines] == [1, 2] and len({line["run"] for line in lines}) == 1


def test_an_owner_who_has_not_allowed_gram_matrices_sends_none(
    tiny_folder: Path, tmp_path: Path, settings: Any
) -> None:
    task = remote.Task(str(tiny_folder), UPDATE, 2)
    with pytest.raises(SympruneError, match="its owner has not set gram"):
        remote.serve(task, Owners(settings, tmp_path), tmp_path / "server")


@pytest.mark.parametrize("aggregate", ["votes", "average"])
def test_nodes_that_prune_alone_give_what_they_give_in_one_process(
    tiny_folder: Path, tmp_path: Path, settings: Any, aggregate: str
) -> None:
    task = remote.Task(str(tiny_folder), RECIPE, 2, aggregate=aggregate)
    remote.serve(task, Owners(settings, tmp_path), tmp_path / "server")
    model, tokenizer = load_with_tokenizer(str(tiny_folder), device="cpu")
    tokens = [
        calibration.calibration_tokens(s["text"], tokenizer, s["nsamples"], 32, s["seed"])
        for s in settings
    ]
    expected = prune_in_process(model, tokens, RECIPE, aggregate=aggregate)
    assert_same(tmp_path / "server", expected.report.masks)


def test_a_task_survives_its_way_as_json(tiny_folder: Path) -> None:
    for privacy in (None, Privacy(4.0, 1e-6)):
        how = {} if privacy else {"aggregate": "votes"}
        task = remote.Task(str(tiny_folder), RECIPE, 2, True, privacy, **how)
        assert remote.Task.from_json(task.to_json()) == task
    with pytest.raises(SympruneError, match="no pruning task"):
        remote.Task.from_json("{}")


def test_a_node_reads_what_its_owner_named_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match="does not name its text"):
        remote.answer(b"", Node(0, tmp_path, {"model": "m"}))


def test_the_server_waits_for_nodes_that_take_a_while_to_connect(
    tiny_folder: Path, tmp_path: Path, settings: Any, central: MaskSet
) -> None:
    """Or a server that goes on after a crash would leave out those who are not back yet."""

    class Late(Owners):
        looks = 0

        def connected(self) -> set[int]:
            self.looks += 1
            return {0, 1} if self.looks > 2 else {0}

        def exchange(self, letters: Mapping[int, bytes]) -> dict[int, bytes]:
            assert self.looks == 3
            return super().exchange(letters)

    task = remote.Task(str(tiny_folder), RECIPE, 2)
    remote.serve(task, Late(settings, tmp_path), tmp_path / "server", pause=0)
    assert_same(tmp_path / "server", central)


@needs_flower
def test_a_pruned_folder_is_not_taken_for_another_run(
    tiny_folder: Path, tmp_path: Path, settings: Any
) -> None:
    from symprune.fed.flower.deploy import Deployment

    def deployment(pattern: str) -> Deployment:
        task = remote.Task(str(tiny_folder), RECIPE.with_changes(pattern=pattern), 2)
        return Deployment(tmp_path / "fed", task, settings=tuple(settings))

    first = deployment("2:4")
    first.prepare()
    assert not first.over()
    first.result.parent.mkdir()
    first.result.write_text("{}")
    assert deployment("2:4").over()
    with pytest.raises(SympruneError, match="holds another run"):
        deployment("4:8").over()


@needs_flower
@pytest.mark.parametrize("option", ["--output=o", "--force", "--dtype=float16", "--eval-windows=3"])
def test_options_that_a_deployment_would_ignore_are_refused(
    tiny_folder: Path, tmp_path: Path, option: str
) -> None:
    from typer.testing import CliRunner

    from symprune.cli import main

    arguments = ["fed", "prune", "--model", str(tiny_folder), "--client", "builtin", option]
    done = CliRunner().invoke(main.app, [*arguments, "--deploy", str(tmp_path / "fed")])
    assert isinstance(done.exception, SympruneError)
    assert f"{option.split('=')[0]} does not go with --deploy" in str(done.exception)


def test_an_owner_who_insists_on_masked_sums_is_left_out_of_plain_ones(
    tiny_folder: Path, tmp_path: Path, settings: Any
) -> None:
    settings[0]["secure"] = True
    task = remote.Task(str(tiny_folder), RECIPE, 2)
    with pytest.raises(SympruneError, match="insists on masked summation"):
        remote.serve(task, Owners(settings, tmp_path), tmp_path / "server")


@needs_flower
def test_on_flowers_grid_the_masks_are_the_central_ones(
    tiny_folder: Path, tmp_path: Path, settings: Any, central: MaskSet
) -> None:
    from loopback import Loopback

    from symprune.fed.flower import apps

    grid: Any = Loopback(apps.client_app(remote.answer), tmp_path, 2, settings)
    task = remote.Task(str(tiny_folder), RECIPE, 2)
    config = {"folder": str(tmp_path), "job": task.to_json(), "clients": 2}
    grid.run(apps.server_app(apps.prune), config)
    assert_same(tmp_path / "server", central)


@needs_flower
def test_on_flowers_grid_updated_weights_are_the_central_ones(
    tiny_folder: Path, tmp_path: Path, settings: Any
) -> None:
    from loopback import Loopback

    from symprune.fed.flower import apps

    for own in settings:
        own["gram"] = True
    grid: Any = Loopback(apps.client_app(remote.answer), tmp_path, 2, settings)
    task = remote.Task(str(tiny_folder), UPDATE, 2)
    config = {"folder": str(tmp_path), "job": task.to_json(), "clients": 2}
    grid.run(apps.server_app(apps.prune), config)
    assert_same_weights(tmp_path / "server", tiny_folder, settings)


@needs_ray
@pytest.mark.slow
def test_in_flowers_simulation_the_masks_are_the_central_ones(
    tiny_folder: Path, tmp_path: Path, settings: Any, central: MaskSet
) -> None:
    code = """
import json, sys
from pathlib import Path
from symprune.fed.flower import prune_simulation
from symprune.fed.pruning.remote import Task
prune_simulation(Task.from_json(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
"""
    task = remote.Task(str(tiny_folder), RECIPE, 2).to_json()
    run = [sys.executable, "-c", code, task, json.dumps(settings), str(tmp_path)]
    subprocess.run(run, check=True, timeout=900)
    assert_same(tmp_path / "server", central)


@needs_flower
@pytest.mark.slow
def test_in_a_deployment_the_masks_are_the_central_ones(tiny_folder: Path, tmp_path: Path) -> None:
    """SuperLink and two SuperNodes with TLS and keys, from the command line."""
    arguments = ["--model", str(tiny_folder), "--pattern", "2:4", "--refine", "dsnot"]
    arguments += ["--nsamples", "4", "--seqlen", "32", "--secure-sum"]
    for number, text in enumerate(TEXTS):
        file = tmp_path / f"{number}.txt"
        file.write_text(text * 60)
        arguments += ["--client", str(file)]
    command = [sys.executable, "-m", "symprune", "fed", "prune", *arguments]
    subprocess.run([*command, "--deploy", str(tmp_path / "fed")], check=True, timeout=900)
    subprocess.run([*command, "--no-eval", "-o", str(tmp_path / "here")], check=True, timeout=300)
    assert_same(tmp_path / "fed" / "server", MaskSet.load(tmp_path / "here"))


def test_nodes_with_keys_take_no_others_into_their_sums(
    tiny_folder: Path, tmp_path: Path, settings: Any, central: MaskSet
) -> None:
    pytest.importorskip("cryptography")
    from symprune.fed.flower.keys import make_keys

    make_keys(tmp_path / "keys", ("127.0.0.1",), 2)
    for number, own in enumerate(settings):
        own |= {"secure": True, "peers": str(tmp_path / "keys")}
        own["node_key"] = str(tmp_path / "keys" / f"node-{number}.key")
    task = remote.Task(str(tiny_folder), RECIPE, 2, True)
    remote.serve(task, Owners(settings, tmp_path / "a"), tmp_path / "server")
    assert_same(tmp_path / "server", central)
    (tmp_path / "keys" / "node-1.pub").unlink()
    with pytest.raises(SympruneError, match="is not one of the nodes whose keys the owner"):
        remote.serve(task, Owners(settings, tmp_path / "b"), tmp_path / "other")
