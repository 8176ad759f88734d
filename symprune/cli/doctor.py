"""The command that looks at the machine: doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from symprune.cli import console
from symprune.cli import options as o


def doctor(json_file: o.JsonFile = None) -> None:
    """Show what symprune finds here: versions, devices, kernels, memory, disk, hub and extras.

    Nothing is fetched or changed, and no token is shown: what it prints can go into a bug report.
    """
    from symprune.jobs.doctor import advise, examine
    from symprune.machine import durable

    durable.check_file(json_file, o.JSON)
    asked_offline = console.hub_is_off()
    console.prepare_libraries()
    found = examine(Path.cwd())
    reached = False if asked_offline else console.online()
    found["hub"]["name_resolves"] = None if asked_offline else reached
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(found):
        table.add_row(name, text)
    console.out.print(table)
    notes = advise({**found, "hub": {**found["hub"], "offline": asked_offline}})
    if reached is False and not asked_offline:
        notes.append(f"The hub ({found['hub']['endpoint']}) is out of reach; local models work.")
    console.notes(notes)
    o.write_json(json_file, found)


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    from symprune.eval.tables import size
    from symprune.wording import counted

    made, kernels, hub = found["versions"], found["kernels"], found["hub"]
    devices = [
        f"{each['name']}{' ' + each['model'] if 'model' in each else ''}"
        f"{' (chosen)' if each['chosen'] else ''}"
        for each in found["devices"]
    ]
    cpu = found["processor"]
    return [
        ("versions", ", ".join(f"{name} {number or 'missing'}" for name, number in made.items())),
        ("system", found["system"]),
        ("processor", f"{counted(cpu['cores'] or 1, 'core')}, {counted(cpu['threads'], 'thread')}; "
                      "bfloat16 is computed in "
                      f"{cpu['bfloat16_computed_in']}"),
        ("devices", ", ".join(devices)),
        ("kernels", f"{', '.join(kernels['levels'])} (used: {kernels['used']})"
                    if kernels["levels"] else "none"),
        ("compiler", kernels["compiler"] or "none"),
        ("memory", f"{size(found['memory']['free_bytes'])} of {size(found['memory']['bytes'])} "
                   "free"),
        ("disk", f"{size(found['disk']['free_bytes'])} free in {found['disk']['folder']}"),
        ("hub", f"{hub['endpoint']}, uploads by {hub['uploads']}, cache in {hub['cache']}"),
        ("token", f"from {hub['token']}, not shown" if hub["token"] else "none"),
        ("extras", ", ".join(f"{name} {'yes' if there else 'no'}"
                             for name, there in found["extras"].items())),
    ]  # fmt: skip
