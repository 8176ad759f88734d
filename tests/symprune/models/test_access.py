"""Versions, tokens and code that comes with a model: as in transformers, off unless asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import huggingface_hub
import pytest
import torch
import transformers as hf
from stopping import stop_at
from typer.testing import CliRunner

from symprune.checkpoint.load import local_folder
from symprune.cli import main
from symprune.errors import SympruneError
from symprune.fed.pruning import remote
from symprune.fed.pruning.job import PruningJob
from symprune.jobs import pruning
from symprune.models import hub
from symprune.recipe import Recipe

SMALL = [
    "--calibration",
    "builtin",
    "--nsamples",
    "2",
    "--seqlen",
    "16",
    "--eval-windows",
    "2",
    "--no-samples",
]
SECRET = "hf_secret_token_that_nobody_may_read"
OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def symprune(arguments: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which looks for the hub's files below `home` only."""
    command = [sys.executable, "-m", "symprune", *arguments]
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=home
    )


def put_on_hub(home: Path, commit: str, name: str, seed: int) -> Path:
    """A version of someone/tiny as if it had been fetched from the hub."""
    root = home / "hub" / "models--someone--tiny"
    folder = root / "snapshots" / commit
    families.model("llama", seed).save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / name).write_text(commit)
    return folder


def test_a_revision_is_loaded_and_recorded_and_a_token_is_not(tmp_path: Path) -> None:
    put_on_hub(tmp_path, "1" * 40, "main", seed=0)
    old = put_on_hub(tmp_path, "2" * 40, "v1", seed=1)
    prune = ["prune", "--model", "someone/tiny", "--revision", "v1", "--token", SECRET]
    done = symprune([*prune, *SMALL, "--output", "out"], tmp_path)
    assert done.returncode == 0, done.stderr
    dense = hf.AutoModelForCausalLM.from_pretrained(old).state_dict()
    pruned = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(v, dense[n]) for n, v in pruned.items() if "layers" not in n)
    record = json.loads((tmp_path / "out" / "symprune.json").read_text())
    assert record["revision"] == "2" * 40
    written = [path for path in (tmp_path / "out").iterdir() if path.suffix == ".json"]
    assert all(SECRET not in path.read_text() for path in written)
    assert SECRET not in done.stdout + done.stderr


def test_a_run_of_another_revision_is_not_gone_on_with(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(calibration=__file__, nsamples=2, seqlen=16)
    job = pruning.Job(str(tiny_folder), recipe, tmp_path / "out", evaluate=False)

    monkeypatch.setattr(hub, "version_of", lambda _: "c0ffee")
    with pytest.raises(KeyboardInterrupt):
        pruning.prune(job, show=stop_at(2))
    monkeypatch.setattr(hub, "version_of", lambda _: "decade")
    with pytest.raises(SympruneError, match=r"differs in revision \(c0ffee, now decade\)"):
        pruning.prune(job)


def test_what_is_given_reaches_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    def fetched(_: str, **options: Any) -> str:
        told.append(options)
        raise ConnectionError

    for place in (hf.AutoConfig, hf.AutoTokenizer):
        monkeypatch.setattr(place, "from_pretrained", fetched)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    origin = hub.resolve("someone/tiny", hub.Access("v1", SECRET, True))
    for load in (hub.load_config, hub.load_tokenizer, local_folder):
        with pytest.raises(SympruneError):
            load(origin)
    asked = {"revision": "v1", "token": SECRET}
    assert all(options.items() >= asked.items() for options in told) and len(told) == 3
    assert [options.get("trust_remote_code") for options in told] == [True, True, None]
    assert "*.py" in told[2]["allow_patterns"]


def test_a_token_is_in_no_text_made_of_a_job(tiny_folder: Path) -> None:
    access = hub.Access(token=SECRET)
    assert SECRET not in repr(pruning.Job(str(tiny_folder), Recipe(), access=access))
    assert SECRET not in repr(hub.resolve(str(tiny_folder), access))
    job = PruningJob(str(tiny_folder), Recipe(), texts=("builtin",), access=access)
    with pytest.raises(SympruneError, match=r"--token does not go with --deploy.*hf auth login"):
        remote.of_job(job)


def test_a_federation_hands_version_and_trust_to_server_and_nodes(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hub.load_config(hub.resolve(str(tiny_folder)))
    monkeypatch.setattr(hub, "load_config", lambda _: config)
    access = hub.Access("v1", trust_remote_code=True)
    job = PruningJob("someone/tiny", Recipe(), texts=("builtin",), access=access)
    task, (settings,) = remote.of_job(job)
    assert remote.Task.from_json(task.to_json()) == task
    for found in (task, remote.NodeSettings.of(settings)):
        assert found.revision == "v1" and found.trust_remote_code  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["prune", "eval", "fed prune --clients 2"])
def test_a_revision_of_what_is_on_this_machine_is_refused(command: str, tiny_folder: Path) -> None:
    arguments = [*command.split(), "--model", str(tiny_folder), "--revision", "v1"]
    result = CliRunner().invoke(main.app, arguments)
    assert isinstance(result.exception, SympruneError)
    assert "--revision names a version on the hub" in str(result.exception)


def test_code_that_comes_with_a_model_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    families.model("llama").save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    places = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": places}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE)
    prune = ["prune", "--model", "./own", *SMALL, "--output", "out"]
    refused = symprune(prune, tmp_path)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "own comes with code of its own; pass --trust-remote-code" in refused.stderr
    done = symprune([*prune, "--trust-remote-code"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "own.py").read_text() == OWN_CODE
    shown = symprune(["inspect", "out", "--trust-remote-code"], tmp_path)
    assert shown.returncode == 0 and "50.00 %" in shown.stdout
