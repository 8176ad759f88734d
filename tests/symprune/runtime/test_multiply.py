"""Every level of instructions gives what the matrix and the inputs say, for every kind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from packed_matrices import CODE_KINDS, FLOAT_KINDS, SHAPES, random_codes, random_matrix
from torch import Tensor

from symprune.errors import SympruneError
from symprune.runtime import blob as packed
from symprune.runtime import multiply as runtime
from symprune.runtime.kernels import library
from symprune.runtime.layout import FLOATS

KINDS = [*FLOAT_KINDS, *CODE_KINDS]
TOKENS = [1, 2, 3, 7, 8, 9, 33]


@pytest.fixture(params=runtime.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every level this CPU has."""
    runtime.force_level(request.param)
    yield request.param
    runtime.force_level(None)


@pytest.fixture(autouse=True)
def the_best_level_again() -> Iterator[None]:
    yield
    runtime.force_level(None)


def rounded_to_8_bits(x: Tensor) -> Tensor:
    """What codes multiply: in each 64 columns the nearest multiples of the largest / 127."""
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % 64)).view(len(x), -1, 64)
    most = padded.abs().amax(-1, keepdim=True)
    factor = torch.where(most > 1e-35, torch.full_like(most, 127) / most, 0)
    codes = torch.round(padded * factor).double()
    return (codes * (most / 127).double()).view(len(x), -1)[:, :columns]


def assert_close(found: Tensor, x: Tensor, weight: Tensor, kind: str, level: str) -> None:
    """Within the rounding of float32 sums, and of the output's own type."""
    inputs = x.double()
    if kind in CODE_KINDS and level != "portable":
        inputs = rounded_to_8_bits(x)
    exact = inputs @ weight.double().T
    sizes = inputs.abs() @ weight.double().abs().T
    terms = x.shape[-1] + 16
    bound = terms * 2.0**-24 * sizes + torch.finfo(found.dtype).eps * exact.abs() + 1e-30
    if found.dtype == torch.float16:
        bound += 2.0**-24  # its smallest step
    assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sparsity", [None, 0.5])
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_products_are_right_for_any_number_of_tokens(
    level: str,
    kind: str,
    sparsity: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "LONG_FOR_FLOATS", 64)
    for seed, shape in enumerate([(17, 200), (8, 64), (1, 1), (70, 577)]):
        blob, weight = random_matrix(*shape, kind, sparsity, seed)
        generator = torch.Generator().manual_seed(seed)
        for tokens in TOKENS:
            x = torch.randn(tokens, shape[1], generator=generator).to(dtype)
            found = runtime.multiply(blob, x)
            assert found.dtype == dtype and found.shape == (tokens, shape[0])
            assert_close(found, x, weight, kind, level)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sparsity", [None, 0.0, 0.9, 1.0])
def test_odd_shapes_empty_rows_and_full_ones_are_right(
    level: str, kind: str, sparsity: float | None
) -> None:
    for shape in SHAPES:
        blob, weight = random_matrix(*shape, kind, sparsity)
        x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1))
        for tokens in (1, 3):
            assert_close(runtime.multiply(blob, x[:tokens]), x[:tokens], weight, kind, level)


@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts_go_through_torch_and_stay_right(level: str, kind: str) -> None:
    blob, weight = random_matrix(600, 130, kind, 0.5)
    x = torch.randn(100, 130, generator=torch.Generator().manual_seed(2))
    for dtype in FLOATS.values():
        found = runtime.multiply(blob, x.to(dtype)).double()
        exact = x.to(dtype).double() @ weight.double().T
        sizes = x.abs().double() @ weight.double().abs().T
        assert bool(((found - exact).abs() <= sizes * 2.0**-7 + 1e-6).all())


