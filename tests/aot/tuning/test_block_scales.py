"""Scales of blocks: random ones, where they lie, and what products with them are."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from microscaling import FP4_E2M1, FP8_E4M3, FP8_E5M2, decode, e8m0_value, swizzle

from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.correctness import block_scales
from nvgemm_aot.tuning.correctness.block_scales import swizzled, unswizzled
from nvgemm_aot.tuning.correctness.judgement import expect_between, find_fault, reference
from nvgemm_aot.tuning.correctness.random_operands import Operands, make_sets
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.operands import requests, torch_dtype
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.types import swizzled_elements
from tuning_bench import Behaving, WrongScales, WrongValues, bench, build, run

MXFP8 = "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/e8m0_1x32"
MXFP8_E5M2 = "mm/nt/fp8_e5m2xfp8_e5m2/fp32/bf16/e8m0_1x32"
MXFP4 = "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e8m0_1x32"
NVFP4 = "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16"
NVFP4_E8M0 = "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e8m0_1x16"
KEYS = [MXFP8, MXFP8_E5M2, MXFP4, NVFP4, NVFP4_E8M0]

VALUES = {
    DType.FP4_E2M1: FP4_E2M1.value,
    DType.FP8_E4M3: FP8_E4M3.value,
    DType.FP8_E5M2: FP8_E5M2.value,
    DType.FP8_E8M0: e8m0_value,
}


def problem(key: str, m: int = 48, n: int = 64, k: int = 416) -> Problem:
    return Problem(signature=Signature.parse(key), m=m, n=n, k=k)


def operands(posed: Problem) -> Operands:
    return make_sets(posed, "cpu", seed=1, total_bytes=1)[0]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@given(st.integers(1, 300), st.integers(1, 20))
def test_scales_are_swizzled_by_the_specification(rows: int, columns: int) -> None:
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    flat = swizzled(codes)
    assert torch.equal(flat, bytes_of(swizzle(codes.view(torch.float8_e8m0fnu))))
    assert torch.equal(unswizzled(flat, rows, columns), codes)


@pytest.mark.parametrize("dtype", VALUES)
def test_bytes_are_decoded_by_the_specifications(dtype: DType) -> None:
    """The order of two values in a byte among them, which cancels out of products."""
    every = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch_dtype(dtype))
    torch.testing.assert_close(
        block_scales._decode(every, dtype), decode(every), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("key", KEYS)
def test_kernels_are_given_what_the_launcher_wants(key: str) -> None:
    """What reads the problem off a program's tensors reads this one off them."""
    posed = problem(key, m=130, n=64, k=416)
    a, b, out, scale_a, scale_b = operands(posed)
    recipe = posed.signature.scales
    assert recipe is not None
    for scale, rows in ((scale_a, 130), (scale_b, 64)):
        assert scale.shape == (swizzled_elements(recipe, rows, 416),)
        assert scale.dtype is torch_dtype(recipe.dtype)
    extras = ExtraOperands(scale_a=scale_a, scale_b=scale_b, recipe=recipe)
    found = requests(Op.MM, a, b, out=out, extras=extras)
    assert found[0].problem == posed
    assert found[0].is_compact


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("k", [32, 4096, 2**20])
def test_scales_vary_and_their_padding_is_zero(key: str, k: int) -> None:
    posed = problem(key, m=5, n=3, k=k)
    recipe = posed.signature.scales
    assert recipe is not None
    assert recipe.block is not None
    blocks = k // recipe.block
    for scale, rows in zip(operands(posed)[3:], (5, 3)):
        codes = unswizzled(scale, rows, blocks)
        values = decode(codes.view(scale.dtype))
        assert values.isfinite().all()
        assert (values > 0).all()
        assert values.max() <= 4 * values.min()
        assert int(bytes_of(scale).int().sum()) == int(codes.int().sum()), "nothing else is set"
        if k > 32:
            most = 3 if recipe.dtype is DType.FP8_E8M0 else 17
            assert len(codes.unique()) == most


def test_values_of_fp4_are_all_there_are() -> None:
    for tensor in operands(problem(NVFP4))[:2]:
        assert len(bytes_of(tensor).unique()) == 256


@pytest.mark.parametrize(
    ("key", "k"),
    [
        *itertools.product(KEYS, (32, 96, 4096)),
        *(pytest.param(key, 2**20, marks=pytest.mark.slow) for key in (MXFP8, NVFP4)),
    ],
)
def test_sums_fit_into_fp8(key: str, k: int) -> None:
    signature = Signature.parse(key.replace("/bf16/", "/fp8_e4m3/"))
    posed = Problem(signature=signature, m=16, n=32, k=k)
    result = reference(operands(posed), signature)
    assert result.abs().max() < 448
    assert 0.5 < result.std() < 40


