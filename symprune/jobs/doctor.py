"""What symprune finds on a machine: versions, devices, kernels, the hub, room. It changes nothing,
asks the hub nothing but its name's address, and shows no token."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from symprune.machine import compute
from symprune.models import hub
from symprune.runtime.kernels import library

NEEDED = ("torch", "transformers", "safetensors", "accelerate", "datasets", "huggingface_hub",
          "numpy", "lm_eval", "gguf")  # fmt: skip
EXTRAS = {
    "flower": ("flwr",),
    "secure": ("cryptography",),
    "privacy": ("dp-accounting",),
    "llama": ("llama-cpp-python",),
    "lora": ("peft",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
COMPILERS = ("cc", "gcc", "clang")


def examine(folder: Path) -> dict[str, Any]:
    """Everything, as plain values. folder: where output would go."""
    return {
        "versions": {"symprune": _version("symprune"), "python": platform.python_version(),
                     **{name: _version(name) for name in NEEDED}},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "devices": _devices(),
        "kernels": _kernels(),
        "memory": _memory(),
        "disk": {"folder": str(folder), "free_bytes": shutil.disk_usage(folder).free},
        "hub": _hub(),
        "extras": {name: all(_version(each) for each in packages)
                   for name, packages in EXTRAS.items()},
    }  # fmt: skip


def advise(found: dict[str, Any]) -> list[str]:
    """What a user might want to do about it."""
    said = []
    if not found["kernels"]["levels"]:
        fix = "reinstall where a C compiler is" if not found["kernels"]["compiler"] else "reinstall"
        why = found["kernels"]["missing"]
        said.append(f"{why}: packed models run slowly through torch; {fix}.")
    if found["hub"]["token"] is None:
        said.append("No token for the hub: gated models and pushing need `hf auth login`.")
    if found["hub"]["offline"]:
        said.append("HF_HUB_OFFLINE is set: only what was fetched before can be loaded.")
    missing = [name for name in NEEDED if found["versions"][name] is None]
    if missing:
        said.append(f"Not installed: {', '.join(missing)}; install symprune again.")
    return said


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> dict[str, Any]:
    return {
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "bfloat16_computed_in": compute.name_of(
            compute.pick("auto", torch.bfloat16, torch.device("cpu"))
        ),
    }


def _devices() -> list[dict[str, Any]]:
    chosen = hub.pick_device("auto").type
    found = [{"name": "cpu", "chosen": chosen == "cpu"}]
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        free, _ = torch.cuda.mem_get_info(number)
        entry = {"name": f"cuda:{number}", "chosen": chosen == "cuda" and number == 0}
        found.append({**entry, "model": about.name, "free_bytes": free})
    if torch.backends.mps.is_available():
        found.append({"name": "mps", "chosen": chosen == "mps"})
    return found


def _kernels() -> dict[str, Any]:
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    there = library.search()
    if isinstance(there, str):
        return {"levels": [], "used": None, "compiler": compiler, "missing": there}
    levels, used = library.levels(), library.level()
    return {"levels": levels, "used": used, "compiler": compiler, "missing": None}


def _memory() -> dict[str, int]:
    known = psutil.virtual_memory()
    return {"bytes": known.total, "free_bytes": known.available}


def _hub() -> dict[str, Any]:
    """Where it is and whether there is a token, of which only the place is told."""
    from huggingface_hub import constants, get_token

    named = next((name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)),
                 None)  # fmt: skip
    place = named if named else ("a file" if get_token() else None)
    return {
        "endpoint": constants.ENDPOINT,
        "offline": constants.HF_HUB_OFFLINE,
        "token": place,
        "cache": constants.HF_HUB_CACHE,
        "uploads": "xet" if _version("hf-xet") and not constants.HF_HUB_DISABLE_XET else "lfs",
    }
