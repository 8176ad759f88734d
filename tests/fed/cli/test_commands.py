"""The command line: runs, lists, compares, resumes, and says what is wrong in one sentence."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from symprune.errors import SympruneError
from symprune.fed.algorithms import ALGORITHMS, options_of
from symprune.fed.cli import main
from symprune.fed.cli.deploy import bill_table
from symprune.fed.cli.main import app
from symprune.fed.compare.plan import read_plan
from symprune.fed.remote.job import TrainingJob
from symprune.fed.simulate import Pace
from symprune.jobs.estimate.forecast import Forecast
from symprune.machine import durable
from symprune.maskset import MaskSet

runner = CliRunner()


def invoke(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_an_owner_makes_a_key_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    said = invoke("node-key", str(tmp_path / "node-0.key"))
    assert "stays here" in said and (tmp_path / "node-0.pub").exists()
    with pytest.raises(SympruneError, match="exists and is left as it is"):
        invoke("node-key", str(tmp_path / "node-0.key"))
    with pytest.raises(SympruneError, match="is to hold a private key"):
        invoke("node-key", str(tmp_path / "other.pub"))


RUN = ("run", "--algorithm", "sparse-proxskip", "--data", "digits", "--set", "gamma=0.3")


def test_a_run_says_first_what_it_takes(tmp_path: Path) -> None:
    said = invoke(*RUN, "--rounds", "7")
    assert said.index("Takes about") < said.index("rounds: 7 of 7")
    assert "clients), 7 rounds, on cpu (as asked for)" in " ".join(said.split())


def test_a_dry_run_of_a_run_does_three_turns_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Forecast] = []
    monkeypatch.setattr(main, "show_forecast", lambda found, _: told.append(found))
    checkpoint = tmp_path / "state"
    invoke(*RUN, "--rounds", "5000", "--evaluate-every", "10", "--dry-run",
           "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out"))  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    (found,) = told
    assert set(found.seconds) == {"rounds", "evaluations"} and min(found.seconds.values()) > 0
    assert found.disk > 10 * 64 * 4 and found.memory >= found.held > 0


def test_a_comparison_is_foreseen_from_the_turns_of_each_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.yaml").write_text(
        "problem: {data: digits, clients: 4}\nrounds: 50\nseeds: [0, 1]\nalgorithms:\n"
        "  - fedavg\n  - {algorithm: fedavg, label: tuned, tune: {gamma: [0.05, 0.1, 0.2]}}\n"
    )
    told: list[Forecast] = []
    monkeypatch.setattr(main, "show_forecast", lambda found, _: told.append(found))
    paced = Pace(turn=2.0, evaluation=0.5, turns=0, evaluations=0)
    monkeypatch.setattr("symprune.fed.cli.forecast._time", lambda *_: paced)
    out = tmp_path / "out"
    invoke("compare", str(tmp_path / "plan.yaml"), "--output", str(out), "--dry-run")
    assert not out.exists()
    seconds = told[0].seconds
    assert seconds == {"fedavg": 2 * 50 * 2.5, "tuned": (2 + 3) * 50 * 2.5}


def test_a_run_prints_a_table_and_writes_history_and_model(tmp_path: Path) -> None:
    text = invoke(
        *("run", "--algorithm", "sparse-proxskip", "--data", "digits", "--clients", "10"),
        *("--sparsity", "0.9", "--rounds", "5", "--set", "gamma=0.3", "--set", "p=0.2"),
        *("--split", "class:2", "--output", str(tmp_path), "--quiet"),
    )
    assert "accuracy" in text and "bytes up" in text
    content = json.loads((tmp_path / "history.json").read_text())
    history, bill = content["history"], content["bill"]
    assert [record["round"] for record in history] == [0, 1, 2, 3, 4, 5]
    assert "per client and round" in text and (tmp_path / "bill.png").stat().st_size > 5000
    assert bill["up"]["total"] == history[-1]["bytes_up"] == 5 * bill["up"]["per round"]
    weight = load_file(tmp_path / "model.safetensors")["weight"]
    assert weight.shape == (10, 65) and int((weight != 0).sum()) == 65


def test_the_bill_of_a_language_model_is_whole_on_a_narrow_screen() -> None:
    sent = {"total": 3_212_336_649_123, "per client and round": 212_336_649.4}
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(bill_table({"up": sent, "down": sent}))
    lines = narrow.export_text().splitlines()
    assert any(line.count("3,212,336,649,123") == 2 for line in lines)
    assert any(line.count("212,336,649 ") == 2 and "client and round" in line for line in lines)


def test_a_run_that_is_not_evaluated_ends_with_its_bill(tmp_path: Path) -> None:
    command = ("run", "--algorithm", "gd", "--rounds", "2", "--clients", "2", "--quiet")
    text = invoke(*command, "--evaluate-every", "0", "--output", str(tmp_path))
    assert "per client and round" in text and "loss" not in text
    history = json.loads((tmp_path / "history.json").read_text())["history"]
    assert [record["round"] for record in history] == [0, 2]


def test_a_run_with_masks_writes_a_model_with_their_zeros(tmp_path: Path) -> None:
    masks = MaskSet()
    masks["weight"] = torch.rand(10, 65, generator=torch.Generator().manual_seed(0)) < 0.3
    masks.save(tmp_path / "masks.safetensors")
    command = ("run", "--algorithm", "fedavg", "--rounds", "2", "--clients", "2", "--quiet")
    invoke(*command, "--masks", str(tmp_path), "--output", str(tmp_path / "o"))
    weight = load_file(tmp_path / "o" / "model.safetensors")["weight"]
    assert torch.equal(weight != 0, masks["weight"] & (weight != 0)) and bool(weight.any())
    with pytest.raises(SympruneError, match="There are no masks at nowhere"):
        invoke(*command, "--masks", "nowhere")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gap_is_that_to_the_central_optimum_whatever_a_run_computes_in(
    dtype: str, tmp_path: Path
) -> None:
    command = ("run", "--algorithm", "gd", "--data", "breast-cancer", "--clients", "2", "--quiet")
    options = ("--l2", "0.1", "--rounds", "60", "--dtype", dtype, "--gap")
    invoke(*command, *options, "--output", str(tmp_path))
    history = json.loads((tmp_path / "history.json").read_text())["history"]
    assert history[0]["gap"] > 0.1 and abs(history[-1]["gap"]) < 1e-2 * history[0]["gap"]
    assert history[-1]["distance"] < 0.2 * history[0]["distance"]


def test_exempt_parameters_are_not_in_the_model_that_is_trained_and_sent(tmp_path: Path) -> None:
    command = ("run", "--algorithm", "fedavg", "--model", "mlp:8", "--clients", "2", "--quiet")
    gamma = ("--set", "gamma=0.1", "--set", "p=1", "--rounds", "2", "--evaluate-every", "0")
    invoke(*command, *gamma, "--exempt", "*.bias", "--output", str(tmp_path))
    trained = load_file(tmp_path / "model.safetensors")
    assert sorted(trained) == ["1.weight", "3.weight"]
    bill = json.loads((tmp_path / "history.json").read_text())["bill"]
    values = 4 * sum(tensor.numel() for tensor in trained.values())
    assert values < bill["up"]["per client and round"] < values + 20
    for model, culprit in (("mlp:8", r"called '\*norm\*'"), ("softmax", "softmax is one tensor")):
        with pytest.raises(SympruneError, match=culprit):
            invoke(*command[:3], "--model", model, *gamma, "--exempt", "*norm*")


def test_a_plan_and_a_job_may_exempt_parameters_and_a_wrong_list_is_named(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    entry = "algorithms: [{algorithm: fedavg, gamma: 0.1, p: 1}]"
    problem = "data: digits, model: 'mlp:8', clients: 2"
    file.write_text(f"problem: {{{problem}, exempt: ['*.bias']}}\nrounds: 1\n{entry}\n")
    invoke("compare", str(file), "--output", str(tmp_path / "o"))
    history = json.loads((tmp_path / "o" / "histories.json").read_text())["fedavg"][0]
    assert history[-1]["paper_bits_up"] == 32 * (64 * 8 + 8 * 10)
    job = TrainingJob("fedavg", problem={"model": "mlp:8", "clients": 2, "exempt": ["*.bias"]})
    assert job.client_problem(1).dimension == 64 * 8 + 8 * 10
    for wrong in ("*.bias", [3], {"a": 1}):
        with pytest.raises(SympruneError, match="exempt is a list of patterns"):
            replace(job, problem={**job.problem, "exempt": wrong}).whole_problem()


def test_a_plan_may_have_masks(tmp_path: Path) -> None:
    masks = MaskSet()
    masks["weight"] = torch.rand(10, 65, generator=torch.Generator().manual_seed(0)) < 0.3
    masks.save(tmp_path / "masks.safetensors")
    file = tmp_path / "plan.yaml"
    problem = f"problem: {{data: digits, clients: 2, masks: {tmp_path / 'masks.safetensors'}}}"
    file.write_text(f"{problem}\nrounds: 2\nalgorithms: [fedavg]\n")
    invoke("compare", str(file), "--output", str(tmp_path / "o"))
    history = json.loads((tmp_path / "o" / "histories.json").read_text())["fedavg"][0]
    assert history[-1]["paper_bits_up"] == 2 * 32 * int(masks["weight"].sum())


def test_a_full_disk_names_the_folder_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "write_text", fill)
    command = ("run", "--algorithm", "gd", "--rounds", "1", "--clients", "2", "--quiet")
    with pytest.raises(SympruneError, match=rf"The disk is full: {tmp_path} was not written"):
        invoke(*command, "--output", str(tmp_path))


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def history(*arguments: str) -> list[object]:
        invoke("run", "--algorithm", "fedavg", "--output", str(tmp_path / "o"), *arguments)
        return json.loads((tmp_path / "o" / "history.json").read_text())["history"]

    file = str(tmp_path / "run.safetensors")
    history("--rounds", "2", "--checkpoint", file)
    assert history("--rounds", "4", "--checkpoint", file) == history("--rounds", "4", "--quiet")


@pytest.fixture(scope="module")
def listed() -> str:
    """What `fed list` prints, in one line per algorithm."""
    result = runner.invoke(app, ["list", "--all"], env={"COLUMNS": "1500"})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_list_has_every_algorithm_with_its_paper_and_what_it_sends(
    name: str, listed: str
) -> None:
    cls = ALGORITHMS[name]
    assert f" {name} " in listed
    assert cls.paper in listed and cls.sends in listed
    options = ", ".join(options_of(cls))
    assert options in listed


def test_the_list_offers_only_what_a_user_can_choose(listed: str) -> None:
    words = {word.strip(",│ ") for word in listed.split()}
    assert not words & {"shapes", "names", "layer_sizes", "layer_ones", "mu"}
    assert {"sparsity", "compressor", "mask_score", "cohort_size", "gamma"} <= words


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_runs_from_the_command_line_and_resumes(name: str, tmp_path: Path) -> None:
    def run(rounds: int, *more: str) -> list[dict[str, float]]:
        invoke(
            *("run", "--algorithm", name, "--split", "class:2", "--clients", "4", "--quiet"),
            *("--rounds", str(rounds), "--l2", "0.1", "--output", str(tmp_path), *more),
        )
        return json.loads((tmp_path / "history.json").read_text())["history"]

    file = str(tmp_path / "run.safetensors")
    run(1, "--checkpoint", file)
    history = run(2, "--checkpoint", file)
    assert history == run(2)
    assert [record["round"] for record in history] == [0, 1, 2]
    assert "accuracy" in history[-1] and "bytes_up" in history[-1]


def test_a_comparison_tunes_tabulates_and_plots(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(
        """
