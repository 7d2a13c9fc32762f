"""Tensors as problems: layouts, alignment, and operands that no kernel can take."""

from __future__ import annotations

import pytest
import torch

from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.operands import Request, requests, torch_dtype, usual_out_dtype
from nvgemm_runtime.gemm.problem import DType, Op


def of_layout(*shape: int, row_major: bool, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    tensor = torch.zeros(*shape, dtype=dtype)
    return tensor if row_major else tensor.mT.contiguous().mT


def only(asked: tuple[Request, ...]) -> Request:
    assert len(asked) == 1, asked
    return asked[0]


@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("op", [Op.MM, Op.BMM])
def test_layouts_are_told_by_strides(layout: str, op: Op) -> None:
    lead = (3,) if op is Op.BMM else ()
    a = of_layout(*lead, 16, 64, row_major=layout[0] == "t")
    b = of_layout(*lead, 64, 32, row_major=layout[1] == "t")
    asked = only(requests(op, a, b))
    sizes = "b3m16n32k64" if op is Op.BMM else "m16n32k64"
    assert asked.problem.key == f"{op.value}/{layout}/bf16xbf16/fp32/bf16/{sizes}"


def test_slices_keep_their_layout() -> None:
    buffer = torch.zeros(64, 128)
    asked = only(requests(Op.MM, buffer[:16, :64], buffer[:, 64:].T[:64, :32]))
    assert asked.problem.key == "mm/tn/fp32xfp32/fp32/fp32/m16n32k64"


@pytest.mark.parametrize(
    ("m", "n", "k", "layouts"),
    [
        (1, 32, 64, ["tt", "nt"]),
        (16, 32, 1, ["nt", "tt", "tn", "nn"]),
        (16, 1, 64, ["tn", "tt"]),
        (16, 32, 64, ["tt"]),
    ],
)
def test_a_single_row_or_column_is_in_both_layouts(
    m: int, n: int, k: int, layouts: list[str]
) -> None:
    asked = requests(Op.MM, torch.zeros(m, k), torch.zeros(k, n), out=torch.zeros(m, n))
    assert {request.problem.signature.layout.value for request in asked} == set(layouts)
    alignments = [request.alignment_bytes for request in asked]
    assert alignments == sorted(alignments, reverse=True)


def test_the_better_aligned_reading_of_a_row_comes_first() -> None:
    a, b = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(64, 32, dtype=torch.bfloat16)
    first, second = requests(Op.MM, a, b)
    assert (first.problem.signature.layout.value, first.alignment_bytes) == ("tt", 64)
    assert (second.problem.signature.layout.value, second.alignment_bytes) == ("nt", 2)


def aligned_zeros(*shape: int, offset: int = 0, row: int | None = None) -> torch.Tensor:
    """A bf16 tensor that begins ``offset`` elements behind a multiple of 256 bytes."""
    row = row or shape[-1]
    count = shape[0] * row if len(shape) == 2 else shape[0] * shape[1] * row
    buffer = torch.zeros(count + 256, dtype=torch.bfloat16)
    begin = (-buffer.data_ptr() % 256) // 2 + offset
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return buffer.as_strided(shape, strides, begin)


@pytest.mark.parametrize(
    ("a", "alignment"),
    [
        (aligned_zeros(16, 128), 256),
        (aligned_zeros(16, 128, offset=8), 16),
        (aligned_zeros(16, 128, offset=1), 2),
        (aligned_zeros(16, 128, row=132), 8),
        (aligned_zeros(16, 128, row=129), 2),
        (aligned_zeros(1, 128, row=129), 256),
    ],
)
def test_alignment_is_that_of_pointers_and_strides(a: torch.Tensor, alignment: int) -> None:
    b, out = aligned_zeros(128, 128), aligned_zeros(a.shape[0], 128)
    assert requests(Op.MM, a, b, out=out)[0].alignment_bytes == alignment


def test_alignment_is_that_of_contiguous_extents_too() -> None:
    """Kernels are compiled for extents of whole vectors, whatever the stride."""
    a, b = aligned_zeros(16, 100, row=128), aligned_zeros(100, 128)
    assert only(requests(Op.MM, a, b)).alignment_bytes == 8


def test_batch_strides_count_where_there_is_a_batch() -> None:
    a, b = aligned_zeros(3, 15, 128, row=132), aligned_zeros(3, 128, 128)
    assert only(requests(Op.BMM, a, b)).alignment_bytes == 8
    single = requests(Op.BMM, a[:1, :1], b[:1])
    assert single[0].alignment_bytes == 256


def test_the_output_counts_as_it_is_or_as_it_would_be_made() -> None:
    a, b = aligned_zeros(16, 128), aligned_zeros(128, 132)
    assert only(requests(Op.MM, a, b[:, :128])).alignment_bytes == 8, "b's stride"
    b = aligned_zeros(128, 128)
    out = aligned_zeros(16, 128, offset=2)
    assert only(requests(Op.MM, a, b)).alignment_bytes == 256
    assert only(requests(Op.MM, a, b, out=out)).alignment_bytes == 4
    assert only(requests(Op.MM, a, b[:, :100].contiguous())).alignment_bytes == 8


@pytest.mark.parametrize(
    ("a", "b", "out", "message"),
    [
        (torch.zeros(4, 4).double(), torch.zeros(4, 4), None, "no kernel takes torch.float64"),
        (torch.zeros(4, 4), torch.zeros(4, 4).bool(), None, "no kernel takes torch.bool"),
        (torch.zeros(4, 8)[:, ::2], torch.zeros(4, 4), None, r"a is contiguous along neither"),
        (torch.zeros(4, 4), torch.zeros(4).expand(4, 4), None, r"b .* share memory .*\[0, 1\]"),
        (torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(4, 4).T, "out is not row-major"),
        (
            torch.zeros(0, 4),
            torch.zeros(4, 4),
            None,
            r"nothing to compute because m is 0; .* zeros",
        ),
        (
            torch.zeros(4, 0),
            torch.zeros(0, 4),
            None,
            r"nothing to compute because k is 0; .* zeros",
        ),
    ],
)
def test_operands_that_no_kernel_can_take_are_refused(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(NoKernelError, match=message):
        requests(Op.MM, a, b, out=out)


@pytest.mark.parametrize("dtype", list(DType))
def test_every_type_has_a_name_in_torch_and_back(dtype: DType) -> None:
    a = torch.zeros(16, 16, dtype=torch_dtype(dtype))
    b = torch.zeros(16, 16, dtype=torch_dtype(dtype))
    signature = only(requests(Op.MM, a, b)).problem.signature
    assert signature.a is signature.b is dtype
    assert signature.accumulator is (DType.INT32 if dtype.is_integer else DType.FP32)
    assert torch_dtype(signature.out) is usual_out_dtype(a.dtype)


def test_the_result_has_the_type_that_is_named() -> None:
    a, b = torch.zeros(8, 8, dtype=torch.int8), torch.zeros(8, 8, dtype=torch.int8)
    assert only(requests(Op.MM, a, b)).problem.signature.out is DType.INT32
    assert only(requests(Op.MM, a, b, torch.float32)).problem.signature.out is DType.FP32
    out = torch.zeros(8, 8, dtype=torch.float16)
    assert only(requests(Op.MM, a, b, out=out)).problem.signature.out is DType.FP16
