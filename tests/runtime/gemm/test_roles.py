from __future__ import annotations

import pytest
import torch

from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.operands import requests
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import (
    Role,
    contiguous_bytes,
    extra_roles,
    misalignment_reason,
    role_dtype,
    role_shape,
    roles,
)

CASES = {
    "mm/tn/bf16xbf16/fp32/bf16/m3n5k8": {
        Role.A: (DType.BF16, (3, 8)),
        Role.B: (DType.BF16, (8, 5)),
        Role.OUT: (DType.BF16, (3, 5)),
    },
    "bmm/tn/bf16xbf16/fp32/fp8_e4m3/bias_relu/b2m3n5k8": {
        Role.A: (DType.BF16, (2, 3, 8)),
        Role.B: (DType.BF16, (2, 8, 5)),
        Role.ADDEND: (DType.BF16, (5,)),
        Role.OUT: (DType.FP8_E4M3, (2, 3, 5)),
    },
    "bmm/tn/fp16xfp16/fp32/fp32/add/b2m3n5k8": {
        Role.A: (DType.FP16, (2, 3, 8)),
        Role.B: (DType.FP16, (2, 8, 5)),
        Role.ADDEND: (DType.FP32, (2, 3, 5)),
        Role.OUT: (DType.FP32, (2, 3, 5)),
    },
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/bias/m3n5k8": {
        Role.A: (DType.FP8_E4M3, (3, 8)),
        Role.B: (DType.FP8_E4M3, (8, 5)),
        Role.SCALE_A: (DType.FP32, (3, 1)),
        Role.SCALE_B: (DType.FP32, (1, 5)),
        Role.ADDEND: (DType.BF16, (5,)),
        Role.OUT: (DType.BF16, (3, 5)),
    },
    "mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_tensor/m3n5k8": {
        Role.A: (DType.FP8_E4M3, (3, 8)),
        Role.B: (DType.FP8_E4M3, (8, 5)),
        Role.SCALE_A: (DType.FP32, (1,)),
        Role.SCALE_B: (DType.FP32, (1,)),
        Role.OUT: (DType.BF16, (3, 5)),
    },
    "mm/tn/bf16xbf16/fp32/fp16/swiglu_halves/m3n10k8": {
        Role.A: (DType.BF16, (3, 8)),
        Role.B: (DType.BF16, (8, 10)),
        Role.OUT: (DType.FP16, (3, 5)),
    },
    "mm/tn/fp16xfp16/fp32/fp16/swiglu_oai_interleaved/m3n10k8": {
        Role.A: (DType.FP16, (3, 8)),
        Role.B: (DType.FP16, (8, 10)),
        Role.ADDEND: (DType.FP16, (10,)),
        Role.OUT: (DType.FP16, (3, 5)),
    },
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16/m130n5k80": {
        Role.A: (DType.FP4_E2M1, (130, 40)),
        Role.B: (DType.FP4_E2M1, (40, 5)),
        Role.SCALE_A: (DType.FP8_E4M3, (256 * 8,)),
        Role.SCALE_B: (DType.FP8_E4M3, (128 * 8,)),
        Role.OUT: (DType.BF16, (130, 5)),
    },
    "grouped_mm/tt/fp16xfp16/fp32/bf16/swiglu_oai_interleaved/g7m3n10k8": {
        Role.A: (DType.FP16, (3, 8)),
        Role.B: (DType.FP16, (7, 8, 10)),
        Role.OFFSETS: (DType.INT32, (7,)),
        Role.ADDEND: (DType.BF16, (7, 10)),
        Role.OUT: (DType.BF16, (3, 5)),
    },
    "grouped_mm/tn/bf16xbf16/fp32/bf16/swiglu_halves_gradient/g7m3n5k8": {
        Role.A: (DType.BF16, (3, 8)),
        Role.B: (DType.BF16, (7, 8, 5)),
        Role.OFFSETS: (DType.INT32, (7,)),
        Role.ADDEND: (DType.BF16, (3, 10)),
        Role.OUT: (DType.BF16, (3, 10)),
    },
    "grouped_mm/tn/fp16xfp16/fp32/bf16/geglu_halves_ups/g7m3n5k8": {
        Role.A: (DType.FP16, (3, 8)),
        Role.B: (DType.FP16, (7, 8, 5)),
        Role.OFFSETS: (DType.INT32, (7,)),
        Role.ADDEND: (DType.BF16, (3, 5)),
        Role.OUT: (DType.BF16, (3, 10)),
    },
    "grouped_mm/tn/fp8_e4m3xfp8_e4m3/fp32/bf16/fp32_row/g7m3n5k8": {
        Role.A: (DType.FP8_E4M3, (3, 8)),
        Role.B: (DType.FP8_E4M3, (7, 8, 5)),
        Role.SCALE_A: (DType.FP32, (3,)),
        Role.SCALE_B: (DType.FP32, (7, 5)),
        Role.OFFSETS: (DType.INT32, (7,)),
        Role.OUT: (DType.BF16, (3, 5)),
    },
    "grouped_mm/tn/bf16xbf16/fp32/fp32/g7m3n5k8": {
        Role.A: (DType.BF16, (3, 8)),
        Role.B: (DType.BF16, (7, 8, 5)),
        Role.OFFSETS: (DType.INT32, (7,)),
        Role.OUT: (DType.FP32, (3, 5)),
    },
}


