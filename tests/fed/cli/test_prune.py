"""`symprune fed prune`: a checkpoint like that of `symprune prune`, traffic, and clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from symprune import MaskSet
from symprune.cli import main
from symprune.errors import SympruneError

SMALL = ("--nsamples", "6", "--seqlen", "32", "--eval-windows", "3")
BUILTIN = ("--calibration", "builtin", *SMALL)


def symprune(*arguments: str | Path) -> str:
    result = CliRunner().invoke(
        main.app, [str(a) for a in arguments], catch_exceptions=False, env={"COLUMNS": "160"}
    )
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "hospital.txt", tmp_path / "bank.txt"]
    files[0].write_text("the lambda expression returns a function object " * 40)
    files[1].write_text("while the condition is true the suite is executed " * 40)
    return files


def test_it_leaves_the_checkpoint_central_pruning_leaves(tiny_folder: Path, tmp_path: Path) -> None:
    shared = ("--model", tiny_folder, "--pattern", "2:4", *BUILTIN)
    symprune("prune", *shared, "--output", tmp_path / "central")
    shown = symprune("fed", "prune", *shared, "--clients", "3", "--output", tmp_path / "federated")
    assert "Traffic of 3 clients" in shown and "the weights would be" in shown
    told = " ".join(shown.split())
    assert "Half the weights gone (2:4), perplexity" in told
    assert "3 clients kept their text and exchanged" in told
    assert "% of what the weights would take." in told
    assert f"symprune report {tmp_path / 'federated'}" in told
    names = [{path.name for path in (tmp_path / d).iterdir()} for d in ("central", "federated")]
    assert names[0] == names[1]
    central, federated = (MaskSet.load(tmp_path / d) for d in ("central", "federated"))
    assert all(torch.equal(federated[name], keep) for name, keep in central.items())
    records = [
        json.loads((tmp_path / d / "symprune.json").read_text()) for d in ("central", "federated")
    ]
    del records[0]["perplexity"][0]["divergence"]  # which federated pruning does not measure
    assert records[0]["perplexity"] == records[1]["perplexity"]
    assert records[1].keys() - records[0].keys() == {"federated"}
    traffic = records[1]["federated"]["traffic"]
    assert len(traffic["blocks"]) == 2 and traffic["bytes_up"] > 0
    assert "hidden" not in json.dumps(records[1])
    assert "2:4" in symprune("inspect", tmp_path / "federated")


def test_clients_with_their_own_files_are_protected_and_measured_on_several_texts(
    tiny_folder: Path, tmp_path: Path, texts: list[Path]
) -> None:
    clients = [argument for text in texts for argument in ("--client", text)]
    measured = [argument for text in texts for argument in ("--eval-data", text)]
    shown = symprune(
        *("fed", "prune", "--model", tiny_folder, "--method", "symwanda", "--refine", "dsnot"),
        *clients, *measured, *SMALL, "--secure-sum", "--epsilon", "8", "--delta", "1e-6",
        *("--output", tmp_path / "out", "--json", tmp_path / "out.json"),
    )  # fmt: skip
    assert "(8, 1e-06)-differentially" in shown and "the server saw sums alone" in shown
    record = json.loads((tmp_path / "out.json").read_text())
    assert [entry["data"] for entry in record["perplexity"]] == ["hospital.txt", "bank.txt"]
    assert record["federated"]["clients"] == ["hospital.txt", "bank.txt"]
    assert record["federated"]["privacy"]["releases"] == 2
    written = (tmp_path / "out" / "symprune.json").read_text()
    assert str(tmp_path) not in written


def test_updated_weights_are_those_of_central_pruning(tiny_folder: Path, tmp_path: Path) -> None:
    shared = ("--model", tiny_folder, "--refine", "swap", "--update", "lsq", *BUILTIN, "--no-eval")
    symprune("prune", *shared, "--output", tmp_path / "central")
    shown = symprune("fed", "prune", *shared, "--clients", "3", "--output", tmp_path / "federated")
    assert "masks and weights down" in shown and "are Gram matrices" in shown
    assert "The server sees every client's Gram matrices" in " ".join(shown.split())
    central, federated = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("central", "federated")
    )
    assert all(torch.equal(federated[name], weight) for name, weight in central.items())
    record = json.loads((tmp_path / "federated" / "symprune.json").read_text())["federated"]
    assert record["aggregate"] == "statistics" and record["sends_weights"] is True
    assert record["forecast_per_client"]["grams"] > 0


def test_clients_that_vote_leave_a_checkpoint_that_says_so(
    tiny_folder: Path, tmp_path: Path, texts: list[Path]
) -> None:
    clients = [argument for text in texts for argument in ("--client", text)]
    shown = symprune(
        *("fed", "prune", "--model", tiny_folder, "--aggregate", "votes", *clients, *SMALL),
        *("--no-eval", "--output", tmp_path / "out"),
    )
    assert "masks up" in shown and "masks down" in shown
    record = json.loads((tmp_path / "out" / "symprune.json").read_text())
    assert record["federated"]["aggregate"] == "votes" and record["sparsity"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ((), "--client texts or a number of --clients"),
        (("--client", "builtin", "--clients", "2"), "--client texts or a number of --clients"),
        (("--clients", "0"), "at least one client"),
        (("--clients", "7", *BUILTIN), "6 samples cannot be split over 7 clients"),
        (("--client", "nowhere.txt", *SMALL), r"nowhere\.txt"),
        (("--client", "builtin", "--calibration", "c4"), "--calibration goes with --clients"),
        (("--clients", "2", "--delta", "0.1"), "--delta goes with --epsilon"),
        (("--clients", "2", "--reference", "c4"), "--reference goes with --epsilon"),
        (("--clients", "2", "--epsilon", "-1"), "epsilon must be above 0"),
        (("--clients", "2", "--epsilon", "1", "--delta", "2"), "delta must be between"),
        (("--clients", "2", "--epsilon", "1", "--clip", "0"), "clip must be above 0"),
        (("--clients", "2", "--refine", "swap", "--epsilon", "8"), "--epsilon does not go with"),
        (
            ("--clients", "2", "--aggregate", "votes", "--update", "lsq"),
            "which votes do not settle",
        ),
        (("--clients", "2", "--gram-bits", "16"), "--gram-bits goes with"),
        (("--clients", "1", "--secure-sum", *BUILTIN), "at least two clients"),
        (("--clients", "2", "--pattern", "2:4", "--sparsity", "0.5"), "not both"),
    ],
)
def test_bad_input_is_one_sentence(
    tiny_folder: Path, tmp_path: Path, arguments: tuple[str, ...], culprit: str
) -> None:
    with pytest.raises(SympruneError, match=culprit) as caught:
        symprune(
            *("fed", "prune", "--model", tiny_folder, "--output", tmp_path / "out", *arguments)
        )
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_exit_code_is_two(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "symprune", "fed", "prune", "--model", str(tiny_folder)]
    done = subprocess.run([*command, "--clients", "0"], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "at least one client" in done.stderr
