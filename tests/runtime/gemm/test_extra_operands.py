"""Reading scales, epilogues and groups off tensors."""

from __future__ import annotations

import pytest
import torch

from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.epilogues import ADD, BIAS, Activation, Addend, Epilogue
from nvgemm_runtime.gemm.extra_operands import (
    ExtraOperands,
    addend_kinds,
    check_offset_values,
    read_epilogues,
    read_scales,
)
from nvgemm_runtime.gemm.operands import requests
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.gemm.types import ScaleRecipe

E8M0, E4M3, FP4 = torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.float4_e2m1fn_x2


def scales(
    dtype: torch.dtype, *shapes: tuple[int, ...], recipe: str | None = None
) -> ExtraOperands:
    scale_a, scale_b = (torch.ones(shape).to(dtype) for shape in shapes)
    named = None if recipe is None else ScaleRecipe(recipe)
    return ExtraOperands(scale_a=scale_a, scale_b=scale_b, recipe=named)


@pytest.mark.parametrize(
    ("operand", "extras", "recipe"),
    [
        (DType.FP8_E4M3, scales(torch.float32, (), ()), ScaleRecipe.FP32_TENSOR),
        (DType.FP8_E5M2, scales(torch.float32, (1,), (1, 1)), ScaleRecipe.FP32_TENSOR),
        (DType.FP8_E4M3, scales(torch.float32, (16, 1), (1, 32)), ScaleRecipe.FP32_ROW),
        (DType.FP8_E4M3, scales(E8M0, (512,), (512,)), ScaleRecipe.E8M0_1X32),
        (DType.FP4_E2M1, scales(E8M0, (512,), (2, 256)), ScaleRecipe.E8M0_1X32),
        (DType.FP4_E2M1, scales(E4M3, (1024,), (1024,)), ScaleRecipe.E4M3_1X16),
        (DType.FP4_E2M1, scales(E8M0, (1024,), (1024,)), ScaleRecipe.E8M0_1X16),
    ],
)
def test_recipes_are_read_off_types_and_sizes(
    operand: DType, extras: ExtraOperands, recipe: ScaleRecipe
) -> None:
    assert read_scales(extras, operand, 16, 32, 128) is recipe


def test_scales_of_groups_are_a_vector_and_a_row_for_each_group() -> None:
    extras = scales(torch.float32, (16,), (3, 32))
    assert read_scales(extras, DType.FP8_E4M3, 16, 32, 128, groups=3) is ScaleRecipe.FP32_ROW


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        (scales(torch.float32, (16, 1), (3, 32)), r"scale_a has .* of shape \[16\]"),
        (scales(torch.float32, (16,), (1, 32)), r"scale_b has .* of shape \[3, 32\]"),
        (scales(torch.float32, (1,), (1,)), r"scale_a has .* of shape \[16\]"),
        (scales(torch.float32, (16,), (32, 3)), r"scale_b has .* of shape \[3, 32\]"),
        (scales(E8M0, (512,), (512,)), "no kernel scales fp8_e4m3 with torch.float8_e8m0fnu"),
    ],
)
def test_other_scales_of_groups_are_refused(extras: ExtraOperands, reason: str) -> None:
    with pytest.raises(NoKernelError, match=reason):
        read_scales(extras, DType.FP8_E4M3, 16, 32, 128, groups=3)


def test_nothing_scales_nothing() -> None:
    assert read_scales(ExtraOperands(), DType.BF16, 16, 32, 64) is None


def test_a_named_recipe_is_taken_at_its_word() -> None:
    named = scales(E8M0, (512,), (512,), recipe="e8m0_1x16")
    assert read_scales(named, DType.FP4_E2M1, 16, 32, 64) is ScaleRecipe.E8M0_1X16
    with pytest.raises(NoKernelError, match="must have 1024 contiguous ones"):
        read_scales(named, DType.FP4_E2M1, 16, 32, 128)