@pytest.mark.parametrize(
    ("level", "fast", "kind", "given", "by_torch"),
    [
        # A CPU without instructions for bfloat16: float32, unless there are some for integers.
        ("avx512", False, "int8", torch.bfloat16, None),
        ("avx2", False, "int8", torch.bfloat16, torch.float32),
        ("plain", False, "int4", torch.float32, torch.float32),
        ("avx512", False, "bfloat16", torch.bfloat16, torch.float32),
        ("avx512", False, "float16", torch.float16, torch.float32),
        # One that has them: bfloat16, where nothing that is given is more exact.
        ("avx512", True, "int8", torch.float32, torch.bfloat16),
        ("avx2", True, "int4", torch.bfloat16, torch.bfloat16),
        ("avx512", True, "bfloat16", torch.bfloat16, torch.bfloat16),
        ("avx512", True, "bfloat16", torch.float32, torch.float32),
        ("avx512", True, "float32", torch.bfloat16, torch.float32),
    ],
)
def test_long_prompts_are_multiplied_in_the_type_this_cpu_is_fast_in(
    level: str,
    fast: bool,
    kind: str,
    given: torch.dtype,
    by_torch: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the CPU is that this runs on."""
    if library.library() is None:
        pytest.skip("the kernels are not compiled here")
    used: set[torch.dtype] = set()

    def mm(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        used.update((left.dtype, right.dtype, out.dtype))
        return by_mm(left, right, out=out)

    by_mm = torch.mm
    blob, weight = random_matrix(70, 130, kind, 0.5)
    x = torch.randn(100, 130, generator=torch.Generator().manual_seed(2)).to(given)
    monkeypatch.setattr(library, "level", lambda: level)
    monkeypatch.setattr(library, "multiplies_bfloat16_fast", lambda: fast)
    monkeypatch.setattr(torch, "mm", mm)
    found = runtime.multiply(blob, x).double()
    assert used == ({by_torch} if by_torch else set())
    sizes = x.abs().double() @ weight.double().abs().T
    exact = x.double() @ weight.double().T
    assert bool(((found - exact).abs() <= sizes * 2.0**-7 + 1e-6).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sparsity", [None, 0.5])
def test_threads_change_nothing(level: str, kind: str, sparsity: float | None) -> None:
    blob, _ = random_matrix(700, 300, kind, sparsity)
    x = torch.randn(33, 300, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([runtime.multiply(blob, x[:tokens]) for tokens in (1, 4, 20)])
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sparsity", [None, 0.5])
def test_a_token_does_not_depend_on_the_others(
    level: str, kind: str, sparsity: float | None
) -> None:
    if level == "portable":
        pytest.skip("torch's matmul makes no such promise")
    blob, _ = random_matrix(40, 300, kind, sparsity)
    x = torch.randn(9, 300, generator=torch.Generator().manual_seed(4))
    together = runtime.multiply(blob, x)
    alone = torch.cat([runtime.multiply(blob, x[i : i + 1]) for i in range(9)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_every_matrix_of_a_stack_can_be_multiplied(level: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    if kind == "int4":
        pieces = [random_codes(11, 90, kind, 0.5, generator) for _ in range(3)]
        blob = packed.encode_codes(pieces, kind, stacked=True, transposed=True)
    else:
        weights = [torch.randn(11, 90, generator=generator).bfloat16() for _ in range(3)]
        blob = packed.encode_floats(weights, stacked=True, transposed=True)
    dense = packed.decode(blob, torch.float32).transpose(1, 2)
    x = torch.randn(2, 4, 90, generator=generator)
    bias = torch.randn(11, generator=generator)
    for piece in range(3):
        found = runtime.multiply(blob, x, piece=piece, bias=bias)
        assert found.shape == (2, 4, 11)
        plain = runtime.multiply(blob, x, piece=piece)
        assert torch.allclose(found, plain + bias)
        assert_close(plain.view(8, 11), x.view(8, 90), dense[piece], kind, level)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sparsity", [None, 0.5])
def test_rows_are_expanded_and_gathered(level: str, kind: str, sparsity: float | None) -> None:
    blob, weight = random_matrix(29, 130, kind, sparsity)
    indices = torch.tensor([[28, 0, 3], [3, 3, 17]])
    for dtype in FLOATS.values():
        for first, count in ((0, 29), (0, 1), (7, 2), (28, 1), (3, 20), (5, 0)):
            found = runtime.expand_rows(blob, first, count, dtype)
            assert torch.equal(found, weight[first : first + count].to(dtype))
        assert torch.equal(runtime.gather_rows(blob, indices, dtype), weight[indices].to(dtype))
        assert runtime.gather_rows(blob, indices[:0], dtype).shape == (0, 3, 130)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(level: str, kind: str, value: float) -> None:
    blob, _ = random_matrix(9, 200, kind, 0.5)
    for tokens in (1, 3):
        x = torch.ones(tokens, 200)
        x[-1, 150] = value
        found = runtime.multiply(blob, x)
        assert not found[-1].isfinite().any()
        assert found[:-1].isfinite().all()


def test_inputs_of_zeros_and_of_tiny_numbers_give_zeros(level: str) -> None:
    blob, _ = random_matrix(9, 200, "int8", 0.5)
    assert runtime.multiply(blob, torch.zeros(1, 200)).eq(0).all()
    assert runtime.multiply(blob, torch.full((1, 200), 1e-42)).abs().max() < 1e-35


def test_inputs_need_not_be_contiguous(level: str) -> None:
    blob, _ = random_matrix(9, 100, "bfloat16", 0.5)
    x = torch.randn(100, 5, generator=torch.Generator().manual_seed(6)).T
    found = runtime.multiply(blob, x)
    assert torch.allclose(found, runtime.multiply(blob, x.contiguous()), atol=1e-5)
    assert runtime.multiply(blob, x[:0]).shape == (0, 9)
    assert runtime.multiply(blob, x[0]).shape == (9,)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_matrices_that_share_an_input_give_what_each_gives_alone(level: str, kind: str) -> None:
    """Inputs are made ready once for all of them: for one kind, one type, one number of tokens."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(9, 200, kind), (17, 200, kind), (9, 200, "int3"), (9, 100, kind), (5, 200, kind)]
    matrices = [random_matrix(*shape, 0.5, seed)[0] for seed, shape in enumerate(shapes)]
    inputs = [torch.randn(tokens, 200, generator=generator) for tokens in (1, 4)]
    inputs += [x.bfloat16() for x in inputs]

    def products(apart: bool) -> Iterator[Tensor]:
        for x in inputs:
            for blob, (_, columns, _) in zip(matrices, shapes, strict=True):
                if apart:
                    runtime.multiply(matrices[3], torch.randn(1, 100))
                yield runtime.multiply(blob, x.view(-1, columns))

    assert all(map(torch.equal, products(apart=False), products(apart=True)))


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_an_input_that_was_changed_in_place_is_noticed(level: str, kind: str) -> None:
    """However it was changed: not every way is counted by torch."""
    blob, weight = random_matrix(9, 200, kind, 0.5)
    x = torch.randn(1, 200, generator=torch.Generator().manual_seed(8))

    def change_in_inference_mode() -> None:
        with torch.inference_mode():
            x.mul_(-3)

    for change in (
        lambda: x.add_(1),
        lambda: x.data.mul_(-2),
        lambda: x.numpy().__setitem__((0, 199), 7.5),
        change_in_inference_mode,
    ):
        runtime.multiply(blob, x)
        change()
        assert_close(runtime.multiply(blob, x), x, weight, kind, level)


def test_threads_of_python_do_not_meet_each_others_inputs(level: str) -> None:
    blob, _ = random_matrix(64, 512, "int8", 0.5)
    inputs = torch.randn(4, 50, 1, 512, generator=torch.Generator().manual_seed(9))
    alone = [[runtime.multiply(blob, x) for x in own] for own in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda own: [runtime.multiply(blob, x) for x in own], inputs)
    for first, second in zip(alone, found, strict=True):
        assert all(map(torch.equal, first, second))


def test_gradients_reach_the_input(level: str) -> None:
    blob, weight = random_matrix(9, 100, "bfloat16", 0.5)
    x = torch.randn(2, 100, requires_grad=True)
    runtime.multiply(blob, x, bias=torch.zeros(9)).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad[0], weight.sum(0), atol=1e-5)
    with torch.no_grad():
        assert not runtime.multiply(blob, x).requires_grad