@pytest.mark.parametrize("key", CASES)
def test_tensors_of_a_problem(key: str) -> None:
    problem = Problem.parse(key)
    signature = problem.signature
    assert roles(signature) == tuple(CASES[key])
    assert extra_roles(signature) == tuple(CASES[key])[2:-1]
    for role, (dtype, shape) in CASES[key].items():
        assert (role_dtype(signature, role), role_shape(problem, role)) == (dtype, shape), role


@pytest.mark.parametrize(("layout", "alignment"), [("tn", 32), ("tt", 16), ("nn", 8), ("nt", 8)])
@pytest.mark.parametrize("extras", [ExtraOperands(), ExtraOperands(addend=torch.empty(4, 24))])
def test_contiguous_extents_align_what_was_just_allocated(
    layout: str, alignment: int, extras: ExtraOperands
) -> None:
    """To no more than 64 bytes on a CPU."""
    m, n, k = 4, 24, 16
    a = torch.empty(m, k).half() if layout[0] == "t" else torch.empty(k, m).half().t()
    b = torch.empty(k, n).half() if layout[1] == "t" else torch.empty(n, k).half().t()
    (request,) = requests(Op.MM, a, b, torch.float32, extras=extras)
    least = contiguous_bytes(request.problem)
    assert request.problem.signature.layout.value == layout
    assert request.alignment_bytes == least & -least == alignment


def sized(signature: Signature, m: int, n: int, k: int) -> Problem:
    return Problem(signature=signature, m=m, n=n, k=k)


@pytest.mark.parametrize(
    ("layout", "sizes", "blamed"),
    [
        ("tn", (7, 8, 8), None),
        ("tn", (8, 8, 12), "A is contiguous along k = 12"),
        ("nn", (12, 8, 8), "A is contiguous along m = 12"),
        ("nt", (8, 12, 8), "B is contiguous along n = 12"),
        ("nn", (8, 8, 12), "B is contiguous along k = 12"),
        ("tn", (8, 4, 8), "out is contiguous along n = 4"),
        ("nt", (16, 16, 3), None),
    ],
)
def test_misalignment_names_operand_extent_and_multiple(
    layout: str, sizes: tuple[int, int, int], blamed: str | None
) -> None:
    m, n, k = sizes
    signature = Signature.parse(f"mm/{layout}/bf16xbf16/fp32/bf16")
    reason = misalignment_reason(sized(signature, m, n, k), 16)
    if blamed is None:
        assert reason is None
    else:
        assert reason == f"{blamed}, which must be a multiple of 8 (16 bytes of bf16)"


@pytest.mark.parametrize(
    ("epilogue", "columns"),
    [
        ("swiglu_halves", "n / 2 = 4"),
        ("swiglu_halves_kept", "n / 2 = 4"),
        ("swiglu_halves_gradient", "n = 8"),
        ("swiglu_halves_ups", "n = 8"),
    ],
)
def test_every_part_of_a_result_is_aligned(epilogue: str, columns: str) -> None:
    signature = Signature.parse(f"grouped_mm/tn/bf16xbf16/fp32/bf16/{epilogue}")
    reason = misalignment_reason(Problem(signature=signature, m=8, n=8, k=16, groups=2), 32)
    assert reason == (
        f"out is contiguous along {columns}, which must be a multiple of 16 (32 bytes of bf16)"
    )


def test_alignment_counts_bytes_of_each_operands_own_type() -> None:
    signature = Signature.parse("mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp32")
    assert misalignment_reason(sized(signature, 1, 4, 16), 16) is None
    assert "multiple of 16" in str(misalignment_reason(sized(signature, 1, 4, 8), 16))
    assert "multiple of 4" in str(misalignment_reason(sized(signature, 1, 2, 16), 16))


def test_alignment_of_fp4_counts_two_values_a_byte() -> None:
    signature = Signature.parse("mm/tn/fp4_e2m1xfp4_e2m1/fp32/fp8_e4m3/e4m3_1x16")
    assert misalignment_reason(sized(signature, 1, 16, 64), 16) is None
    assert misalignment_reason(sized(signature, 1, 16, 48), 16) == (
        "A is contiguous along k = 48, which must be a multiple of 32 (16 bytes of fp4_e2m1)"
    )


def test_alignment_of_what_is_added_is_that_of_its_own_type() -> None:
    signature = Signature.parse("mm/tn/fp8_e4m3xfp8_e4m3/fp32/fp8_e4m3/bias")
    assert "out is contiguous along n = 8" in str(
        misalignment_reason(sized(signature, 1, 8, 16), 16)
    )
    assert misalignment_reason(sized(signature, 1, 8, 16), 8) is None
    assert misalignment_reason(sized(signature, 1, 12, 16), 4) is None
    assert misalignment_reason(sized(signature, 1, 16, 16), 32) is not None
