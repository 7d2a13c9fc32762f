from __future__ import annotations

import pytest
import torch

from nvgemm_runtime.gemm.extras import Extras
from nvgemm_runtime.gemm.operands import requests
from nvgemm_runtime.gemm.problem import DType, Op, Problem
from nvgemm_runtime.gemm.roles import (
    Role,
    contiguous_bytes,
    extra_roles,
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
    "mm/tn/fp4_e2m1xfp4_e2m1/fp32/bf16/e4m3_1x16/m130n5k80": {
        Role.A: (DType.FP4_E2M1, (130, 40)),
        Role.B: (DType.FP4_E2M1, (40, 5)),
        Role.SCALE_A: (DType.FP8_E4M3, (256 * 8,)),
        Role.SCALE_B: (DType.FP8_E4M3, (128 * 8,)),
        Role.OUT: (DType.BF16, (130, 5)),
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
@pytest.mark.parametrize("extras", [Extras(), Extras(addend=torch.empty(4, 24))])
def test_contiguous_extents_align_what_was_just_allocated(
    layout: str, alignment: int, extras: Extras
) -> None:
    """To no more than 64 bytes on a CPU."""
    m, n, k = 4, 24, 16
    a = torch.empty(m, k).half() if layout[0] == "t" else torch.empty(k, m).half().t()
    b = torch.empty(k, n).half() if layout[1] == "t" else torch.empty(n, k).half().t()
    (request,) = requests(Op.MM, a, b, torch.float32, extras=extras)
    least = contiguous_bytes(request.problem)
    assert request.problem.signature.layout.value == layout
    assert request.alignment_bytes == least & -least == alignment