problem: {data: digits, split: "class:2", clients: 5}
rounds: 6
seeds: [0, 1]
targets: [0.3]
algorithms:
  - {algorithm: sparse-proxskip, sparsity: 0.9, p: 0.2, tune: {gamma: [0.3, 0.03]}}
  - {algorithm: fedavg, label: averaging, gamma: 0.1}
"""
    )
    text = invoke("compare", str(file), "--output", str(tmp_path / "out"))
    assert "averaging" in text and "kB up to 0.3" in text
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert rows[0]["options"]["gamma"] in (0.3, 0.03)
    assert rows[0]["kB up a round"] < rows[1]["kB up a round"]
    for picture in ("accuracy-against-bytes.png", "bill.png"):
        assert (tmp_path / "out" / picture).stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (("--algorithm", "fedmagic"), "fedmagic"),
        (("--algorithm", "gd", "--data", "imagenet"), "imagenet"),
        (("--algorithm", "gd", "--clients", "5000"), "5000 clients"),
        (("--algorithm", "gd", "--sparsity", "0.9"), "sparsity"),
        (("--algorithm", "gd", "--set", "gamma"), "NAME=VALUE"),
        (("--algorithm", "gd", "--set", "gamma=fast"), "gamma of gd cannot be"),
        (("--algorithm", "gd", "--set", "gamma=1e35", "--quiet"), "smaller step"),
        (("--algorithm", "ef-bv", "--compressor", "top-k:9999"), "k = 9999"),
        (("--algorithm", "fedspa", "--set", "layer_ones=[1, 2]"), "layer_ones from the problem"),
        (("--algorithm", "gd", "--model", "mlp"), "gd needs gamma"),
        (("--algorithm", "scafflix", "--set", "alpha=[0.1, 0.2]"), "2 values of alpha for 10"),
        (("--algorithm", "flix-gd", "--set", "alpha=[0.1, 0.2]"), "2 values of alpha for 10"),
        (("--algorithm", "gd", "--output", "/dev/null/x"), "/dev/null/x cannot be made"),
        (("--algorithm", "gd", "--seed", "-1"), "A seed is from 0"),
        (("--algorithm", "gd", "--seed", "99999999999999999999"), "A seed is from 0"),
        (("--algorithm", "gd", "--rounds", "0"), "rounds must be above 0"),
        (("--algorithm", "gd", "--l2", "-1"), "l2 must be 0 or more"),
        (("--algorithm", "gd", "--l2", "nan"), "l2 must be 0 or more"),
        (("--algorithm", "gd", "--clients-at-once", "0"), "clients_at_once must be above 0"),
        (("--algorithm", "gd", "--split", "class:99"), "10 classes, not 99"),
        (("--algorithm", "gd", "--data", "digits:nowhere"), "takes no 'nowhere'"),
        (("--algorithm", "gd", "--data", "libsvm:/dev/zero"), "neither a file nor a folder"),
        (("--algorithm", "gd", "--split", "blocks:99"), "10 blocks, not 99"),
        (("--algorithm", "gd", "--split", "dirichlet:inf"), "needs a positive argument"),
        (("--algorithm", "gd", "--set", "gamma=.nan"), "gamma of gd cannot be nan"),
        (("--algorithm", "fedavg", "--set", "batch=0"), "batch = 0 must be positive"),
        (("--algorithm", "fedavg", "--set", "clip=-1"), "clip = -1.0 must be positive"),
        (("--algorithm", "gd", "--rounds", "1", "--checkpoint", "/dev/null/x"), "be written"),
    ],
)
def test_bad_input_is_one_sentence_that_names_the_culprit(
    arguments: tuple[str, ...], culprit: str
) -> None:
    with pytest.raises(SympruneError, match=culprit) as caught:
        invoke("run", *arguments)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (("--port", "99999999"), "Port 99999999 is not between"),
        (("--port", "0"), "Port 0 is not between"),
        (("--node-port", "65535"), "Port 65536 is not between"),
        (("--timeout", "-5"), "timeout must be above 0"),
        (("--clients", "-1"), "1 to 16,384 clients that are machines, not -1"),
        (("--clients", "0"), "1 to 16,384 clients that are machines, not 0"),
        (("--seed", "-1"), "A seed is from 0"),
        (("--l2", "-1"), "l2 must be 0 or more"),
        (("--folder", "file"), "is a file, not a folder"),
        (("--folder", "."), "holds files that are no deployment's"),
        (("--data", "nope"), "Unknown data set 'nope'"),
        (("--split", "nope"), "Unknown partition 'nope'"),
        (("--model", "nope"), "Unknown model 'nope'"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(
    arguments: tuple[str, ...], culprit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("precious")
    command = ("deploy", "--algorithm", "fedavg", "--folder", "new", "--only-prepare")
    with pytest.raises(SympruneError, match=culprit):
        invoke(*command, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_results_do_not_take_the_place_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("precious")
    with pytest.raises(SympruneError, match=r"has a model\.safetensors that is no result"):
        invoke("run", "--algorithm", "gd", "--output", str(tmp_path))
    assert (tmp_path / "model.safetensors").read_text() == "precious"


def test_ports_go_with_a_deployment(tmp_path: Path) -> None:
    for option in ("--port", "--node-port", "--timeout"):
        with pytest.raises(SympruneError, match=f"{option} goes with --deploy"):
            invoke("prune", "--model", str(tmp_path), "--clients", "2", option, "5")


def test_a_comparison_is_read_from_a_file_only() -> None:
    with pytest.raises(SympruneError, match="The plan /dev/zero is not a file"):
        read_plan(Path("/dev/zero"))


def test_a_comparison_file_with_a_mistake_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    for text, culprit in (
        ("rounds: 3", "no list of algorithms"),
        ("algorithms: [gd]\nturns: 3", "turns"),
        ("algorithms: [{label: x}]", "without an algorithm"),
        ("algorithms: [gd]\nproblem: {colour: red}", "colour"),
        ("algorithms: [{algorithm: gd, speed: 1}]", "speed"),
        ("algorithms: gd", "no list of algorithms"),
        ("algorithms: [3]", "without an algorithm: 3"),
        ("algorithms: [gd]\nrounds: many", "rounds = 'many'"),
        ("algorithms: [gd]\nseeds: 3", "seeds = 3"),
        ("algorithms: [gd]\nproblem: [digits]", "problem is no list of settings"),
        ("algorithms: [{algorithm: gd, tune: {gamma: 0.3}}]", "tune = "),
        (
            "algorithms: [{algorithm: gd, tune: {gamma: [0.3, fast]}}]",
            "gamma of gd cannot be",
        ),
        ("algorithms: [{algorithm: fedspa, layer_ones: [2]}]", "layer_ones from the problem"),
        ("algorithms: [{algorithm: fedp3, layout: 3}]", "layout from the problem"),
        ("algorithms: " + "[" * 50_000, "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(SympruneError, match=culprit):
            invoke("compare", str(file))


def test_a_number_in_a_comparison_file_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("algorithms: [{algorithm: gd, tune: {gamma: [1e-3, 2]}}]\nproblem: {l2: 1e-2}")
    plan = read_plan(file)
    assert plan.entries[0].tune == {"gamma": [0.001, 2]} and plan.problem == {"l2": 0.01}


def test_importing_the_package_brings_in_nothing_heavy() -> None:
    heavy = "{'flwr', 'transformers', 'matplotlib', 'sklearn', 'datasets'}"
    code = f"import sys, symprune.fed; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
