"""The rooms of the house and the arrows between them, read from the imports, lazy ones too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"symprune": "symprune", "symprune.fed": "fed", "symprune.eval": "eval"}
MOST_FILES = 14

# What a room of symprune may import besides itself. A module of the root is a room of its own.
BASE = {"errors", "validation", "wording", "machine"}
TENSORS = {"masks", "scores", "criteria", "gram", "stats", *BASE}
STEPS = {"refine", "update", "allocate", "permute", "values", "reconstruct"}
ARTEFACTS = {"card", "recipe", "maskset", "calibration", "token_loss", "models", *TENSORS}
MAY_IMPORT = {
    "errors": set(),
    "validation": {"errors"},
    "wording": set(),
    "machine": {"errors", "validation"},
    "masks": BASE,
    "scores": {"masks", *BASE},
    "criteria": {"masks", "scores", *BASE},
    "experts": BASE,
    "gram": BASE,
    "stats": {"gram", *BASE},
    "token_loss": {"errors"},
    "tracking": BASE,
    "corpus": BASE,
    "calibration": {"corpus", *BASE},
    "card": {"corpus", *BASE},
    "refine": TENSORS,
    "update": TENSORS,
    "allocate": TENSORS,
    "permute": TENSORS,
    "values": {"update", *TENSORS},
    "reconstruct": {"values", *TENSORS},
    "recipe": {"card", "corpus", "experts", *STEPS, *TENSORS},
    "models": BASE,
    "runtime": {"masks", "values", "models", *BASE},
    "maskset": {"masks", "models", "runtime", *BASE},
    "engine": {"experts", *STEPS, *ARTEFACTS},
    "checkpoint": {"symprune", "engine", "runtime", "values", *ARTEFACTS},
    "eval": {"symprune", "checkpoint.record", "masks", "maskset", "runtime", "token_loss", *BASE},
    "jobs": {"checkpoint", "engine", "eval", "experts", "runtime", "values", *ARTEFACTS},
    "cli": {
        "symprune", "jobs", "checkpoint", "engine", "eval", "fed", "tracking", "update", *ARTEFACTS,
    },
    "__main__": {"cli"},
}  # fmt: skip
# The same inside fed; what any of it may use of symprune follows.
FED_MAY_IMPORT = {
    "randomness": set(),
    "threads": set(),
    "devices": set(),
    "privacy": set(),
    "mechanism": set(),
    "problems": {"randomness"},
    "protocol": {"privacy", "problems", "randomness", "wire"},
    "owner": {"privacy"},
    "registry": {"protocol"},
    "robust": {"protocol"},
    "wire": {"randomness"},
    "compressors": {"randomness", "wire"},
    "participation": {"compressors", "randomness"},
    "snapshot": {"protocol"},
    "algorithms": {
        "compressors", "devices", "mechanism", "participation", "privacy", "problems", "protocol",
        "randomness", "registry", "wire",
    },
    "adapters": {"problems"},
    "simulate": {
        "devices", "problems", "protocol", "randomness", "robust", "snapshot", "threads", "wire",
    },
    "compare": {"algorithms", "problems", "protocol", "registry", "simulate"},
    "remote": {
        "algorithms", "devices", "mechanism", "owner", "private_users", "problems", "protocol",
        "randomness", "registry", "robust", "secure", "simulate", "snapshot", "threads", "wire",
    },
    "private_users": {"mechanism", "privacy", "problems", "protocol"},
    "secure": {"wire"},
    "pruning": {
        "mechanism", "owner", "privacy", "problems", "protocol", "remote", "robust", "secure",
        "threads", "wire",
    },
    "flower": {"owner", "protocol", "pruning", "remote", "secure", "snapshot"},
    "cli": {
        "adapters", "algorithms", "compare", "devices", "flower", "owner", "privacy",
        "private_users", "problems", "protocol", "pruning", "registry", "remote", "robust",
        "secure", "simulate",
    },
}  # fmt: skip
FED_USES = {
    "owner": {"calibration", "corpus", *TENSORS},
    "problems": {"maskset", "token_loss", *TENSORS},
    "adapters": {"card", "checkpoint", "maskset", *BASE},
    "pruning": {"symprune", "jobs", "checkpoint", "engine", "eval", *ARTEFACTS},
    "cli": {"cli", "eval", "jobs", "recipe", "tracking", *TENSORS},
}


@cache
def modules() -> dict[str, Path]:
    """Every module's name and file."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(p for p in parts if p != "__init__")])] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """The modules a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules() else str(node.module)