def test_sets_take_the_space_that_they_are_to_take() -> None:
    posed = problem(NVFP4, m=128, n=128, k=4096)
    sets = make_sets(posed, "cpu", seed=1, total_bytes=4_000_000)
    taken = [sum(tensor.nbytes for tensor in each) for each in sets]
    assert 4_000_000 <= sum(taken) < 4_000_000 + taken[0]


def slow_product(posed: Problem, tensors: Operands) -> list[list[float]]:
    """Term by term, from bytes, by the words of the specifications."""
    signature = posed.signature
    recipe, dtype = signature.scales, signature.a
    assert recipe is not None
    width = recipe.block
    assert width is not None
    a, b = (bytes_of(tensor).tolist() for tensor in (tensors[0], tensors[1].mT))
    flat_a, flat_b = (bytes_of(tensor).tolist() for tensor in tensors[3:])
    tiles = math.ceil(posed.k / width / 4)
    value, scale = VALUES[dtype], VALUES[recipe.dtype]

    def term(matrix: list[list[int]], flat: list[int], row: int, k: int) -> float:
        code = matrix[row][k // dtype.packed]
        if dtype is DType.FP4_E2M1:
            code = code >> 4 if k % 2 else code & 15
        block = k // width
        tile = row // 128 * tiles + block // 4
        return value(code) * scale(
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
        )

    return [
        [
            sum(term(a, flat_a, i, k) * term(b, flat_b, j, k) for k in range(posed.k))
            for j in range(posed.n)
        ]
        for i in range(posed.m)
    ]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("sizes", [(131, 2, 34), (3, 35, 176), (1, 1, 2)])
def test_products_are_those_of_a_slow_evaluation(key: str, sizes: tuple[int, int, int]) -> None:
    """Rows of several tiles, blocks of several tiles, and blocks that are not whole."""
    posed = problem(key, *sizes)
    tensors = operands(posed)
    wanted = torch.tensor(slow_product(posed, tensors), dtype=torch.float64)
    assert torch.equal(reference(tensors, posed.signature), wanted), "both are exact in fp64"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("blocks_at_once", [0, 1, 5])
def test_products_do_not_depend_on_how_much_is_decoded_at_a_time(
    monkeypatch: pytest.MonkeyPatch, key: str, blocks_at_once: int
) -> None:
    posed = problem(key)
    tensors, recipe = operands(posed), posed.signature.scales
    assert recipe is not None
    assert recipe.block is not None
    whole = reference(tensors, posed.signature)
    portion = blocks_at_once * recipe.block * (posed.m + posed.n)
    monkeypatch.setattr(block_scales, "PORTION", portion)
    assert torch.equal(reference(tensors, posed.signature), whole)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("place", [3, 4])
def test_one_scale_that_is_another_is_noticed(key: str, place: int) -> None:
    posed = problem(key, k=4096)
    tensors = list(operands(posed))
    wanted = reference(tensors, posed.signature)
    bytes_of(tensors[place])[16 * 9] ^= 1  # of row 9, the first block
    other = reference(tensors, posed.signature).to(torch_dtype(posed.signature.out))
    expected = expect_between(wanted, torch.zeros(()), other.dtype)
    fault = find_fault(other, expected)
    assert fault is not None
    assert int(fault.split()[0]) <= (posed.n if place == 3 else posed.m)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "key"),
    [
        (WrongScales(), MXFP8),
        (WrongScales(), NVFP4),
        (WrongValues(), MXFP4),
    ],
)
def test_kernels_that_read_blocks_wrong_are_thrown_out(
    kernel_cache: Cache, tmp_path: Path, provider: Behaving, key: str
) -> None:
    posed = problem(key, k=160)
    path = build([posed], tmp_path / "b", kernel_cache, provider)
    tuned = run(path, tmp_path / "tuned.nvgemm", bench(), accepts_suspect=True)
    outcome = tuned.outcomes[posed.key]
    with Bundle(path) as bundle:
        operators = {kernel.id: kernel.operator for kernel in bundle.header.kernels}
    assert {operators[id_] for id_ in outcome.wrong} == {"Cpu_16x16", "Cpu_8x32"}
    assert all("elements are wrong" in fault for fault in outcome.wrong.values())
    assert [kernel.operator for kernel in tuned.header.kernels] == ["Cpu_1x1"]