@pytest.mark.parametrize(
    ("operand", "extras", "message"),
    [
        (DType.BF16, scales(torch.float32, (1,), (1,)), "no kernel scales bf16 with torch.float32"),
        (DType.FP8_E4M3, scales(E4M3, (512,), (512,)), "no kernel scales fp8_e4m3"),
        (DType.FP8_E4M3, scales(torch.float32, (2,), (1,)), r"must have 1 .*; or scale_a has"),
        (DType.FP8_E4M3, scales(torch.float32, (32, 1), (1, 16)), r"must be .* \[16, 1\]"),
        (DType.FP8_E4M3, scales(E8M0, (16, 4), (32, 4)), "has 64 elements .* must have 512"),
        (DType.FP8_E4M3, scales(E8M0, (512,), (1024,)), "scale_b has 1024 elements"),
    ],
)  # fmt: skip
def test_scales_that_none_takes_are_refused(
    operand: DType, extras: ExtraOperands, message: str
) -> None:
    with pytest.raises(NoKernelError, match=message):
        read_scales(extras, operand, 16, 32, 128)


def test_scales_that_are_not_as_swizzling_leaves_them_are_refused() -> None:
    gaps = ExtraOperands(scale_a=torch.ones(1024).to(E8M0)[::2], scale_b=torch.ones(512).to(E8M0))
    with pytest.raises(NoKernelError, match=r"strides \[2\]\), must have 512 contiguous ones"):
        read_scales(gaps, DType.FP8_E4M3, 16, 32, 128)
    memory = torch.zeros(512 + 64, dtype=torch.uint8)
    skip = -memory.data_ptr() % 32 + 16
    odd = ExtraOperands(scale_a=memory[skip:][:512].view(E8M0), scale_b=torch.ones(512).to(E8M0))
    message = (
        "scale_a begins 16 bytes past a multiple of 32, must begin at one; call .clone() on it"
    )
    for operand, k in ((DType.FP8_E4M3, 128), (DType.FP4_E2M1, 64)):  # two recipes take the latter
        with pytest.raises(NoKernelError) as refused:
            read_scales(odd, operand, 16, 32, k)
        assert str(refused.value) == message


def test_a_row_that_is_added_to_one_row_is_read_as_a_matrix_too() -> None:
    a, b = torch.zeros(1, 64).bfloat16(), torch.zeros(32, 64).bfloat16().T
    row = torch.zeros(1, 32).bfloat16()
    asked = requests(Op.MM, a, b, extras=ExtraOperands(addend=row))
    epilogues = {request.problem.signature.epilogue for request in asked}
    assert epilogues == {BIAS, ADD}
    silu = ExtraOperands(addend=row, activation=Activation.SILU)
    asked = requests(Op.MM, a, b, extras=silu)
    assert {request.problem.signature.epilogue for request in asked} == {
        Epilogue.parse("bias_silu")
    }


def test_both_scales_are_needed() -> None:
    with pytest.raises(ValueError, match="scale_b is missing"):
        read_scales(ExtraOperands(scale_a=torch.ones(1)), DType.FP8_E4M3, 16, 32, 128)


@pytest.mark.parametrize(
    ("shape", "strides", "out", "kinds"),
    [
        ((32,), (1,), (16, 32), (Addend.ROW,)),
        ((1, 32), (32, 1), (16, 32), (Addend.ROW,)),
        ((16, 32), (0, 1), (16, 32), (Addend.ROW,)),
        ((16, 32), (32, 1), (16, 32), (Addend.MATRIX,)),
        ((32,), (1,), (1, 32), (Addend.ROW,)),
        ((1, 32), (32, 1), (1, 32), (Addend.ROW, Addend.MATRIX)),
        ((1, 1, 32), (0, 0, 1), (1, 1, 32), (Addend.ROW, Addend.MATRIX)),
        ((3, 16, 32), (0, 0, 1), (3, 16, 32), (Addend.ROW,)),
        ((3, 16, 32), (0, 32, 1), (3, 16, 32), ()),
        ((16, 1), (1, 1), (16, 32), ()),
        ((32,), (2,), (16, 32), ()),
        ((8, 32), (0, 1), (16, 32), ()),
        ((3, 16, 32), (0, 0, 1), (16, 32), ()),
        ((), (), (16, 32), ()),
    ],
)
def test_a_row_is_told_from_a_matrix(
    shape: tuple[int, ...], strides: tuple[int, ...], out: tuple[int, ...], kinds: tuple[Addend]
) -> None:
    assert addend_kinds(shape, strides, out) == kinds


