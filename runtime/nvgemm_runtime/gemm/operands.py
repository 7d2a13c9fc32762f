"""Derives a problem and its alignment from tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from ..errors import NoKernelError
from .epilogues import Addend, Epilogue
from .extra_operands import (
    NO_EXTRAS,
    ExtraOperands,
    check_offsets,
    check_rows,
    check_sums,
    read_epilogues,
    read_scales,
)
from .operand_checks import check_shapes
from .problem import DType, Layout, Op, Problem, Signature
from .support import multiply_together
from .types import ScaleRecipe

if TYPE_CHECKING:
    import torch

MAX_ALIGNMENT_BYTES = 256
"""Largest alignment that is distinguished: the minimum that torch's CUDA allocator gives."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """Stand-in for a tensor that does not exist yet; has the attributes that `requests` reads.

    Attributes:
        dtype: Torch dtype.
        device: Future device.
        shape: Extents.
        strides: Strides, in elements.
        address: Any address with the first element's future alignment.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}, strides {list(self.strides)}"

    def dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        """Returns the strides, in elements."""
        return self.strides

    def data_ptr(self) -> int:
        """Returns an address with the right alignment."""
        return self.address

    def element_size(self) -> int:
        """Returns the bytes per element."""
        return int(self.dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Problem and memory layout of its operands.

    Attributes:
        problem: Problem to compute.
        alignment_bytes: Largest power of two, up to 256, that divides every pointer and, in bytes,
            every contiguous extent and every stride other than 1. Excludes offsets, rows, scales
            and A of ``gathered_mm``, which have their own rules; pointers to row scales are
            included.
        is_compact: True if A, B and the result have no gaps between rows or matrices. Kernels that
            take addresses without strides need this.
        out_row_bytes: Row pitch in the result, in bytes; None if it has one row or is not allocated
            yet.
    """

    problem: Problem
    alignment_bytes: int
    is_compact: bool = True
    out_row_bytes: int | None = None


@functools.cache
def _dtypes() -> dict[torch.dtype, DType]:
    import torch

    pairs = ((getattr(torch, dtype.torch_name, None), dtype) for dtype in DType)
    return {torch_type: dtype for torch_type, dtype in pairs if torch_type is not None}


@functools.cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """Returns the torch dtype for an element type."""
    import torch

    return getattr(torch, dtype.torch_name)


def usual_out_dtype(operand: torch.dtype) -> torch.dtype:
    """Returns the default result dtype (`DType.usual_out`); A's if A's dtype is unknown."""
    dtype = _dtypes().get(operand)
    return operand if dtype is None else torch_dtype(dtype.usual_out)


def operation_of(a: torch.Tensor, b: torch.Tensor, extras: ExtraOperands) -> Op:
    """Returns the operation for these operands."""
    if extras.offsets is not None and extras.rows is not None:
        return Op.GATHERED_GROUPED_MM
    if extras.offsets is not None:
        return Op.GROUPED_MM if b.dim() == 3 else Op.K_GROUPED_MM
    if extras.rows is not None:
        return Op.GATHERED_MM
    return Op.BMM if a.dim() == 3 else Op.MM


def check_empty(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands = NO_EXTRAS
) -> None:
    """Checks dtypes, extras and output strides for a GEMM without products, as for any other.

    Raises:
        ValueError: If an extra operand is missing or on another device.
        NoKernelError: If no kernel can have such dtypes, extras or output strides.
    """
    a_dtype, b_dtype, out_dtype = (_dtype(tensor.dtype) for tensor in (a, b, out))
    rounds_to_integers = out_dtype.is_integer and not a_dtype.is_integer
    if not multiply_together(a_dtype, b_dtype, op) or rounds_to_integers:
        expected = "a and b in one dtype, or both in fp8"
        if op is Op.GATHERED_MM:
            expected = "a in fp32, and b and the result in bf16 or fp16"
        raise NoKernelError(
            f"{op.value}: no kernel computes {a_dtype.value} x {b_dtype.value} to "
            f"{out_dtype.value}; pass {expected}"
        )
    _read_extras(op, a, b, out_dtype, extras)
    if out.numel():
        _out_alignment_bytes(out)


def _read_extras(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: DType, extras: ExtraOperands
) -> tuple[ScaleRecipe | None, tuple[Epilogue | None, ...]]:
    """Checks extra operands; returns the scale recipe and all readings for the addend."""
    for tensor in extras.tensors():
        if tensor.device != a.device:
            raise ValueError(
                f"{op.value}: tensors are on two devices ({a.device} and {tensor.device})"
            )
    dtype = _dtype(a.dtype)
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1] * dtype.packed
    leading = a.shape[:-1]
    if op is Op.GATHERED_GROUPED_MM:
        m = extras.gathered_rows or 0
        leading = (m,)
        check_rows(extras, leading, op.value)
    if op.groups_rows:
        check_offsets(extras, b.shape[0], op.value)
        check_sums(extras, m, n)
    elif op is Op.K_GROUPED_MM:
        check_offsets(extras, extras.groups or 0, op.value)
    elif op is Op.GATHERED_MM:
        check_rows(extras, tuple(a.shape))
    groups = b.shape[0] if op.groups_rows else None
    epilogues = read_epilogues(extras, out, (*leading, n), groups)
    return read_scales(extras, dtype, m, n, k, groups), epilogues


def requests(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    *,
    extras: ExtraOperands = NO_EXTRAS,
) -> tuple[Request, ...]:
    """Describes ``out = a @ b`` with its extra operands.

    Args:
        op: Operation; it fixes operand ranks.
        a: Operand [m, k], with a leading batch for ``bmm``; [any number of rows, k] for
            ``gathered_grouped_mm``.
        b: Operand [k, n], with a leading batch for ``bmm``, or groups for ``grouped_mm`` and
            ``gathered_grouped_mm``; [any number of rows, n] for ``gathered_mm``. For
            ``k_grouped_mm``, both are matrices and the result is [groups, m, n].
        out_dtype: Result dtype; `usual_out_dtype` by default.
        out: Existing output tensor, if any; its dtype takes precedence.
        extras: Scales, offsets, rows and addend.

    Returns:
        All readings, best aligned first. There are several if a matrix has one row or column, which
        is in both layouts, or if a row is added to a result with one row.

    Raises:
        ValueError: If ranks, shapes or devices do not match.
        NoKernelError: If no kernel can have such dtypes, strides or extents.
    """
    form = None if extras.gated is None else extras.gated.form
    shape = check_shapes(op, a, b, out, form=form, groups=extras.groups, rows=extras.gathered_rows)
    if out is not None:
        out_dtype = out.dtype
    # Dtypes before layouts: a wrong dtype is the more helpful reason.
    a_dtype, b_dtype = _dtype(a.dtype), _dtype(b.dtype)
    typed_operand = (
        b.dtype if op is Op.GATHERED_MM else a.dtype
    )  # its A is fp32, whatever the result
    result = _dtype(out_dtype or usual_out_dtype(typed_operand))
    scales, epilogues = _read_extras(op, a, b, result, extras)
    aligned_epilogues = [
        (epilogue, _addend_alignment_bytes(op, extras.addend, epilogue)) for epilogue in epilogues
    ]
    readings = {"a": _majors("a", a), "b": _majors("b", b)}
    part = shape[-1] // (1 if form is None else form.row.parts)
    alignment, is_compact = _power_of_two(result.bytes_of(part)), True
    out_row_bytes: int | None = None
    if out is not None:
        if shape[-2] > 1:
            out_row_bytes = out.stride()[-2] * out.element_size()
        alignment = min(alignment, _out_alignment_bytes(out))
        is_compact = _is_compact(out, -1, -2)
    alignment = min(alignment, _row_scale_alignment_bytes(extras, scales))
    described = []
    if op is Op.GATHERED_MM:  # kernels read A by the element, at any alignment
        readings["a"] = [(major, MAX_ALIGNMENT_BYTES) for major, _ in readings["a"]]
    for a_major, a_alignment in readings["a"]:
        for (b_major, b_alignment), (epilogue, addend_alignment) in product(
            readings["b"], aligned_epilogues
        ):
            signature = Signature(
                op=op,
                layout=Layout(a_major + b_major),
                a=a_dtype,
                b=b_dtype,
                accumulator=a_dtype.accumulator,
                out=result,
                scales=scales,
                epilogue=epilogue,
            )
            described.append(
                Request(
                    problem=_read_problem(signature, a, b, extras),
                    alignment_bytes=min(a_alignment, b_alignment, addend_alignment, alignment),
                    is_compact=is_compact
                    and _is_compact(a, *_DIMENSIONS[a_major])
                    and _is_compact(b, *_DIMENSIONS[b_major]),
                    out_row_bytes=out_row_bytes,
                )
            )
    described.sort(key=lambda request: -request.alignment_bytes)  # stable: row-major first
    return tuple(described)


_DIMENSIONS = {"t": (-1, -2), "n": (-2, -1)}
"""By major: the contiguous matrix dimension, then the other one."""


def _is_compact(tensor: torch.Tensor, inner: int, outer: int) -> bool:
    """Returns True if matrices have no gaps between their rows or each other."""
    shape, strides = tensor.shape, tensor.stride()
    if shape[outer] > 1 and strides[outer] != shape[inner]:
        return False
    return len(shape) < 3 or shape[0] == 1 or strides[0] == shape[-1] * shape[-2]


def _row_scale_alignment_bytes(extras: ExtraOperands, scales: ScaleRecipe | None) -> int:
    """Returns the alignment of row scales, which kernels load like operands."""
    if scales is not ScaleRecipe.FP32_ROW:
        return MAX_ALIGNMENT_BYTES
    assert extras.scale_a is not None
    assert extras.scale_b is not None
    return _power_of_two(extras.scale_a.data_ptr() | extras.scale_b.data_ptr())


def _addend_alignment_bytes(op: Op, addend: torch.Tensor | None, epilogue: Epilogue | None) -> int:
    """Returns the addend's alignment, for which kernels have the same rule as for operands."""
    if epilogue is None or addend is None:
        return MAX_ALIGNMENT_BYTES
    if epilogue.addend is Addend.ROW and not op.groups_rows:
        return _power_of_two(addend.data_ptr() | addend.shape[-1] * addend.element_size())
    alignment = _alignment_bytes(addend, -1, -2)
    if alignment is None:
        raise NoKernelError(
            f"addend is not row-major, or its elements share memory (shape "
            f"{list(addend.shape)}, strides {list(addend.stride())}); call .contiguous() on it"
        )
    return alignment


def _out_alignment_bytes(out: torch.Tensor) -> int:
    """Returns an output's alignment."""
    for major, alignment in _majors("out", out):
        if major == "t":
            return alignment
    raise NoKernelError(f"out is not row-major (strides {list(out.stride())})")


def _read_problem(
    signature: Signature, a: torch.Tensor, b: torch.Tensor, extras: ExtraOperands
) -> Problem:
    batch = a.shape[0] if signature.op is Op.BMM else 1
    groups = b.shape[0] if signature.op.groups_rows else 1
    if signature.op is Op.K_GROUPED_MM:
        groups = extras.groups or 0
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1] * signature.a.packed
    if signature.op is Op.GATHERED_GROUPED_MM:
        m = extras.gathered_rows or 0
    for name, extent in (("m", m), ("n", n), ("k", k), ("batch", batch), ("groups", groups)):
        if extent == 0:
            raise NoKernelError(
                f"{signature.op.value}: nothing to compute because {name} is 0; no kernel is "
                f"needed: nvgemm_runtime.{signature.op.value}(a, b) fills its result with zeros"
            )
    try:
        return Problem(signature=signature, m=m, n=n, k=k, batch=batch, groups=groups)
    except ValueError as error:
        raise NoKernelError(f"{signature.op.value}: {error}") from None


