"""The emulation of block-scaled types, against the specifications' tables and torch's own casts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from microscaling import (
    FP4_E2M1,
    FP8_E4M3,
    FP8_E5M2,
    Minifloat,
    decode,
    dequantise,
    e8m0_value,
    encode_e8m0,
    encode_fp4,
    pack_fp4,
    quantise,
    swizzle,
    unswizzle,
)

from nvgemm_runtime.gemm.types import ScaleRecipe, swizzled_elements

FP4, E8M0, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.float8_e4m3fn
ALL_BYTES = torch.arange(256, dtype=torch.uint8)

# OCP MX specification v1.0, table 5: the positive numbers of E2M1.
OCP_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_all_sixteen_codes_of_fp4_are_those_of_the_ocp_table() -> None:
    values = [FP4_E2M1.value(code) for code in range(16)]
    assert values == [*OCP_E2M1, *(-value for value in OCP_E2M1)]
    assert math.copysign(1, values[8]) == -1


@pytest.mark.parametrize(("dtype", "minifloat"), [(E4M3, FP8_E4M3), (torch.float8_e5m2, FP8_E5M2)])
def test_every_byte_of_fp8_decodes_as_torch_casts_it(
    dtype: torch.dtype, minifloat: Minifloat
) -> None:
    tensor = ALL_BYTES.view(dtype)
    values = torch.tensor([minifloat.value(code) for code in range(256)], dtype=torch.float64)
    torch.testing.assert_close(decode(tensor), tensor.double(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, tensor.double(), rtol=0, atol=0, equal_nan=True)


def test_every_byte_of_e8m0_decodes_as_torch_casts_it() -> None:
    tensor = ALL_BYTES.view(E8M0)
    wanted = tensor.float().double()
    torch.testing.assert_close(decode(tensor), wanted, rtol=0, atol=0, equal_nan=True)
    assert (e8m0_value(0), e8m0_value(127), e8m0_value(254)) == (2.0**-127, 1.0, 2.0**127)
    assert math.isnan(e8m0_value(255))


def test_the_first_of_two_values_is_in_the_low_half_of_a_byte() -> None:
    packed = pack_fp4(torch.tensor([[2, 15, 7, 0]]))  # 1, -6, 6, 0
    assert packed.dtype is FP4
    assert packed.view(torch.uint8).tolist() == [[0xF2, 0x07]]
    assert decode(packed).tolist() == [[1.0, -6.0, 6.0, 0.0]]


@pytest.mark.parametrize("code", range(16))
def test_fp4_encodes_what_it_decodes(code: int) -> None:
    packed = pack_fp4(torch.tensor([code, 15 - code]))
    assert torch.equal(encode_fp4(decode(packed)).view(torch.uint8), packed.view(torch.uint8))


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (0.25, 0.0),
        (0.26, 0.5),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (2.51, 3.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (5.1, 6.0),
        (1e9, 6.0),
    ],
)
def test_fp4_rounds_ties_to_even_codes_and_saturates(value: float, nearest: float) -> None:
    assert decode(encode_fp4(torch.tensor([value, -value]))).tolist() == [nearest, -nearest]


@given(st.floats(2.0**-120, 2.0**120))
def test_a_power_of_two_is_the_largest_that_is_not_above(value: float) -> None:
    scale = float(decode(encode_e8m0(torch.tensor([value], dtype=torch.float64))))
    assert scale <= value < 2 * scale


@given(st.integers(1, 300), st.integers(1, 20))
def test_swizzling_loses_nothing(rows: int, columns: int) -> None:
    scales = torch.randint(0, 255, (rows, columns), dtype=torch.uint8).view(E8M0)
    flat = swizzle(scales, padding=255)
    assert flat.numel() == swizzled_elements(ScaleRecipe.E8M0_1X32, rows, 32 * columns)
    assert torch.equal(unswizzle(flat, rows, columns).view(torch.uint8), scales.view(torch.uint8))
    padding = flat.numel() - rows * columns
    assert int((flat.view(torch.uint8) == 255).sum()) == padding, "each scale has its own place"


def test_scales_lie_as_cublas_documents() -> None:
    """By the words of the documentation: a 128 x 4 block is 32 rows of 16 bytes, and so on."""
    rows, columns = 256, 8
    flat = swizzle(torch.arange(rows * columns).view(rows, columns).to(torch.uint8).view(E8M0))
    scale = (torch.arange(rows * columns) % 256).view(rows, columns)
    bytes_ = flat.view(torch.uint8)
    # Rows 0, 32, 64 and 96 are neighbours, four scales of each.
    assert bytes_[:16].tolist() == [int(scale[r, c]) for r in (0, 32, 64, 96) for c in range(4)]
    assert bytes_[16:32].tolist() == [int(scale[r, c]) for r in (1, 33, 65, 97) for c in range(4)]
    # Behind a block comes that of the next four scales of these rows, then the next 128 rows.
    assert bytes_[512:516].tolist() == [int(scale[0, c]) for c in range(4, 8)]
    assert bytes_[1024:1028].tolist() == [int(scale[128, c]) for c in range(4)]


RECIPES = [
    (E4M3, E8M0, 32),
    (torch.float8_e5m2, E8M0, 32),
    (FP4, E8M0, 32),
    (FP4, E4M3, 16),
    (FP4, E8M0, 16),
]
STEP = {E4M3: 2.0**-3, torch.float8_e5m2: 2.0**-2, FP4: 2.0**-1}
"""By type: the largest step between two numbers, relative to the smaller."""


@pytest.mark.parametrize(("dtype", "scale_dtype", "block"), RECIPES)
def test_what_was_quantised_comes_back_within_a_step(
    dtype: torch.dtype, scale_dtype: torch.dtype, block: int
) -> None:
    torch.manual_seed(0)
    values = torch.randn(40, 4 * block, dtype=torch.float64) * 10 ** torch.randn(40, 1).double()
    elements, scales = quantise(values, dtype, scale_dtype, block)
    assert scales.shape == (40, 4)
    back = dequantise(elements, scales, block)
    # The largest element may saturate, by less than the step above it; small ones are absolute.
    largest = values.unflatten(-1, (4, block)).abs().amax(-1).repeat_interleave(block, -1)
    assert bool(((back - values).abs() <= STEP[dtype] * largest).all())
    relative = torch.linalg.vector_norm(back - values) / torch.linalg.vector_norm(values)
    assert float(relative) < STEP[dtype] / 2


@pytest.mark.parametrize(("dtype", "scale_dtype", "block"), RECIPES)
def test_quantising_twice_changes_nothing(
    dtype: torch.dtype, scale_dtype: torch.dtype, block: int
) -> None:
    torch.manual_seed(1)
    once = dequantise(*quantise(torch.randn(8, 2 * block), dtype, scale_dtype, block), block)
    twice = dequantise(*quantise(once, dtype, scale_dtype, block), block)
    torch.testing.assert_close(twice, once, rtol=0, atol=0)


def test_a_scale_that_is_not_a_number_spoils_its_block_alone() -> None:
    elements = torch.ones(2, 64).to(E4M3)
    scales = torch.tensor([[127, 255], [128, 126]], dtype=torch.uint8).view(E8M0)
    values = dequantise(elements, scales, 32)
    assert values[0, 32:].isnan().all()
    assert values[0, :32].tolist() == [1.0] * 32
    assert values[1].tolist() == [2.0] * 32 + [0.5] * 32
