"""The compiled kernels: found beside this file, loaded with ctypes, their level chosen.

`packed.h` is the interface. Threads are those of the OpenMP that torch has loaded, so that its work
and ours share one pool; if it has none, the library starts its own.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from symprune.errors import SympruneError

VARIABLE = "SYMPRUNE_KERNEL"
INTERFACE = 3
PORTABLE = "portable"
NUMBERS = {"plain": 0, "avx2": 1, "avx512": 2, "neon": 3, "neon-dot": 4}
BEST_FIRST = ("avx512", "avx2", "neon-dot", "neon", "plain", PORTABLE)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WRONG = {
    1: "its header does not fit its size",
    2: "its panels do not fill it",
    3: "a panel has another size than its tiles",
    4: "it has weights outside",
    5: "a scale is not a finite number",
}


@dataclass
class Choice:
    """The level in use; None until one is asked for."""

    level: str | None = None


_chosen = Choice()


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none that fit; says so once."""
    found = search()
    if not isinstance(found, str):
        return _declared(found)
    warnings.warn(
        f"{found}; packed models run through the portable path, which is slow. Install symprune "
        "again where there is a C compiler.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def search() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none: what an older symprune, another system or
    another processor has left in the folder is not used."""
    why = "symprune's compiled kernels are not installed"
    for path in sorted(Path(__file__).parent.glob("_packed*")):
        try:
            found = ctypes.CDLL(str(path))
            interface = found.packed_interface()
        except OSError:
            why = f"symprune's compiled kernels in {path} cannot be loaded here"
            continue
        except AttributeError:
            why = f"{path} does not hold symprune's compiled kernels"
            continue
        if interface == INTERFACE:
            return found
        why = (
            f"symprune's compiled kernels in {path} are of another version "
            f"(interface {interface}, not {INTERFACE})"
        )
    return why


def levels() -> list[str]:
    """What this machine can do, the best first."""
    found = library()
    return [
        name
        for name in BEST_FIRST
        if name == PORTABLE or (found is not None and found.packed_has_level(NUMBERS[name]))
    ]


def level() -> str:
    """The instructions in use: the best there are, or what `SYMPRUNE_KERNEL` says."""
    if _chosen.level is None:
        force_level(os.environ.get(VARIABLE) or None)
    assert _chosen.level is not None
    return _chosen.level


def force_level(name: str | None) -> None:
    """Use a certain level from now on; None for the best."""
    if name is not None and name not in BEST_FIRST:
        raise SympruneError(
            f"There is no kernel {name!r}; there are {', '.join(BEST_FIRST[:-1])} and {PORTABLE}."
        )
    if name is not None and name not in levels():
        raise SympruneError(
            f"The kernel {name!r} does not run here: this machine has {', '.join(levels())}."
        )
    _chosen.level = name or levels()[0]
    found = library()
    if found is not None and _chosen.level != PORTABLE:
        found.packed_set_level(NUMBERS[_chosen.level])


def kernels() -> ctypes.CDLL | None:
    """The library at the level in use, None for the portable path."""
    return None if level() == PORTABLE else library()


@cache
def multiplies_bfloat16_fast() -> bool:
    """Whether torch's matmul is faster in bfloat16 than in float32 on this CPU."""
    found = library()
    return found is not None and bool(found.packed_has_bfloat16())


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """With the types of its functions, and torch's threads."""
    for name, arguments in {
        "packed_check": [c_void_p, c_int64],
        "packed_multiply": [
            *(c_void_p, c_int64, c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int),
        ],
        "packed_expand": [c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p, c_int],
        "packed_gather": [c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int],
        "packed_encode": [
            *(c_int, c_int, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
            c_int,
        ],
        "packed_set_parallel": [c_void_p],
        "packed_set_level": [c_int],
        "packed_has_level": [c_int],
    }.items():
        function = getattr(found, name)
        function.argtypes = arguments
        function.restype = c_int
    found.packed_set_parallel(_gomp_parallel())
    return found


def _gomp_parallel() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP that torch uses."""
    from threadpoolctl import threadpool_info

    home = str(Path(torch.__file__).parent)
    paths = [each["filepath"] for each in threadpool_info() if each["user_api"] == "openmp"]
    for path in sorted(paths, key=lambda path: not path.startswith(home)):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