def _dtype(dtype: torch.dtype) -> DType:
    try:
        return _dtypes()[dtype]
    except KeyError:
        names = ", ".join(str(torch_type).removeprefix("torch.") for torch_type in _dtypes())
        raise NoKernelError(f"no kernel takes {dtype} (known: {names})") from None


def _majors(name: str, tensor: torch.Tensor) -> list[tuple[str, int]]:
    """Returns the tensor's majors, each with its alignment in bytes.

    ``t`` is contiguous along the last dimension, ``n`` along the one before it. A stride counts
    only if its extent exceeds 1, so a single row or column has both majors.
    """
    readings = [
        (major, alignment)
        for major, (inner, outer) in _DIMENSIONS.items()
        if (alignment := _alignment_bytes(tensor, inner, outer)) is not None
    ]
    if not readings:
        raise NoKernelError(
            f"{name} is contiguous along neither dimension, or its elements share memory (shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}); call .contiguous() on it"
        )
    return readings


def _alignment_bytes(tensor: torch.Tensor, inner: int, outer: int) -> int | None:
    """Returns a tensor's alignment if it is contiguous along ``inner``; None otherwise."""
    shape, strides = tensor.shape, tensor.stride()
    extent = shape[inner]
    if extent > 1 and strides[inner] != 1:
        return None
    elements = extent
    matrix_span = extent  # elements spanned by one matrix
    if shape[outer] > 1:
        if strides[outer] < extent:
            return None
        elements |= strides[outer]
        matrix_span += (shape[outer] - 1) * strides[outer]
    if len(shape) == 3 and shape[0] > 1:
        # Matrices follow each other, or their rows interleave.
        rows_span = extent + (shape[0] - 1) * strides[0]
        is_disjoint = strides[0] >= matrix_span or strides[outer] >= rows_span
        if strides[0] < extent or not is_disjoint:
            return None
        elements |= strides[0]
    return _power_of_two(tensor.data_ptr() | elements * tensor.element_size())


def _power_of_two(value: int) -> int:
    """Returns the largest power of two that divides ``value``, up to 256."""
    return min(MAX_ALIGNMENT_BYTES, value & -value) if value else MAX_ALIGNMENT_BYTES
