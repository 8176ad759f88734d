"""Which kernels are used: the best the processor has, those asked for, none that do not fit."""

from __future__ import annotations

import platform
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packed_matrices import random_matrix

from symprune.errors import SympruneError
from symprune.runtime import blob as packed
from symprune.runtime import multiply as runtime
from symprune.runtime.kernels import library


@pytest.fixture(autouse=True)
def the_best_level_again() -> Iterator[None]:
    yield
    library.force_level(None)


def test_levels_that_are_not_here_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SympruneError, match="There is no kernel 'sse9'; there are avx512, avx2"):
        runtime.force_level("sse9")
    monkeypatch.setattr(library, "levels", lambda: ["plain", "portable"])
    with pytest.raises(SympruneError, match="'neon' does not run here: this machine has plain"):
        runtime.force_level("neon")


@pytest.mark.parametrize(
    ("has", "best_first"),
    [
        ({"plain", "avx2", "avx512"}, ["avx512", "avx2", "plain", "portable"]),
        ({"plain", "neon"}, ["neon", "plain", "portable"]),
        ({"plain", "neon", "neon-dot"}, ["neon-dot", "neon", "plain", "portable"]),
    ],
)
def test_the_best_that_a_processor_has_is_chosen(
    has: set[str], best_first: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {library.NUMBERS[name] for name in has}
    chosen: list[int] = []
    processor = SimpleNamespace(
        packed_has_level=lambda number: number in there, packed_set_level=chosen.append
    )
    monkeypatch.setattr(library, "library", lambda: processor)
    monkeypatch.setattr(library._chosen, "level", None)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    assert library.levels() == best_first
    assert library.level() == best_first[0] and chosen == [library.NUMBERS[best_first[0]]]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags are those of x86")
def test_instructions_for_bfloat16_are_found_where_the_system_says_they_are() -> None:
    said = Path("/proc/cpuinfo")
    if library.library() is None or not said.exists():
        pytest.skip("there are no kernels or no Linux here")
    flags = next(line for line in said.read_text().splitlines() if line.startswith("flags")).split()
    there = "avx512_bf16" in flags and "avx512" in library.levels()
    assert library.multiplies_bfloat16_fast() == there


def test_a_level_asked_for_by_the_environment_must_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "levels", lambda: ["plain", "portable"])
    monkeypatch.setattr(library._chosen, "level", None)
    monkeypatch.setenv("SYMPRUNE_KERNEL", "avx512")
    with pytest.raises(SympruneError, match="'avx512' does not run here: this machine has plain"):
        library.level()


def test_the_environment_chooses_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in runtime.levels():
        monkeypatch.setenv("SYMPRUNE_KERNEL", name)
        monkeypatch.setattr(library._chosen, "level", None)
        assert runtime.level() == name
    monkeypatch.setenv("SYMPRUNE_KERNEL", "mmx")
    monkeypatch.setattr(library._chosen, "level", None)
    with pytest.raises(SympruneError, match="no kernel 'mmx'"):
        runtime.level()


@pytest.fixture
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder where kernels are looked for, with nothing in it, as after an installation."""
    monkeypatch.setattr(library, "__file__", f"{tmp_path}/library.py")
    monkeypatch.setattr(library._chosen, "level", None)
    library.library.cache_clear()
    library.multiplies_bfloat16_fast.cache_clear()
    yield tmp_path
    library.library.cache_clear()
    library.multiplies_bfloat16_fast.cache_clear()


def test_without_the_library_everything_works_and_says_so_once(empty_home: Path) -> None:
    with pytest.warns(RuntimeWarning, match="not installed; packed models run through the portab"):
        blob, weight = random_matrix(9, 100, "int4", 0.5)
    x = torch.randn(2, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = runtime.multiply(blob, x)
        packed.check(blob)
    assert library.levels() == ["portable"]
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(packed.decode(blob, torch.float32), weight)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("int packed_interface(void) { return 2; }", r"another version \(interface 2, not 3\)"),
        ("int another;", "does not hold symprune's compiled kernels"),
        (None, "cannot be loaded here"),
    ],
)
def test_kernels_that_do_not_fit_are_told_from_missing_ones_and_not_used(
    source: str | None, said: str, empty_home: Path
) -> None:
    stale = empty_home / "_packed.so"
    if source is None:
        stale.write_bytes(b"\x7fELF of another system")
    elif shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    else:
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(stale)]
        subprocess.run(command, input=source, text=True, check=True)
    with pytest.warns(RuntimeWarning, match=said) as warned:
        blob, weight = random_matrix(9, 100, "bfloat16", 0.5)
    x = torch.randn(2, 100)
    assert str(stale) in str(warned[0].message) and len(warned) == 1
    assert library.levels() == ["portable"]
    torch.testing.assert_close(runtime.multiply(blob, x), x @ weight.T, rtol=1e-4, atol=1e-4)
