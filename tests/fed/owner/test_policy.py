"""A policy file: one dataclass, read back as written, every mistake named."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from symprune.errors import SympruneError
from symprune.fed.owner.policy import Policy, policy_of, read_policy


def test_a_policy_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    policy = Policy(
        algorithms=("ldp-fedp3",), epsilon=2.0, data="libsvm:rows.txt", code=("mine:score",)
    )
    policy.save(tmp_path / "policy.yaml")
    assert read_policy(tmp_path / "policy.yaml") == policy
    assert stat.S_IMODE((tmp_path / "policy.yaml").stat().st_mode) == 0o600


def test_what_a_policy_leaves_out_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("epsilon: 1\nleast_clip: 1e-3\n")
    assert read_policy(tmp_path / "policy.yaml") == Policy(epsilon=1.0, least_clip=1e-3)


def test_without_a_policy_the_owners_data_is_hidden_by_noise_with_a_budget() -> None:
    assert policy_of({}) == Policy()
    policy = Policy()
    assert (policy.protection, policy.epsilon, policy.delta) == ("noise", 8.0, 1e-5)
    assert policy.least_clients == 2 and not policy.code


WRONG = {
    "epsilom: 1": "epsilon",
    "epsilon: -1": "epsilon is above 0",
    "epsilon: 0": "epsilon is above 0",
    "epsilon: .inf": "epsilon",
    "epsilon: .nan": "epsilon",
    "epsilon: much": "epsilon",
    "epsilon:": "epsilon",
    "epsilon: true": "epsilon",
    "delta: 1": "delta",
    "jobs: pruning": "list of names",
    "jobs: [spying]": "spying",
    "algorithms: [1]": "list of names",
    "protection: none": "protection is one of plain, secure-sum, shared-noise, noise",
    "least_clip: 0": "clip bounds",
    "least_clip: 2\nmost_clip: 1": "clip bounds",
    "least_clients: 0": "least numbers",
    "least_clients: 1.5": "least_clients",
    "model_digest: 12": "quote it",
    "- epsilon": "names and values",
    "epsilon: [": "cannot be read",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_policy_that_is_wrong_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(SympruneError, match=WRONG[text]):
        read_policy(tmp_path / "policy.yaml")


def test_a_policy_that_is_named_and_missing_allows_nothing(tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match="cannot be read"):
        policy_of({"policy": str(tmp_path / "nowhere.yaml")})


def test_a_digest_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    policy = Policy(model_digest="1234e5")
    policy.save(tmp_path / "policy.yaml")
    assert read_policy(tmp_path / "policy.yaml").model_digest == "1234e5"


def test_the_command_line_writes_a_template_and_reads_it_back(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from symprune.fed.cli.main import app

    file, run = str(tmp_path / "policy.yaml"), CliRunner().invoke
    assert run(app, ["policy", "write", file]).exit_code == 0
    assert read_policy(Path(file)) == Policy()
    again = run(app, ["policy", "write", file])
    assert isinstance(again.exception, SympruneError) and "exists" in str(again.exception)
    Policy(ledger=str(tmp_path / "ledger")).save(Path(file))
    checked = run(app, ["policy", "check", file])
    assert checked.exit_code == 0 and "noise" in checked.output and "0 of 8" in checked.output
    Path(file).write_text("epsilon: -1")
    wrong = run(app, ["policy", "check", file])
    assert isinstance(wrong.exception, SympruneError) and "epsilon" in str(wrong.exception)