def test_epilogues_are_read_off_what_is_added() -> None:
    row, matrix = torch.ones(32).bfloat16(), torch.ones(16, 32).bfloat16()
    assert read_epilogues(ExtraOperands(), DType.BF16, (16, 32)) == (None,)
    assert read_epilogues(ExtraOperands(addend=row), DType.BF16, (16, 32)) == (BIAS,)
    assert read_epilogues(ExtraOperands(addend=matrix), DType.FP8_E4M3, (16, 32)) == (ADD,)
    silu = ExtraOperands(addend=row, activation=Activation.SILU)
    assert read_epilogues(silu, DType.BF16, (16, 32)) == (Epilogue.parse("bias_silu"),)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (ExtraOperands(activation=Activation.RELU), "no epilogue applies relu without a bias"),
        (ExtraOperands(addend=torch.ones(32)),
         "is torch.float32, must be torch.bfloat16 for a bf16 result"),
        (ExtraOperands(addend=torch.ones(31).bfloat16()),
         r"must be a row with 32 elements, or have .* shape \[16, 32\]"),
        (ExtraOperands(addend=torch.ones(16, 32).bfloat16(), activation=Activation.RELU),
         "no epilogue adds a matrix and applies relu"),
    ],
)  # fmt: skip
def test_epilogues_that_none_has_are_refused(extras: ExtraOperands, message: str) -> None:
    with pytest.raises(NoKernelError, match=message):
        read_epilogues(extras, DType.BF16, (16, 32))


def test_groups_have_a_row_each_or_a_matrix_added() -> None:
    """Not by the shape, which is the same where there are as many groups as rows."""
    added = torch.ones(16, 32).bfloat16()
    row, matrix = (ExtraOperands(addend=added, adds_matrix=one) for one in (False, True))
    assert read_epilogues(row, DType.BF16, (16, 32), 16) == (BIAS,)
    assert read_epilogues(row, DType.BF16, (4, 32), 16) == (BIAS,)
    assert read_epilogues(matrix, DType.BF16, (16, 32), 16) == (ADD,)
    assert read_epilogues(matrix, DType.BF16, (16, 32), 4) == (ADD,)
    with pytest.raises(NoKernelError, match=r"must have the result's shape \[4, 32\]"):
        read_epilogues(matrix, DType.BF16, (4, 32), 16)


@pytest.mark.parametrize(
    ("added", "alignment"),
    [
        (torch.zeros(16, 32).bfloat16(), 64),
        (torch.zeros(16, 64).bfloat16()[:, :32], 64),
        (torch.zeros(16, 36).bfloat16()[:, :32], 8),
    ],
)
def test_a_matrix_added_to_groups_counts_for_alignment(added: torch.Tensor, alignment: int) -> None:
    a, b = torch.zeros(16, 64).bfloat16(), torch.zeros(4, 32, 64).bfloat16().mT
    offsets = torch.zeros(4, dtype=torch.int32)
    extras = ExtraOperands(offsets=offsets, addend=added, adds_matrix=True)
    (asked,) = requests(Op.GROUPED_MM, a, b, extras=extras)
    assert asked.problem.key == "grouped_mm/tn/bf16xbf16/fp32/bf16/add/g4m16n32k64"
    assert asked.alignment_bytes == alignment


def test_offsets_rise_and_stay_within_a() -> None:
    check_offset_values(torch.tensor([0, 0, 7, 16], dtype=torch.int32), 16)
    for ends, message in (
        ([4, 3], r"group 1 ends at row 3, must end in 4\.\.16"),
        ([4, 17], r"group 1 ends at row 17, must end in 4\.\.16"),
        ([-1, 4], r"group 0 ends at row -1, must end in 0\.\.16"),
    ):
        with pytest.raises(ValueError, match=message):
            check_offset_values(torch.tensor(ends, dtype=torch.int32), 16)