@cache
def arrows() -> dict[str, set[str]]:
    """Module -> the project's modules it imports."""
    return {
        name: {other for other in imports(path) if other in modules() and other != name}
        for name, path in modules().items()
    }


def room(module: str, package: str = "symprune") -> str:
    """`engine` of `symprune.engine.walk`; a package itself is its last name."""
    return module.removeprefix(f"{package}.").split(".")[0]


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        tuple(TopologicalSorter(arrows()).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_tables_themselves_have_no_circle() -> None:
    table = {name: {room(o) for o in others} for name, others in MAY_IMPORT.items()}
    tuple(TopologicalSorter(table).static_order())
    tuple(TopologicalSorter(FED_MAY_IMPORT).static_order())


def test_a_room_of_symprune_imports_only_the_rooms_below_it() -> None:
    wrong = []
    for name, others in arrows().items():
        here = room(name)
        if here in ("symprune", "fed"):
            continue
        for other in others:
            there = room(other)
            short = other.removeprefix("symprune.")
            if there != here and there not in MAY_IMPORT[here] and short not in MAY_IMPORT[here]:
                wrong.append(f"{name} -> {other}")
    assert not wrong


def test_a_room_of_fed_imports_only_the_rooms_below_it() -> None:
    wrong = []
    for name, others in arrows().items():
        here = room(name, "symprune.fed")
        if room(name) != "fed" or here in ("symprune", "fed"):
            continue
        for other in others:
            if room(other) == "fed":
                there = room(other, "symprune.fed")
                allowed = there == here or there in FED_MAY_IMPORT[here]
            else:
                allowed = room(other) in FED_USES.get(here, TENSORS)
            if not allowed:
                wrong.append(f"{name} -> {other}")
    assert not wrong


def test_measuring_knows_neither_the_engine_nor_the_jobs() -> None:
    reached: set[str] = set()
    ahead = [name for name in modules() if room(name) == "eval"]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += arrows()[name]
    assert {room(name) for name in reached}.isdisjoint({"engine", "jobs", "cli", "fed"})


def test_only_the_command_line_knows_the_federated_half() -> None:
    found = {
        name
        for name, others in arrows().items()
        if room(name) != "fed" and any(room(other) == "fed" for other in others)
    }
    assert found == {"symprune.cli.main"}


def test_a_family_of_algorithms_imports_no_other_family() -> None:
    families = "symprune.fed.algorithms."
    wrong = [
        f"{name} -> {other}"
        for name, others in arrows().items()
        for other in others
        if name.startswith(families)
        and other.startswith(families)
        and room(other, families.rstrip(".")) not in ("shared", room(name, families.rstrip(".")))
    ]
    assert not wrong


def test_flower_is_imported_in_one_room() -> None:
    found = {
        name
        for name, path in modules().items()
        if any(other.split(".")[0] == "flwr" for other in imports(path))
    }
    assert found and all(name.startswith("symprune.fed.flower.") for name in found)


def test_formulas_know_tensors_only() -> None:
    known = {"masks", "scores", "criteria", "stats", "token_loss", "refine", "update", "allocate"}
    known |= {"experts", "gram", "permute", "values", "reconstruct"}
    wrong = [
        f"{name} -> {other}"
        for name, path in modules().items()
        for other in imports(path)
        if room(name) in known and other.split(".")[0] in ("transformers", "safetensors", "rich")
    ]
    assert not wrong


def test_one_file_of_the_runtime_knows_transformers() -> None:
    found = {
        name
        for name, path in modules().items()
        if room(name) == "runtime"
        and any(other.split(".")[0] == "transformers" for other in imports(path))
    }
    assert found == {"symprune.runtime.hf_quantizer"}


def test_a_room_is_read_at_one_glance() -> None:
    folders = {path.parent for path in modules().values()}
    crowded = {
        str(folder.relative_to(ROOT)): count
        for folder in folders
        if (count := sum(path.name != "__init__.py" for path in folder.glob("*.py"))) > MOST_FILES
    }
    assert not crowded


def test_every_folder_is_installed() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    listed = ast.literal_eval(project[project.index("packages = [") + 11 :].split("]")[0] + "]")
    assert listed == sorted(listed)
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert set(listed) == packages
