"""Masks when clients are other machines: every owner has the file, and all must have the same."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from machines import CLIENTS, Network, job, run, same, states

from symprune.errors import SympruneError
from symprune.fed.algorithms import ALGORITHMS
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.server import serve
from symprune.fed.remote.transport import Node
from symprune.fed.simulate import simulate
from symprune.maskset import MaskSet


def save_masks(file: Path, seed: int = 0) -> torch.Tensor:
    keep = torch.rand(10, 65, generator=torch.Generator().manual_seed(seed)) < 0.4
    masks = MaskSet()
    masks["weight"] = keep
    masks.save(file)
    return keep


def masked_job(name: str, file: Path, rounds: int = 2) -> TrainingJob:
    task = job(name, rounds)
    return replace(task, problem={**task.problem, "masks": str(file)})


class OwnFiles(Network):
    """Every node has set where its own copy is."""

    def node(self, number: int) -> Node:
        folder = self.folder / f"client-{number}"
        return Node(number, folder, {"masks": str(self.folder / f"masks-{number}")})


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_letters_with_masks_give_the_bits_and_the_bytes_of_the_in_process_run(
    name: str, tmp_path: Path
) -> None:
    keep = save_masks(tmp_path / "masks")
    task = masked_job(name, tmp_path / "masks")
    there = run(task, tmp_path)
    here = simulate(task.build_algorithm(), task.whole_problem(), task.rounds, clients_at_once=1)
    assert same(there.server, here.server)
    assert same(there.ledger.state(), here.ledger.state())
    assert torch.equal(there.model, here.model) and not there.model[~keep.flatten()].any()
    asked = (there.counted >= 0).all()
    assert not asked or same(states(tmp_path, there), here.client)


def test_the_model_is_written_whole_with_its_zeros(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    keep = save_masks(tmp_path / "masks")
    task = masked_job("fedavg", tmp_path / "masks")
    run(task, tmp_path).write(tmp_path, task.whole_problem())
    weight = load_file(tmp_path / "model.safetensors")["weight"]
    assert weight.shape == (10, 65) and not weight[~keep].any() and bool(weight[keep].any())


def test_every_owner_may_keep_a_copy_of_its_own(tmp_path: Path) -> None:
    file, clients = tmp_path / "masks", tmp_path / "clients"
    save_masks(file)
    clients.mkdir()
    for number in range(CLIENTS):
        shutil.copy(file, clients / f"masks-{number}")
    task = masked_job("ef21", file)
    outcome = serve(task, OwnFiles(clients), tmp_path / "server", pause=0)
    here = simulate(task.build_algorithm(), task.whole_problem(), 2, clients_at_once=1)
    assert same(outcome.server, here.server)


def test_a_client_with_other_masks_does_not_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clients = tmp_path / "masks", tmp_path / "clients"
    save_masks(file)
    clients.mkdir()
    for number in range(CLIENTS):
        save_masks(clients / f"masks-{number}", seed=int(number == 2))
    with pytest.raises(SympruneError, match="Clients 2 did not say"):
        serve(masked_job("fedavg", file), OwnFiles(clients), tmp_path / "server", pause=0)
    assert "Client 2 has other masks than the server" in caplog.text


def test_a_server_does_not_go_on_with_other_masks(tmp_path: Path) -> None:
    file = tmp_path / "masks"
    save_masks(file)
    run(masked_job("fedavg", file), tmp_path)
    from symprune.fed.remote import job as jobs

    save_masks(file, seed=1)
    jobs._problem.cache_clear()  # as in a new process
    with pytest.raises(SympruneError, match="other masks"):
        run(masked_job("fedavg", file, rounds=3), tmp_path)


def test_a_job_names_its_masks_by_their_file() -> None:
    with pytest.raises(SympruneError, match="by their file"):
        TrainingJob("fedavg", problem={"masks": MaskSet()})