def test_requests_count_values_of_packed_types() -> None:
    a, b = torch.empty(16, 64, dtype=FP4), torch.empty(32, 64, dtype=FP4).T
    (asked,) = requests(Op.MM, a, b, extras=scales(E4M3, (1024,), (1024,)))
    assert asked.problem.key == "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16/m16n32k128"
    assert asked.is_compact


def test_requests_name_groups() -> None:
    a, b = torch.zeros(16, 64).bfloat16(), torch.zeros(4, 32, 64).bfloat16().mT
    offsets = torch.zeros(4, dtype=torch.int32)
    (asked,) = requests(Op.GROUPED_MM, a, b, extras=ExtraOperands(offsets=offsets))
    assert asked.problem.key == "grouped_mm/tn/bf16xbf16/fp32/bf16/g4m16n32k64"
    for given, kind, message in (
        (None, ValueError, "offsets are missing"),
        (offsets[:3], ValueError, r"have shape \[3\], must have \[4\]"),
        (offsets.long(), NoKernelError, "offsets are torch.int64, must be torch.int32"),
        (torch.zeros(8, dtype=torch.int32)[::2], NoKernelError, "offsets are not contiguous"),
    ):
        with pytest.raises(kind, match=message):
            requests(Op.GROUPED_MM, a, b, extras=ExtraOperands(offsets=given))


@pytest.mark.parametrize(
    ("gates", "alignment"),
    [
        (torch.zeros(16, 32).bfloat16(), 64),
        (torch.zeros(16, 96).bfloat16()[:, :32], 64),
        (torch.zeros(16, 36).bfloat16()[:, :32], 8),
    ],
)
def test_gates_are_read_beside_ups(gates: torch.Tensor, alignment: int) -> None:
    """Their type is the result's, and rows of gates count for alignment."""
    a, b = torch.zeros(16, 64).bfloat16(), torch.zeros(4, 32, 64).bfloat16().mT
    offsets = torch.zeros(4, dtype=torch.int32)
    extras = ExtraOperands(offsets=offsets, addend=gates, gated=Epilogue.parse("swiglu_halves_ups"))
    (asked,) = requests(Op.GROUPED_MM, a, b, extras=extras)
    assert asked.problem.key == "grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_halves_ups/g4m16n32k64"
    assert asked.alignment_bytes == alignment


@pytest.mark.parametrize(
    ("addend", "alignment"),
    [
        (torch.zeros(32).bfloat16(), 64),
        (torch.zeros(33).bfloat16()[1:], 2),
        (torch.zeros(16, 36).bfloat16()[:, :32], 8),
    ],
)
def test_what_is_added_counts_for_alignment(addend: torch.Tensor, alignment: int) -> None:
    a, b = torch.zeros(16, 128).bfloat16(), torch.zeros(32, 128).bfloat16().T
    (asked,) = requests(Op.MM, a, b, extras=ExtraOperands(addend=addend))
    assert asked.alignment_bytes == alignment


@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_gaps_are_seen(operand: str) -> None:
    tensors = {
        "a": torch.zeros(16, 64).bfloat16(),
        "b": torch.zeros(32, 64).bfloat16().T,
        "out": torch.zeros(16, 32).bfloat16(),
    }
    (asked,) = requests(Op.MM, tensors["a"], tensors["b"], out=tensors["out"])
    assert asked.is_compact
    rows = tensors[operand].T if operand == "b" else tensors[operand]
    wide = torch.zeros(rows.shape[0], rows.shape[1] + 8).bfloat16()[:, : rows.shape[1]]
    tensors[operand] = wide.T if operand == "b" else wide
    (asked,) = requests(Op.MM, tensors["a"], tensors["b"], out=tensors["out"])
    assert not asked.is_compact
