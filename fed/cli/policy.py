"""`symprune fed policy`: write an owner's policy, or read one back with what its ledger says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from symprune.cli import console
from symprune.cli.screen.help import App
from symprune.errors import SympruneError

app = App(help="What a server may ask of this machine.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="The policy, a YAML file.")]


@app.command()
def write(file: File) -> None:
    """Write a policy with the defaults, to be changed."""
    from symprune.fed.owner.policy import Policy

    if file.exists():
        raise SympruneError(f"{file} exists and is left as it is.")
    Policy().save(file)
    console.say(f'{file} has the defaults; start the SuperNode with policy="{file}".')


@app.command()
def check(file: File) -> None:
    """Read a policy, say what it allows and how much of its budget is spent."""
    from dataclasses import asdict

    from symprune.fed.owner.guard import ledger_of
    from symprune.fed.owner.ledger import Ledger
    from symprune.fed.owner.policy import read_policy

    policy = read_policy(file)
    table = Table("policy", "", title=str(file))
    for name, value in asdict(policy).items():
        shown = ", ".join(value) if isinstance(value, tuple) else str(value)
        table.add_row(name, shown if value is not None and value != () else "-")
    if policy.ledger or policy.data:
        every = Ledger(policy.ledger_file, policy.epsilon, policy.delta)
        spent = (ledger_of(policy, policy.data) if policy.data else every).spent()
        table.add_row("spent", f"{spent:.3g} of {policy.epsilon:g}, by {policy.ledger_file}")
    console.out.print(table)


@app.command()
def audit(
    log: Annotated[Path, typer.Argument(help="An audit log, audit.jsonl of a node's folder.")],
) -> None:
    """Say whether every line of an audit log is as it was written, and how many there are."""
    from symprune.fed.owner.audit import check_log

    if not log.is_file():
        raise SympruneError(f"There is no audit log {log}.")
    console.say(f"{check_log(log):,} lines, each as it was written behind the one before.")
