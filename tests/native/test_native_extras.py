"""What the native launcher does with scales, offsets and addends, and what it refuses of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from edges import problem_of
from gemm_arguments import Arguments, random_arguments
from gemm_reference import assert_close

from cpu_kernels import Register, signature
from nvgemm_runtime.bundle.calling_convention import CallingConvention
from nvgemm_runtime.gemm.epilogues import ADD, BIAS, Epilogue
from nvgemm_runtime.gemm.problem import DType, Op, Signature
from nvgemm_runtime.gemm.types import ScaleRecipe
from nvgemm_runtime.launch.loading import native

PLAIN = signature("tn", operand=DType.BF16)
BIASED = signature("tn", operand=DType.BF16, epilogue=BIAS)
BIASED_BATCH = signature("tn", op=Op.BMM, operand=DType.BF16, epilogue=BIAS)
ADDED = signature("tn", operand=DType.BF16, epilogue=ADD)
TENSOR_WISE = signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_TENSOR)
ROW_WISE = signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_ROW, epilogue=BIAS)
MXFP8 = signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.E8M0_1X32)
NVFP4 = signature("tn", operand=DType.FP4_E2M1, scales=ScaleRecipe.E4M3_1X16)
GROUPED = signature("tn", op=Op.GROUPED_MM, operand=DType.BF16)
SCALED_GROUPS = signature(
    "tn", op=Op.GROUPED_MM, operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_ROW
)
K_GROUPED = signature("nt", op=Op.K_GROUPED_MM, operand=DType.BF16)
KEPT = signature(
    "tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=Epilogue.parse("swiglu_oai_halves_kept")
)
GRADIENT = signature(
    "tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=Epilogue.parse("swiglu_halves_gradient")
)
SUMMED = signature(
    "tn",
    op=Op.GROUPED_MM,
    operand=DType.BF16,
    epilogue=Epilogue.parse("swiglu_halves_gradient_sums"),
)
ADDED_TO_GROUPS = signature("tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=ADD)
GATHERED = signature("tt", op=Op.GATHERED_MM, operand=DType.BF16)
GATHERED_GROUPS = signature("tn", op=Op.GATHERED_GROUPED_MM, operand=DType.BF16)
UPS = signature(
    "tn", op=Op.GROUPED_MM, operand=DType.BF16, epilogue=Epilogue.parse("swiglu_halves_ups")
)


@pytest.fixture(scope="module")
def handles(register: Register) -> Callable[[Signature], int]:
    """Handles of kernels that demand 16 bytes, made when first asked for."""
    made: dict[Signature, int] = {}

    def handle(served: Signature) -> int:
        if served not in made:
            _, made[served] = register(served, alignment=16)
        return made[served]

    return handle


def arguments_of(served: Signature, m: int = 16) -> Arguments:
    torch.manual_seed(0)
    return random_arguments(problem_of(served, m, 32, 64), "cpu")


def as_kept(product: torch.Tensor) -> torch.Tensor:
    """A copy of a product where it was kept: in front of what the gate gave."""
    rows, columns = product.shape
    stored = torch.zeros(rows, columns // 2 * 3, dtype=product.dtype)
    stored[:, :columns] = product
    return stored[:, :columns]


def at_odd_address(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that begins so many elements behind an aligned address."""
    memory = torch.zeros(tensor.numel() * tensor.element_size() + 256, dtype=torch.uint8)
    skip = -memory.data_ptr() % 64 + elements * tensor.element_size()
    there = memory[skip:][: tensor.numel() * tensor.element_size()].view(tensor.dtype)
    copy = there.view(tensor.shape)
    copy.copy_(tensor)
    return copy


def floats_in(tensor: torch.Tensor) -> torch.Tensor:
    """Sums for 16 rows in the memory of another tensor."""
    return tensor.reshape(-1)[:32].view(torch.float32).view(16, 1)


Change = Callable[[Arguments], tuple[Any, ...]]

