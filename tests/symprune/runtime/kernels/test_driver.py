"""The kernels without Python: under sanitizers, fed with damaged blobs, and on an emulated ARM."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_matrices import CODE_KINDS, FLOAT_KINDS, random_codes, random_matrix
from torch import Tensor

from symprune.runtime import blob as packed
from symprune.runtime.kernels import library
from symprune.runtime.kernels.library import DTYPES

HOME = Path(library.__file__).parent
DRIVER = Path(__file__).with_name("driver.c")
NAMES = {number: name for name, number in library.NUMBERS.items()}


@dataclass
class Case:
    blob: Tensor
    x: Tensor
    piece: int = 0


@dataclass
class Answer:
    level: str
    wrong: int
    products: list[Tensor]
    dense: Tensor | None = None


def build(target: Path, compiler: str, *flags: str) -> Path:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    sources = [str(path) for path in sorted(HOME.glob("*.c"))]
    made = subprocess.run(
        [
            compiler,
            *flags,
            f"-I{HOME}",
            str(DRIVER),
            *sources,
            "-o",
            str(target),
            "-lm",
            "-pthread",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode and "sanitize" in " ".join(flags) and "cannot find" in made.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    return target


def run(
    command: list[str], folder: Path, cases: list[Case], levels: list[str]
) -> list[list[Answer]]:
    """What every level says to every case."""
    given, answers = folder / "cases", folder / "answers"
    with given.open("wb") as file:
        file.write(struct.pack("<q", len(cases)))
        for case in cases:
            x = case.x.contiguous().view(torch.uint8).numpy().tobytes()
            file.write(
                struct.pack(
                    *("<5q", case.blob.numel(), case.piece, len(case.x)),
                    *(DTYPES[case.x.dtype], len(x)),
                )
            )
            file.write(case.blob.numpy().tobytes())
            file.write(x)
    done = subprocess.run(
        [*command, str(given), str(answers)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr[-4000:]
    return parse(answers.read_bytes(), cases, levels)


def parse(raw: bytes, cases: list[Case], levels: list[str]) -> list[list[Answer]]:
    at = 0

    def take(count: int, dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal at
        size = count * torch.empty(0, dtype=dtype).element_size()
        at += size
        return torch.frombuffer(bytearray(raw[at - size : at]), dtype=dtype).view(shape)

    found = []
    for case in cases:
        of_case = []
        for _ in levels:
            number, wrong = struct.unpack_from("<2q", raw, at)
            at += 16
            answer = Answer(NAMES[number], wrong, [])
            if not wrong:
                layout = packed.describe(case.blob)
                tokens, rows, columns = len(case.x), layout.rows, layout.columns
                answer.products = [
                    take(tokens * rows, case.x.dtype, tokens, rows) for _ in range(2)
                ]
                answer.dense = take(rows * columns, torch.float32, rows, columns)
            of_case.append(answer)
        assert [answer.level for answer in of_case] == levels
        found.append(of_case)
    assert at == len(raw)
    return found


def quantised(case: Case) -> bool:
    return packed.describe(case.blob).quantised


def native_levels() -> list[str]:
    found = library.library()
    assert found is not None
    return [name for name, number in library.NUMBERS.items() if found.packed_has_level(number)]


def good_cases() -> list[Case]:
    """Every kind, masked and not, with one token and more, in odd shapes, and a stack."""
    cases = []
    generator = torch.Generator().manual_seed(0)
    for kind in (*FLOAT_KINDS, *CODE_KINDS):
        for sparsity in (None, 0.5, 1.0):
            for shape, tokens, dtype in (
                ((17, 200), 1, torch.float32),
                ((9, 63), 3, torch.bfloat16),
                ((1, 1), 1, torch.float16),
                ((40, 130), 9, torch.float32),
            ):
                blob, _ = random_matrix(*shape, kind, sparsity)
                x = torch.randn(tokens, shape[1], generator=generator).to(dtype)
                cases.append(Case(blob, x))
    pieces = [random_codes(10, 70, "int3", 0.5, generator) for _ in range(3)]
    stack = packed.encode_codes(pieces, "int3", stacked=True)
    return [*cases, *(Case(stack, torch.randn(2, 70, generator=generator), p) for p in range(3))]


def damaged_cases(count: int) -> list[Case]:
    """Blobs with some bytes changed: most in the masks and offsets, some anywhere."""
    random = np.random.default_rng(0)
    cases = []
    for number in range(count):
        kind = (*FLOAT_KINDS, *CODE_KINDS)[number % 7]
        blob, _ = random_matrix(11, 70, kind, (None, 0.5)[number // 7 % 2])
        places = random.integers(
            *((12, 200) if number % 3 else (0, blob.numel())), size=1 + number % 4
        )
        for place in places:
            blob[place] = int(random.integers(0, 256))
        cases.append(Case(blob, torch.ones(1 + number % 3, 70)))
    return cases


def assert_right(cases: list[Case], answers: list[list[Answer]]) -> None:
    for case, of_case in zip(cases, answers, strict=True):
        dense = packed.decode(case.blob, torch.float32).view(-1, *of_case[0].dense.shape)
        weight = dense[case.piece]
        sizes = case.x.double().abs() @ weight.double().abs().T
        exact = case.x.double() @ weight.double().T
        step = 2.0**-7 if quantised(case) else 2.0**-16
        for answer in of_case:
            assert answer.wrong == 0
            assert torch.equal(answer.dense, weight)
            assert torch.equal(*answer.products)
            error = (answer.products[0].double() - exact).abs()
            own = torch.finfo(case.x.dtype).eps * exact.abs()
            assert bool((error <= step * sizes + own + 1e-6).all()), answer.level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("driver")


def sanitized(sanitizer: str, folder: Path) -> str:
    if library.library() is None:
        pytest.skip("the kernels are not compiled here")
    program = folder / sanitizer
    if not program.exists():
        build(program, "gcc", "-O1", f"-fsanitize={sanitizer}")
    return str(program)


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer: str, folder: Path) -> None:
    cases = good_cases()
    assert_right(cases, run([sanitized(sanitizer, folder)], folder, cases, native_levels()))


def test_no_damaged_blob_makes_a_kernel_read_outside(folder: Path) -> None:
    cases = damaged_cases(1500)
    answers = run([sanitized("address,undefined", folder)], folder, cases, native_levels())
    verdicts = [{answer.wrong for answer in of_case} for of_case in answers]
    assert all(len(verdict) == 1 for verdict in verdicts)
    refused = sum(verdict != {0} for verdict in verdicts)
    assert 0 < refused < len(cases)


@pytest.fixture(scope="module")
def for_arm(folder: Path) -> list[str]:
    """The program that runs the kernels, for an ARM, and what emulates one."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("there is no qemu-aarch64 here")
    # What every ARM can run, whatever the compiler would choose by itself.
    flags = ("-O3", "-static", "-march=armv8-a")
    return [emulator, str(build(folder / "arm", "aarch64-linux-gnu-gcc", *flags))]


@pytest.mark.parametrize(
    ("processor", "levels"),
    [("cortex-a53", ["plain", "neon"]), ("max", ["plain", "neon", "neon-dot"])],
)
def test_an_emulated_arm_gives_the_same_by_all_it_has(
    processor: str, levels: list[str], for_arm: list[str], folder: Path
) -> None:
    """The first of the two has no dot products of bytes."""
    emulator, program = for_arm
    cases = good_cases()
    assert_right(cases, run([emulator, "-cpu", processor, program], folder, cases, levels))


def test_only_what_is_chosen_for_them_has_dot_products(for_arm: list[str]) -> None:
    _, program = for_arm
    listing = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-d", program], capture_output=True, text=True, check=True
    )
    functions = [part for part in listing.stdout.split("\n\n") if "\tsdot\t" in part]
    named = {function.split("<")[1].split(">")[0].split(".")[0] for function in functions}
    assert named == {"several_INT8", "several_INT4", "several_INT3", "several_INT2"}