def test_wrong_inputs_are_one_sentence(level: str) -> None:
    blob, _ = random_matrix(9, 100, "int8", 0.5)
    x = torch.zeros(1, 100)
    for call in (
        lambda: runtime.multiply(blob, x[:, 1:]),
        lambda: runtime.multiply(blob, x.double()),
        lambda: runtime.multiply(blob, x, piece=1),
        lambda: runtime.multiply(blob, x, bias=torch.zeros(8)),
        lambda: runtime.multiply(blob, x.to("meta")),
        lambda: runtime.multiply(blob[:-1], x),
        lambda: runtime.multiply(blob.float(), x),
        lambda: runtime.expand_rows(blob, 5, 5, torch.float32),
        lambda: runtime.expand_rows(blob, 0, 1, torch.int8),
        lambda: runtime.gather_rows(blob, torch.tensor([9]), torch.float32),
        lambda: runtime.gather_rows(blob, torch.tensor([-1]), torch.float32),
    ):
        with pytest.raises(SympruneError, match=r"^[^.]*\.$"):
            call()


def test_a_blob_is_checked_again_when_its_contents_change(level: str) -> None:
    blob, _ = random_matrix(9, 100, "int8", 0.5)
    x = torch.ones(1, 100)
    runtime.multiply(blob, x)
    blob[88:152] = 255  # the masks of the first tile
    with pytest.raises(SympruneError, match="damaged"):
        runtime.multiply(blob, x)


def test_blobs_that_are_gone_are_forgotten() -> None:
    blob, _ = random_matrix(9, 100, "int8", 0.5)
    runtime.multiply(blob, torch.ones(1, 100))
    key = id(blob)
    assert key in runtime._known
    del blob
    gc.collect()
    assert key not in runtime._known


def test_blobs_made_in_inference_mode_multiply(level: str) -> None:
    with torch.inference_mode():
        blob, weight = random_matrix(9, 100, "bfloat16", 0.5)
        x = torch.randn(1, 100)
        assert_close(runtime.multiply(blob, x), x, weight, "bfloat16", level)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by Linux")
def test_torchs_own_threads_do_the_work() -> None:
    if library.library() is None or library._gomp_parallel() is None:
        pytest.skip("torch has no OpenMP of the GNU kind here")
    blob, _ = random_matrix(700, 300, "float32", None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _ = torch.ones(2**20) + 1
        threads = set(os.listdir("/proc/self/task"))
        for tokens in (1, 9):
            runtime.multiply(blob, torch.ones(tokens, 300))
        assert set(os.listdir("/proc/self/task")) <= threads
    finally:
        torch.set_num_threads(before)
