"""Said, not silent: data, options and runs that cannot be meant are named in one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from symprune.errors import Diverged, SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.baselines.fedavg import FedAvg
from symprune.fed.cli.main import app
from symprune.fed.problems.losses import Linear, Logistic, Module, Softmax
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.simulate import check_not_diverged, ended_above_start, simulate

runner = CliRunner()


def rows(
    labels: Callable[[int], float], value: float = 1.0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    out = []
    for client in range(3):
        x = torch.randn(4 + client, 2, generator=generator)
        x[-1, -1] = value if client == 1 else 1.0
        out.append((x, torch.tensor([labels(i) for i in range(len(x))])))
    return out


@pytest.mark.parametrize(
    ("loss", "labels", "sentence"),
    [
        (Logistic(2), lambda i: i % 2, r"labels of client 0 are 0 and 1; logistic.* -1 and \+1"),
        (Logistic(2), lambda i: 2.0, r"label 2 of client 0 is none of -1 and \+1"),
        (Softmax(2, 3), lambda i: float(i), r"label 3 of client 0 is none of 0, 1, \.\.\. 2"),
        (Softmax(2, 3), lambda i: -1.0, "label -1 of client 0"),
        (Softmax(2, 3), lambda i: 0.5, "label 0.5 of client 0"),
        (None, lambda i: 3.0, r"label 3 of client 0 is none of .* 2"),
    ],
)
def test_labels_that_the_loss_cannot_mean_are_named(
    loss: Logistic | None, labels: Callable[[int], float], sentence: str
) -> None:
    loss = loss or Module(lambda: nn.Linear(2, 3))  # type: ignore[assignment]
    problem = Problem(loss, stack_rows(rows(labels)))
    with pytest.raises(SympruneError, match=sentence):
        simulate(build("fedavg", gamma=0.1, p=1.0), problem, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_named_with_their_owner(bad: float) -> None:
    good = stack_rows(rows(lambda i: float(i)))
    wrong = stack_rows(rows(lambda i: float(i), bad))
    fedavg = build("fedavg", gamma=0.1, p=1.0)
    with pytest.raises(SympruneError, match="rows of client 1 hold NaN or infinity"):
        simulate(fedavg, Problem(Linear(2), wrong), 1)
    with pytest.raises(SympruneError, match="rows of the test set hold NaN"):
        simulate(fedavg, Problem(Linear(2), good, test=wrong[1:2]), 1)
    with pytest.raises(SympruneError, match="rows of the test rows of client 1 hold NaN"):
        simulate(fedavg, Problem(Linear(2), good, client_test=wrong), 1)
    simulate(fedavg, Problem(Linear(2), good), 1)


def test_a_file_with_nan_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("1 1:0.5 2:nan\n-1 1:0.1\n1 1:1\n-1 2:0.4\n")
    with pytest.raises(SympruneError, match="NaN or infinity"):
        make_problem(f"libsvm:{tmp_path / 'train'}", clients=2)


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": -3}, {"clip": 0.0}, {"clip": -1.0}])
def test_batches_and_clips_must_be_positive_however_the_algorithm_is_made(
    options: dict[str, float],
) -> None:
    problem = make_problem("digits", clients=2)
    with pytest.raises(SympruneError, match="must be positive"):
        build("fedavg", **options)
    with pytest.raises(SympruneError, match="must be positive"):
        simulate(FedAvg(gamma=0.1, **options), problem, 1)  # type: ignore[arg-type]


def test_a_penalty_that_rewards_is_refused() -> None:
    problem = make_problem("digits", clients=2)
    for wrong in (-1.0, math.nan):
        with pytest.raises(SympruneError, match="l2 must be 0 or more"):
            simulate(build("gd"), replace(problem, l2=wrong), 1)
        with pytest.raises(SympruneError, match="l2 must be 0 or more"):
            make_problem("digits", l2=wrong)


def test_a_run_does_not_go_on_from_another_start_point(tmp_path: Path) -> None:
    problem, file = make_problem("digits", clients=2), tmp_path / "run.safetensors"
    x0 = torch.ones(problem.dimension)
    simulate(build("gd"), problem, 1, x0=x0, checkpoint=file)
    for other in (2 * x0, None):
        with pytest.raises(SympruneError, match="began from another start point"):
            simulate(build("gd"), problem, 2, x0=other, checkpoint=file)
    assert simulate(build("gd"), problem, 2, x0=x0, checkpoint=file).history[-1]["round"] == 2
    with pytest.raises(SympruneError, match="start point holds NaN"):
        simulate(build("gd"), problem, 1, x0=x0 * math.nan)


def test_a_usual_start_may_be_given_or_left_out(tmp_path: Path) -> None:
    problem, file = make_problem("digits", clients=2), tmp_path / "run.safetensors"
    simulate(build("gd"), problem, 1, checkpoint=file)
    again = simulate(build("gd"), problem, 2, x0=problem.initial(0), checkpoint=file)
    assert again.history == simulate(build("gd"), problem, 2).history


def history(*losses: float, name: str = "loss") -> list[dict[str, float]]:
    return [{"round": number, name: loss} for number, loss in enumerate(losses)]


def test_a_loss_that_ends_above_its_start_is_told_from_one_that_diverged() -> None:
    assert ended_above_start(history(2.0, 9.0, 1.9)) is None
    assert ended_above_start(history(2.0, 2.0)) is None
    worse = history(2.0, 1.0, 2.5)
    assert ended_above_start(worse) == "The loss ended at 2.5, above the 2 of round 0"
    check_not_diverged(worse)
    with pytest.raises(Diverged, match=r"ended at 1180, above the 2.*smaller step size"):
        check_not_diverged(history(2.0, 1180.0))
    personal = [{**record, "loss": 2.0 ** record["round"]} for record in worse]
    personal = [{**a, "personal_loss": 9 - a["round"]} for a in personal]
    assert ended_above_start(personal) is None  # the shared model is not what is wanted
    assert ended_above_start([{"round": 1}, {"round": 2}]) is None  # owners keep their losses


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    command = ["run", "--clients", "2", "--quiet", *arguments]
    result = runner.invoke(app, command, env={"COLUMNS": "200"})
    return result.exit_code, result.output, result.exception


def test_a_run_that_blew_up_is_written_and_ends_with_an_error(tmp_path: Path) -> None:
    blown = (
        "--algorithm",
        "gd",
        "--set",
        "gamma=1000",
        "--rounds",
        "10",
        "--output",
        str(tmp_path),
    )
    code, text, error = run(*blown)
    assert code != 0 and isinstance(error, Diverged) and "smaller step size" in str(error)
    assert "gradient norm" in text  # the table comes first
    assert len(json.loads((tmp_path / "history.json").read_text())["history"]) == 11


def test_a_run_that_ends_a_little_higher_warns() -> None:
    options = ("--algorithm", "gd", "--split", "class:2", "--rounds", "3")
    code, text, _ = run(*options, "--set", "gamma=20")
    assert code == 0 and "Warning: The loss ended at" in text
    code, text, _ = run(*options)
    assert code == 0 and "Warning" not in text


def test_a_comparison_names_the_line_whose_loss_ended_above_its_start(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "problem: {data: breast-cancer, clients: 2}\nrounds: 10\nmetric: loss\nalgorithms:\n"
        "  - {algorithm: gd, label: good}\n  - {algorithm: gd, label: wild, gamma: 1000}\n"
    )
    command = ["compare", str(plan), "--output", str(tmp_path / "out")]
    done = runner.invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.exception
    assert "Warning: wild: The loss ended at" in done.output and "good: The" not in done.output
    assert (tmp_path / "out" / "summary.json").exists()


def test_where_owners_keep_their_losses_the_perplexity_is_what_is_judged() -> None:
    worse = history(100.0, 90.0, 900.0, name="perplexity")
    assert ended_above_start(worse) == "The perplexity ended at 900, above the 100 of round 0"
    check_not_diverged(worse)  # log 900 is no ten times log 100
    with pytest.raises(Diverged, match="The perplexity ended at"):
        check_not_diverged(history(2.0, math.exp(10), name="perplexity"))
    assert ended_above_start([{**h, "loss": -h["round"]} for h in worse]) is None


def test_padding_needs_no_label() -> None:
    uneven = stack_rows([(torch.ones(3, 2), torch.ones(3)), (torch.ones(1, 2), -torch.ones(1))])
    assert np.asarray(uneven.y)[1].tolist() == [-1, 0, 0]
    simulate(build("gd"), Problem(Logistic(2), uneven, l2=0.1), 1)
