"""A pruned language model, and adapters on it, trained between machines: by letters and on Flower
to the bits of the run in one process, zeros kept."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import Loopback
from safetensors.torch import load_file
from text_owners import OPTIONS, Owners, write_owners
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.flower import apps
from symprune.fed.problems.models import user_code
from symprune.fed.problems.models.lora import merge_lora
from symprune.fed.remote.client import answer
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.server import serve
from symprune.fed.simulate import Result, simulate
from symprune.maskset import MaskSet

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="Flower is not installed"
)
KINDS = ("masks", "masks and int8", "adapters")


class Federation:
    """Three owners, what they train together, and how that ends in one process."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder, self.file = folder, folder / "masks"
        self.code = write_owners(folder)
        user_code.allow_code(f"{self.code}:model", f"{self.code}:adapted", f"{self.code}:everyone")
        self.masks = random_masks(user_code.load_code(f"{self.code}:model", "model")())
        self.masks.save(self.file)
        self.adapts = kind == "adapters"
        self.model = "adapted" if self.adapts else "model"
        problem = {"model": f"{self.code}:{self.model}", "data": f"{self.code}:everyone"}
        problem |= {"clients": 3, "split": "user", "l2": 0.0}  # type: ignore[dict-item]
        problem |= {} if self.adapts else {"masks": str(self.file)}
        options = {**OPTIONS, **({"compressor": "int8"} if "int8" in kind else {})}
        self.job = TrainingJob("fedavg", options, problem, rounds=2)
        self.here: Result = simulate(
            self.job.build_algorithm(), self.job.whole_problem(), 2, clients_at_once=1
        )

    def owners(self, folder: Path) -> Owners:
        return Owners(self.code, folder, self.model, self.file)

    def check(self, parameters: dict[str, Tensor], history: list[dict[str, Any]]) -> None:
        """The bits and the bytes of the run in one process, and zeros where they were."""
        last = self.here.history[-1]
        assert parameters.keys() == self.here.parameters.keys()
        for name, tensor in parameters.items():
            assert torch.equal(tensor, self.here.parameters[name]), name
        for what in ("perplexity", "bytes_up", "bytes_down"):
            assert history[-1][what] == last[what]
        if self.adapts:
            assert all("lora_" in name for name in parameters)
            loss: Any = self.job.whole_problem().loss
            parameters = dict(merge_lora(loss.model, parameters).named_parameters())
        for name, keep in self.masks.items():
            assert not parameters[name][~keep].any(), name
            assert bool(parameters[name][keep].any())


def random_masks(model: Any) -> MaskSet:
    generator, masks = torch.Generator().manual_seed(5), MaskSet()
    for name, weight in model.named_parameters():
        if "_proj" in name:
            masks[name] = torch.rand(weight.shape, generator=generator) < 0.5
    return masks


@pytest.fixture(params=KINDS)
def federation(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Federation:
    if request.param == "adapters":
        pytest.importorskip("peft")
    monkeypatch.setattr(user_code, "_allowed", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Federation(request.param, tmp_path)


def test_letters_carry_a_pruned_language_model_to_the_bits_of_one_process(
    federation: Federation, tmp_path: Path
) -> None:
    nodes = federation.owners(tmp_path / "clients")
    there = serve(federation.job, nodes, tmp_path / "server", pause=0)
    assert there.ledger.totals() == {k: there.history[-1][k] for k in there.ledger.totals()}
    federation.check(there.layout.split(there.model), there.history)


@needs_flower
def test_flower_carries_a_pruned_language_model_to_the_bits_of_one_process(
    federation: Federation, tmp_path: Path
) -> None:
    settings = federation.owners(tmp_path).settings
    grid = Loopback(apps.client_app(answer), tmp_path / "nodes", 3, settings)
    config = {"job": federation.job.to_json(), "folder": str(tmp_path), "clients": 3}
    grid.run(apps.server_app(apps.train), config)
    history = json.loads((tmp_path / "server" / "history.json").read_text())["history"]
    federation.check(load_file(tmp_path / "server" / "model.safetensors"), history)


def test_an_owner_whose_base_was_pruned_otherwise_does_not_train_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its zeros would be elsewhere, and the merged model's as well."""
    pytest.importorskip("peft")
    monkeypatch.setattr(user_code, "_allowed", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    federation = Federation("adapters", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    code = write_owners(other)
    masks = MaskSet()
    for name, keep in federation.masks.items():
        masks[name] = ~keep
    masks.save(other / "masks")
    nodes = Owners(code, tmp_path / "clients", "adapted")
    monkeypatch.setattr("symprune.fed.remote.server.PATIENCE", 1)
    with pytest.raises(SympruneError, match="Clients 0, 1, 2 did not say what they hold"):
        serve(federation.job, nodes, tmp_path / "server", pause=0)