REFUSALS: dict[str, tuple[Signature, Change, type, str]] = {
    "no addend": (BIASED, lambda x: (), TypeError, "addend is missing; the kernel takes"),
    "two addends": (BIASED, lambda x: (*x.others, *x.others), TypeError, "2 extra.*takes 1"),
    "one for a plain kernel": (PLAIN, lambda x: (x.a,), TypeError, "1 extra tensors.*takes 0"),
    "no tensor": (BIASED, lambda x: (3,), TypeError, "addend must be a tensor"),
    "addend's dtype": (BIASED, lambda x: (x.others[0].half(),), TypeError,
        "addend is float16; must be bfloat16"),
    "addend's size": (BIASED, lambda x: (x.others[0][:8],), ValueError,
        r"addend has shape \(8\) and strides \(1\); must be one contiguous row of 32"),
    "expanded too far": (BIASED, lambda x: (x.others[0].expand(17, 32),), ValueError,
        r"addend has shape \(17, 32\) and strides \(0, 1\)"),
    "every second element": (BIASED, lambda x: (torch.ones(64).bfloat16()[::2],), ValueError,
        r"strides \(2\); must be one contiguous row"),
    "row that is not aligned": (BIASED, lambda x: (at_odd_address(x.others[0], 1),), ValueError,
        "addend begins 2 bytes past an aligned address; must begin at a multiple of 16"),
    "row within out": (BIASED, lambda x: (x.out[3],), ValueError, "out overlaps addend"),
    "row for a matrix": (ADDED, lambda x: (x.others[0][0],), ValueError, "addend has 1 dimensions"),
    "matrix's shape": (ADDED, lambda x: (x.others[0][:8],), ValueError,
        r"addend has shape \(8, 32\); must have that of out, \(16, 32\)"),
    "column-major matrix": (ADDED, lambda x: (x.others[0].T.contiguous().T,), ValueError,
        "addend has stride 16 along dimension 1; must be 1"),
    "one row expanded": (ADDED, lambda x: (x.others[0][:1].expand(16, 32),), ValueError,
        "addend has stride 0 along dimension 0"),
    "added in place": (ADDED, lambda x: (x.out,), ValueError, "out overlaps addend"),
    "no matrix for groups": (ADDED_TO_GROUPS, lambda x: x.others[:1], TypeError,
        "addend is missing"),
    "a row for each group in place of a matrix": (ADDED_TO_GROUPS,
        lambda x: (x.others[0], x.others[1][:3]), ValueError,
        r"addend has shape \(3, 32\); must have that of out, \(16, 32\)"),
    "one row for all groups": (ADDED_TO_GROUPS,
        lambda x: (x.others[0], x.others[1][:1].expand(16, 32)), ValueError,
        "addend has stride 0 along dimension 0"),
    "dtype of a matrix for groups": (ADDED_TO_GROUPS,
        lambda x: (x.others[0], x.others[1].half()), TypeError,
        "addend is float16; must be bfloat16"),
    "rows of a matrix for groups that are not aligned": (ADDED_TO_GROUPS,
        lambda x: (x.others[0], torch.ones(16, 36).bfloat16()[:, :32]), ValueError,
        "addend has stride 36"),
    "scale's dtype": (TENSOR_WISE, lambda x: (x.others[0].half(), x.others[1]), TypeError,
        "scale_a is float16; must be float32"),
    "two tensor-wise scales": (TENSOR_WISE, lambda x: (x.others[0], torch.ones(2)), ValueError,
        r"scale_b has shape \(2\) and strides \(1\); must have 1 contiguous elements"),
    "rows of scale_a": (ROW_WISE, lambda x: (x.others[0][:3], *x.others[1:]), ValueError,
        r"scale_a has shape \(3, 1\).*of shape \(16, 1\), one for each row of a"),
    "scale_b along the wrong dimension": (ROW_WISE,
        lambda x: (x.others[0], x.others[1].T, x.others[2]), ValueError,
        r"scale_b has shape \(32, 1\).*of shape \(1, 32\), one for each column of b"),
    "scale_a in one dimension": (ROW_WISE, lambda x: (x.others[0][:, 0], *x.others[1:]), ValueError,
        "scale_a has 1 dimensions"),
    "row-wise scales that are not aligned": (ROW_WISE,
        lambda x: (at_odd_address(x.others[0], 1), *x.others[1:]), ValueError,
        "scale_a begins 4 bytes past an aligned address; must begin at a multiple of 16"),
    "scales of rows of groups in two dimensions": (SCALED_GROUPS,
        lambda x: (x.others[0][:, None], *x.others[1:]), ValueError,
        "scale_a has 2 dimensions"),
    "one scale of columns for all groups": (SCALED_GROUPS,
        lambda x: (x.others[0], x.others[1][:1], x.others[2]), ValueError,
        r"scale_b has shape \(1, 32\).*of shape \(\d+, 32\), one for each column of each matrix"),
    "scales of columns across groups": (SCALED_GROUPS,
        lambda x: (x.others[0], x.others[1].T.contiguous().T, x.others[2]), ValueError,
        r"scale_b has shape \(\d+, 32\) and strides \(1, \d+\); must be contiguous"),
    "a scale less than groups have rows": (SCALED_GROUPS,
        lambda x: (x.others[0][:15], *x.others[1:]), ValueError,
        r"scale_a has shape \(15\).*of shape \(16\), one for each row of a"),
    "scales of groups that are not aligned": (SCALED_GROUPS,
        lambda x: (x.others[0], at_odd_address(x.others[1], 1), x.others[2]), ValueError,
        "scale_b begins 4 bytes past an aligned address; must begin at a multiple of 16"),
    "number of block scales": (MXFP8, lambda x: (x.others[0][:256], x.others[1]), ValueError,
        r"scale_a has shape \(256\).*must have 512 contiguous elements: 16 rows and k = 64 in "
        "blocks of 32, swizzled"),
    "dtype of block scales": (MXFP8, lambda x: (x.others[0].view(torch.float8_e4m3fn), x.others[1]),
        TypeError, "scale_a is float8_e4m3fn; must be float8_e8m0fnu"),
    "block scales that are no block": (MXFP8,
        lambda x: (torch.cat([x.others[0]] * 2).view(512, 2)[:, 0], x.others[1]), ValueError,
        r"scale_a has shape \(512\) and strides \(2\)"),
    "block scales that are not aligned": (MXFP8,
        lambda x: (x.others[0], at_odd_address(x.others[1].view(torch.uint8), 16).view(
            torch.float8_e8m0fnu)), ValueError,
        "scale_b begins 16 bytes past an aligned address; must begin at a multiple of 32"),
    "scales of packed values count values": (NVFP4, lambda x: (x.others[0][:256], x.others[1]),
        ValueError, "must have 512 contiguous elements: 16 rows and k = 64 in blocks of 16"),
    "no rows": (GATHERED, lambda x: (), TypeError,
        "rows is missing; the kernel takes a, b, out, rows"),
    "rows of another shape": (GATHERED, lambda x: (x.others[0][:8],), ValueError,
        r"rows have shape \(8, 64\).*contiguous and of the shape of a, \(16, 64\)"),
    "rows that are transposed": (GATHERED, lambda x: (x.others[0].T.contiguous().T,), ValueError,
        r"rows have shape \(16, 64\) and strides \(1, 16\)"),
    "rows' dtype": (GATHERED, lambda x: (x.others[0].long(),), TypeError,
        "rows is int64; must be int32"),
    "no rows for groups": (GATHERED_GROUPS, lambda x: x.others[:1], TypeError,
        "rows is missing; the kernel takes a, b, out, offsets, rows"),
    "rows for groups that are not gathered": (GROUPED, lambda x: (*x.others, x.others[0]),
        TypeError, "2 extra tensors.*takes 1"),
    "a row less than the result has": (GATHERED_GROUPS,
        lambda x: (x.others[0], x.others[1][:15]), ValueError,
        r"rows has shape \(15\).*must have 16 contiguous elements: one for each row of out"),
    "rows for groups with gaps": (GATHERED_GROUPS,
        lambda x: (x.others[0], torch.zeros(32, dtype=torch.int32)[::2]), ValueError,
        r"rows has shape \(16\) and strides \(2\)"),
    "dtype of rows for groups": (GATHERED_GROUPS,
        lambda x: (x.others[0], x.others[1].long()), TypeError, "rows is int64; must be int32"),
    "rows for groups in the result": (GATHERED_GROUPS,
        lambda x: (x.others[0], x.out[0].view(torch.int32)), ValueError, "out overlaps rows"),
    "number of offsets of gathered groups": (GATHERED_GROUPS,
        lambda x: (x.others[0][:2], x.others[1]), ValueError,
        r"offsets have shape \(2\).*of shape \(3\), one end for each matrix of b"),
    "number of offsets": (GROUPED, lambda x: (x.others[0][:2],), ValueError,
        r"offsets have shape \(2\).*must be contiguous and of shape \(3\)"),
    "number of offsets of groups along k": (K_GROUPED, lambda x: (x.others[0][:2],), ValueError,
        r"offsets have shape \(2\).*of shape \(3\), one end for each matrix of out"),
    "offsets' dtype": (GROUPED, lambda x: (x.others[0].long(),), TypeError,
        "offsets is int64; must be int32"),
    "rows of a bias for each group, kept": (KEPT, lambda x: (x.others[0], x.others[1][:2]),
        ValueError, r"addend has shape \(2, 32\)"),
    "no product": (GRADIENT, lambda x: x.others[:1], TypeError, "addend is missing"),
    "product of what the gate gave": (GRADIENT, lambda x: (x.others[0], x.others[1][:, :32]),
        ValueError, r"addend has shape \(16, 32\); must have that of out, \(16, 64\)"),
    "product's dtype": (GRADIENT, lambda x: (x.others[0], x.others[1].half()), TypeError,
        "addend is float16; must be bfloat16"),
    "column-major product": (GRADIENT, lambda x: (x.others[0], x.others[1].T.contiguous().T),
        ValueError, "addend has stride 16 along dimension 1; must be 1"),
    "one row of a product": (GRADIENT, lambda x: (x.others[0], x.others[1][:1].expand(16, 64)),
        ValueError, "addend has stride 0 along dimension 0"),
    "product that is not aligned": (GRADIENT,
        lambda x: (x.others[0], at_odd_address(x.others[1], 1)), ValueError,
        "addend begins 2 bytes past an aligned address; must begin at a multiple of 16"),
    "product in rows that are not aligned": (GRADIENT,
        lambda x: (x.others[0], torch.ones(16, 68).bfloat16()[:, :64]), ValueError,
        "addend has stride 68"),
    "gradients in place": (GRADIENT, lambda x: (x.others[0], x.out), ValueError,
        "out overlaps addend"),
    "no sums": (SUMMED, lambda x: x.others[:2], TypeError,
        "sums is missing; the kernel takes a, b, out, offsets, addend, sums"),
    "sums for a gradient without": (GRADIENT, lambda x: (*x.others, torch.zeros(16, 1)), TypeError,
        "3 extra tensors"),
    "sums of fewer rows": (SUMMED, lambda x: (*x.others[:2], torch.zeros(8, 1)), ValueError,
        r"sums have shape \(8, 1\).*contiguous and of shape \(16, 1\), a part for each 64"),
    "a sum of each element": (SUMMED, lambda x: (*x.others[:2], torch.zeros(16, 32)), ValueError,
        r"sums have shape \(16, 32\)"),
    "sums in one dimension": (SUMMED, lambda x: (*x.others[:2], torch.zeros(16)), ValueError,
        "sums has 1 dimensions"),
    "sums' dtype": (SUMMED, lambda x: (*x.others[:2], torch.zeros(16, 1).bfloat16()), TypeError,
        "sums is bfloat16; must be float32"),
    "sums with gaps": (SUMMED, lambda x: (*x.others[:2], torch.zeros(16, 2)[:, :1]), ValueError,
        r"sums have shape \(16, 1\) and strides \(2, 1\)"),
    "sums in the result": (SUMMED, lambda x: (*x.others[:2], floats_in(x.out)), ValueError,
        "out overlaps sums"),
    "sums in what is read": (SUMMED, lambda x: (*x.others[:2], floats_in(x.others[1])), ValueError,
        "sums overlaps addend.*pass sums with separate memory"),
    "sums in a": (SUMMED, lambda x: (*x.others[:2], floats_in(x.a)), ValueError,
        "sums overlaps a:"),
    "sums in b": (SUMMED, lambda x: (*x.others[:2], floats_in(x.b.mT)), ValueError,
        "sums overlaps b:"),
    "sums in offsets": (SUMMED,
        lambda x: ((room := torch.zeros(16, 1))[:3, 0].view(torch.int32), x.others[1], room),
        ValueError, "sums overlaps offsets"),
    "no gates": (UPS, lambda x: x.others[:1], TypeError, "addend is missing"),
    "gates of the result's shape": (UPS, lambda x: (x.others[0], torch.ones(16, 64).bfloat16()),
        ValueError, r"addend has shape \(16, 64\); must have \(16, 32\), a gate for each element "
        "of the product"),
    "gates of fewer rows": (UPS, lambda x: (x.others[0], x.others[1][:8]), ValueError,
        r"addend has shape \(8, 32\); must have \(16, 32\)"),
    "gates in one dimension": (UPS, lambda x: (x.others[0], x.others[1][0]), ValueError,
        "addend has 1 dimensions"),
    "gates' dtype": (UPS, lambda x: (x.others[0], x.others[1].half()), TypeError,
        "addend is float16; must be bfloat16"),
    "column-major gates": (UPS, lambda x: (x.others[0], x.others[1].T.contiguous().T), ValueError,
        "addend has stride 16 along dimension 1; must be 1"),
    "one row of gates": (UPS, lambda x: (x.others[0], x.others[1][:1].expand(16, 32)), ValueError,
        "addend has stride 0 along dimension 0"),
    "gates that are not aligned": (UPS,
        lambda x: (x.others[0], at_odd_address(x.others[1], 1)), ValueError,
        "addend begins 2 bytes past an aligned address; must begin at a multiple of 16"),
    "gates in rows that are not aligned": (UPS,
        lambda x: (x.others[0], torch.ones(16, 36).bfloat16()[:, :32]), ValueError,
        "addend has stride 36"),
    "gates that ups overwrite": (UPS, lambda x: (x.others[0], x.out[:, :32]), ValueError,
        "out overlaps addend"),
    "gates that what they give overwrites": (UPS, lambda x: (x.others[0], x.out[:, 32:]),
        ValueError, "out overlaps addend"),
    "gaps between offsets": (GROUPED, lambda x: (torch.zeros(6, dtype=torch.int32)[::2],),
        ValueError, r"offsets have shape \(3\) and strides \(2\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(lib: native.Native, handles: Callable[[Signature], int], case: str) -> None:
    served, change, kind, message = REFUSALS[case]
    arguments = arguments_of(served)
    operands = arguments.operands()
    with pytest.raises(kind, match=message):
        lib.launch(handles(served), *operands, *change(arguments))
    if kind is ValueError:
        assert lib.try_launch(handles(served), *operands, *change(arguments)) is False
    assert arguments.out.isnan().all(), "something was written"


@pytest.mark.parametrize("rows", [16, 1])
def test_a_sum_for_groups_takes_the_place_of_what_is_added(
    lib: native.Native, handles: Callable[[Signature], int], rows: int
) -> None:
    arguments = arguments_of(ADDED_TO_GROUPS, rows)
    lib.launch(handles(ADDED_TO_GROUPS), *arguments.operands(), *arguments.others)
    a, b, out = arguments.operands()
    offsets, added = arguments.others
    lib.launch(handles(ADDED_TO_GROUPS), a, b, added, offsets, added)
    assert torch.equal(added[: offsets[-1]], out[: offsets[-1]])
    memory = torch.zeros(rows + 1, 32, dtype=torch.bfloat16)
    if rows > 1:
        with pytest.raises(ValueError, match="out overlaps addend"):
            lib.launch(handles(ADDED_TO_GROUPS), a, b, memory[1:], offsets, memory[:-1])


@pytest.mark.parametrize(
    ("served", "shapes"),
    [
        (BIASED, [(32,), (1, 32), (16, 32)]),
        (BIASED_BATCH, [(32,), (1, 32), (16, 32), (1, 1, 32), (3, 16, 32), (3, 1, 32)]),
    ],
    ids=lambda value: value.key if isinstance(value, Signature) else "",
)
def test_a_row_comes_in_every_shape_that_expand_gives(
    lib: native.Native,
    handles: Callable[[Signature], int],
    served: Signature,
    shapes: list[tuple[int, ...]],
) -> None:
    arguments = arguments_of(served)
    for shape in shapes:
        arguments.out.fill_(float("nan"))
        lib.launch(handles(served), *arguments.operands(), arguments.others[0].expand(shape))
        assert_close(arguments.out, arguments)


@pytest.mark.parametrize(
    "served", [ADDED_TO_GROUPS, KEPT, GRADIENT, UPS], ids=lambda served: served.key
)
def test_groups_take_wider_matrices(
    lib: native.Native, handles: Callable[[Signature], int], served: Signature
) -> None:
    """A product where it was kept, and a result between other columns."""
    arguments = arguments_of(served)
    offsets, added = arguments.others
    added = as_kept(added) if served is GRADIENT else added
    wide = torch.full((16, arguments.out.shape[1] + 16), 7.0).bfloat16()
    out = wide[:, 8:-8]
    lib.launch(handles(served), arguments.a, arguments.b, out, offsets, added)
    assert_close(out, arguments)
    assert (wide[:, :8] == 7).all()
    assert (wide[:, -8:] == 7).all()


def test_sums_of_rows_are_written_beside_the_gradient(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    """In some of the parts; those of rows in no group are not."""
    torch.manual_seed(0)
    arguments = random_arguments(problem_of(SUMMED, 24, 200, 64), "cpu")
    offsets, _, sums = arguments.others
    offsets -= 1
    offsets.clamp_(min=0)
    assert sums.shape == (24, 4)
    lib.launch(handles(SUMMED), *arguments.operands(), *arguments.others)
    assert_close(arguments.out[:23], arguments.first_rows(23))
    assert [bool(part.any()) for part in sums.T] == [True, True, False, False]
    assert not sums[23].any()


def test_gates_may_lie_in_front_of_the_result(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    """Gates, ups and what they give side by side, in rows that are 3 n apart."""
    arguments = arguments_of(UPS)
    offsets, gates = arguments.others
    stored = torch.full((16, 3 * 32), float("nan")).bfloat16()
    stored[:, :32] = gates
    read, out = stored[:, :32], stored[:, 32:]
    for launched in (lib.launch, lib.try_launch):
        out.fill_(float("nan"))
        launched(handles(UPS), arguments.a, arguments.b, out, offsets, read)
        assert_close(out, arguments)
        assert torch.equal(read, gates)


def test_gates_that_reach_into_the_result_are_refused(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    arguments = arguments_of(UPS)
    stored = torch.zeros(16, 3 * 32).bfloat16()
    out = stored[:, 32:]
    for begin in (8, 80):  # the last 16 columns, and the first of the next row
        gates = stored.view(-1)[begin:].as_strided((15, 32), (96, 1))
        operands = arguments.a[:15], arguments.b, out[:15], arguments.others[0].clamp(max=15), gates
        with pytest.raises(ValueError, match="out overlaps addend"):
            lib.launch(handles(UPS), *operands)
    assert not stored.any()


PARTS_REFUSED = {
    "gates and ups that the gate's column follows at no aligned address": (
        KEPT, 24, r"out .*\b36\b"),
    "halves of gradients": (
        GRADIENT, 12, r"b has 12 columns, and out twice as many; n must be a multiple of 8 "
        r"\(16 bytes\)"),
    "ups that what they give follows at no aligned address": (
        UPS, 12, r"b has 12 columns, and out twice as many; n must be a multiple of 8"),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS_REFUSED)
def test_refuses_parts_that_are_not_aligned(
    lib: native.Native, handles: Callable[[Signature], int], case: str
) -> None:
    served, n, message = PARTS_REFUSED[case]
    arguments = random_arguments(problem_of(served, 16, n, 64), "cpu")
    with pytest.raises(ValueError, match=message):
        lib.launch(handles(served), *arguments.operands(), *arguments.others)
    assert not lib.try_launch(handles(served), *arguments.operands(), *arguments.others)
    assert arguments.out.isnan().all(), "something was written"


def test_kernels_without_alignment_take_any_parts(lib: native.Native, register: Register) -> None:
    for served, n in ((KEPT, 6), (GRADIENT, 3), (SUMMED, 3), (UPS, 3)):
        _, handle = register(served, alignment=1)
        arguments = random_arguments(problem_of(served, 16, n, 5), "cpu")
        lib.launch(handle, *arguments.operands(), *arguments.others)
        assert_close(arguments.out, arguments)


@pytest.mark.parametrize("served", [KEPT, GRADIENT, SUMMED, UPS], ids=lambda served: served.key)
def test_columns_of_b_and_out_belong_together(
    lib: native.Native, handles: Callable[[Signature], int], served: Signature
) -> None:
    arguments = arguments_of(served)
    columns = {KEPT: "n + n / 2", GRADIENT: "2 n", SUMMED: "2 n", UPS: "2 n"}[served]
    wrong = arguments.out[:, :-8]
    with pytest.raises(
        ValueError,
        match=rf"must be \(m, k\), \(groups, k, n\) and \(m, {columns.replace('+', '.')}\)",
    ):
        lib.launch(handles(served), arguments.a, arguments.b, wrong, *arguments.others)


def test_what_multiplies_what_it_reads_is_zero_without_products(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    """A bias would be the result."""
    for served in (GRADIENT, SUMMED, UPS):
        arguments = arguments_of(served)
        a, b = arguments.a[:, :0], arguments.b[:, :0]
        lib.launch(handles(served), a, b, arguments.out, *arguments.others)
        assert not arguments.out.any()
    kept = arguments_of(KEPT)
    with pytest.raises(ValueError, match="k is 0"):
        lib.launch(handles(KEPT), kept.a[:, :0], kept.b[:, :0], kept.out, *kept.others)


def test_swizzled_scales_come_in_any_shape(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    arguments = arguments_of(MXFP8)
    for shape in ((512,), (128, 4), (1, 32, 4, 4), (2, 2, 2, 64)):
        arguments.out.fill_(float("nan"))
        scales = (scale.view(shape) for scale in arguments.others)
        lib.launch(handles(MXFP8), *arguments.operands(), *scales)
        assert_close(arguments.out, arguments)


@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_kernels_without_strides_refuse_gaps(
    lib: native.Native, handles: Callable[[Signature], int], operand: str
) -> None:
    arguments = arguments_of(MXFP8)
    tensors = dict(zip(("a", "b", "out"), arguments.operands()))
    tensor = tensors[operand]
    rows = tensor if operand != "b" else tensor.T
    wide = torch.zeros(rows.shape[0], 2 * rows.shape[1]).to(tensor.dtype)[:, : rows.shape[1]]
    tensors[operand] = wide if operand != "b" else wide.T
    with pytest.raises(ValueError, match=f"{operand} has shape .* must have no gaps"):
        lib.launch(handles(MXFP8), *tensors.values(), *arguments.others)
    assert not lib.try_launch(handles(MXFP8), *tensors.values(), *arguments.others)


@pytest.mark.parametrize("served", [BIASED, MXFP8, GROUPED], ids=lambda served: served.key)
def test_a_workspace_is_passed(lib: native.Native, register: Register, served: Signature) -> None:
    _, handle = register(served, alignment=16, workspace_bytes=4096)
    arguments = arguments_of(served)
    lib.launch(handle, *arguments.operands(), *arguments.others)
    assert_close(arguments.out, arguments)


def test_a_workspace_that_cannot_be_had_is_an_error(lib: native.Native, register: Register) -> None:
    id, _ = register(PLAIN, alignment=16, workspace_bytes=64)
    kernel = lib.register_kernel(
        id="greedy " + id,
        function_address=1,
        signature=PLAIN,
        alignment_bytes=16,
        target=None,
        workspace_bytes=2**62,
        convention=CallingConvention(
            name="gemm", parameters=("a", "b", "out", "workspace", "stream")
        ),
    )
    with pytest.raises(RuntimeError, match="aoti_torch_empty_strided failed"):
        lib.launch(kernel, *arguments_of(PLAIN).operands())


@pytest.mark.parametrize("served", [BIASED, ADDED], ids=lambda served: served.key)
def test_an_empty_sum_with_an_addend_is_left_to_torch(
    lib: native.Native, handles: Callable[[Signature], int], served: Signature
) -> None:
    arguments = arguments_of(served)
    a, b = arguments.a[:, :0], arguments.b[:0]
    with pytest.raises(ValueError, match="k is 0, so the result is the addend, which"):
        lib.launch(handles(served), a, b, arguments.out, *arguments.others)
    assert not lib.try_launch(handles(served), a, b, arguments.out, *arguments.others)


def test_no_rows_and_no_groups_need_no_launch(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    arguments = arguments_of(GROUPED)
    a, b, out = arguments.operands()
    (offsets,) = arguments.others
    lib.launch(handles(GROUPED), a[:0], b, out[:0], offsets)
    assert out.isnan().all()
    lib.launch(handles(GROUPED), a, b[:0], out, offsets[:0])
    assert (out == 0).all()


def test_groups_along_k_that_have_no_k_give_zeros(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    arguments = arguments_of(K_GROUPED)
    a, b, out = arguments.operands()
    ends = torch.tensor([0, 64, 64], dtype=torch.int32)
    lib.launch(handles(K_GROUPED), a, b, out, ends)
    assert (out[0] == 0).all()
    assert (out[2] == 0).all()
    torch.testing.assert_close(out[1].float(), a.float() @ b.float(), rtol=2**-7, atol=0.1)
    out.fill_(float("nan"))
    lib.launch(handles(K_GROUPED), a[:, :0], b[:0], out, ends * 0)
    assert (out == 0).all()


def test_groups_along_k_want_a_matrix_for_each_end(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    arguments = arguments_of(K_GROUPED)
    a, b, out = arguments.operands()
    with pytest.raises(ValueError, match=r"must be \(m, k\), \(k, n\) and \(groups, m, n\)"):
        lib.launch(handles(K_GROUPED), a, b[:8], out, *arguments.others)
    with pytest.raises(ValueError, match=r"out has 2 dimensions.*must have 3"):
        lib.launch(handles(K_GROUPED), a, b, out[0], *arguments.others)


@pytest.mark.parametrize(("m", "k"), [(16, 8), (1, 8), (16, 1), (1, 1)])
@pytest.mark.parametrize("pitch", [0, 3])
def test_weights_and_rows_begin_anywhere(
    lib: native.Native, handles: Callable[[Signature], int], m: int, k: int, pitch: int
) -> None:
    """They are read by the element, and b may have any number of rows."""
    torch.manual_seed(0)
    a = at_odd_address(torch.randn(m, k + pitch), 1)[:, :k]
    rows = at_odd_address(torch.randint(-1, 41, (m, k), dtype=torch.int32), 1)
    b, out = torch.randn(40, 48).bfloat16()[:, :32], torch.empty(m, 32).bfloat16()
    inside = (rows >= 0) & (rows < 40)
    taken = b[rows.clamp(0, 39).long()].float() * inside[..., None]
    wanted = (a[..., None] * taken).sum(1)
    for weights in (a, a.T.contiguous().T if 1 in (m, k) else a):
        lib.launch(handles(GATHERED), weights, b, out, rows)
        torch.testing.assert_close(out.float(), wanted, rtol=2**-7, atol=2**-6)
    out.fill_(float("nan"))
    lib.launch(handles(GATHERED), a, b[:0], out, rows)
    assert not out.any()
    out.fill_(float("nan"))
    lib.launch(handles(GATHERED), a[:, :0], b, out, rows[:, :0])
    assert not out.any()


def test_gathered_rows_have_the_results_columns_and_memory_of_their_own(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    a, rows = torch.randn(16, 8), torch.zeros(16, 8, dtype=torch.int32)
    b, out = torch.randn(16, 32).bfloat16(), torch.empty(16, 32).bfloat16()
    with pytest.raises(ValueError, match=r"must be \(m, k\), \(any, n\) and \(m, n\)"):
        lib.launch(handles(GATHERED), a, b[:, :16], out, rows)
    with pytest.raises(ValueError, match="out overlaps b"):
        lib.launch(handles(GATHERED), a, b, b, rows)
    with pytest.raises(ValueError, match="out overlaps rows"):
        lib.launch(handles(GATHERED), a, b, out, out.flatten()[:256].view(torch.int32).view(16, 8))
    with pytest.raises(ValueError, match=r"out has 12 elements along dimension 1.*multiple of 8"):
        lib.launch(handles(GATHERED), a, b[:, :12], out[:, :12], rows)
    with pytest.raises(ValueError, match="a has stride 16 along dimension 1; must be 1"):
        lib.launch(handles(GATHERED), a.T.contiguous().T, b, out, rows)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_groups_take_rows_of_any_number_of_tokens(
    lib: native.Native, handles: Callable[[Signature], int], tokens: int
) -> None:
    arguments = arguments_of(GATHERED_GROUPS)
    _, b, out = arguments.operands()
    offsets, _ = arguments.others
    a = torch.randn(tokens, 72).bfloat16()[:, :64]
    rows = at_odd_address(torch.randint(tokens, (16,), dtype=torch.int32), 1)
    lib.launch(handles(GATHERED_GROUPS), a, b, out, offsets, rows)
    begin = 0
    for group, end in enumerate(offsets.tolist()):
        wanted = a[rows[begin:end].long()].float() @ b[group].float()
        torch.testing.assert_close(out[begin:end].float(), wanted, rtol=2**-7, atol=0.1)
        begin = end
    lib.launch(handles(GATHERED_GROUPS), a, b, out[:0], offsets * 0, rows[:0])
    lib.launch(handles(GATHERED_GROUPS), a[:0], b, out, offsets, rows)
    assert not out.any(), "of no token"


def test_gathered_groups_have_the_columns_and_memory_of_their_result(
    lib: native.Native, handles: Callable[[Signature], int]
) -> None:
    arguments = arguments_of(GATHERED_GROUPS)
    a, b, out = arguments.operands()
    with pytest.raises(ValueError, match=r"must be \(any, k\), \(groups, k, n\) and \(m, n\)"):
        lib.launch(handles(GATHERED_GROUPS), a[:, :32], b, out, *arguments.others)
    with pytest.raises(ValueError, match="out overlaps a"):
        lib.launch(handles(GATHERED_GROUPS), out[:, :32], b[:, :32], out, *arguments.others)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (("a", "b", "c", "stream"), "no parameter is called 'c'"),
        (("a", "b", "", "stream"), "no parameter is called ''"),
        (("a",) * 14, "takes 14 parameters; must be at most 13"),
    ],
)
def test_refuses_to_register(lib: native.Native, parameters: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lib.register_kernel(
            id="bad",
            function_address=1,
            signature=PLAIN,
            alignment_bytes=16,
            target=None,
            convention=CallingConvention(name="gemm", parameters=parameters),
        )
