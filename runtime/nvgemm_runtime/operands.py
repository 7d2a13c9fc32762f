"""From tensors to the problem they pose, and how well they are aligned."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import NoKernelError
from .problem import DType, Layout, Op, Problem, Signature

if TYPE_CHECKING:
    import torch

MAX_ALIGNMENT_BYTES = 256
"""Alignments are told apart up to this: what torch's CUDA allocator at least gives."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A problem as tensors pose it.

    Attributes:
        problem: What is to be computed.
        alignment_bytes: Largest power of two, up to 256, that divides every pointer, and every
            stride but the one that is 1 times its element size.
    """

    problem: Problem
    alignment_bytes: int


@functools.cache
def _dtypes() -> dict[torch.dtype, DType]:
    import torch

    return {
        torch.float32: DType.FP32,
        torch.float16: DType.FP16,
        torch.bfloat16: DType.BF16,
        torch.float8_e4m3fn: DType.FP8_E4M3,
        torch.float8_e5m2: DType.FP8_E5M2,
        torch.int32: DType.INT32,
        torch.int8: DType.INT8,
        torch.uint8: DType.UINT8,
    }


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's name for an element type."""
    return next(theirs for theirs, ours in _dtypes().items() if ours is dtype)


def request(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> Request:
    """Describe ``out = a @ b``.

    Args:
        op: ``mm`` or ``bmm``; it fixes the rank of the operands.
        a: Operand of shape [m, k], with a leading batch for ``bmm``.
        b: Operand of shape [k, n], likewise.
        out_dtype: Type of the result; by default as ``a``.
        out: The tensor to be written, if there is one already; its type counts.

    Raises:
        NoKernelError: If ranks, shapes, types or strides are such that no kernel can exist.
    """
    rank = 2 if op is Op.MM else 3
    if a.dim() != rank or b.dim() != rank:
        raise NoKernelError(
            f"{op.value} takes tensors of rank {rank} (got {a.dim()} and {b.dim()})"
        )
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise NoKernelError(
            f"{op.value}: shapes {list(a.shape)} and {list(b.shape)} do not multiply"
        )
    if a.device != b.device:
        raise NoKernelError(f"{op.value}: operands are on two devices ({a.device} and {b.device})")
    result = out.dtype if out is not None else out_dtype or a.dtype
    signature = Signature(
        op=op,
        layout=Layout(_major("a", a) + _major("b", b)),
        a=_dtype(a.dtype),
        b=_dtype(b.dtype),
        accumulator=DType.INT32 if _dtype(a.dtype).is_integer else DType.FP32,
        out=_dtype(result),
    )
    try:
        problem = Problem(
            signature=signature,
            m=a.shape[-2],
            n=b.shape[-1],
            k=a.shape[-1],
            batch=a.shape[0] if op is Op.BMM else 1,
        )
    except ValueError as error:
        raise NoKernelError(f"{op.value}: {error}") from None
    tensors = [a, b] if out is None else [a, b, out]
    alignment = min(_alignment_bytes(tensor) for tensor in tensors)
    if out is None:
        alignment = min(alignment, _power_of_two(problem.n * signature.out.size_bytes))
    return Request(problem=problem, alignment_bytes=alignment)


def _dtype(dtype: torch.dtype) -> DType:
    try:
        return _dtypes()[dtype]
    except KeyError:
        known = ", ".join(str(theirs).removeprefix("torch.") for theirs in _dtypes())
        raise NoKernelError(f"no kernel takes {dtype} (known: {known})") from None


def _major(name: str, tensor: torch.Tensor) -> str:
    """``t`` where the last dimension is contiguous, ``n`` where the one before is.

    A dimension of extent 1 has no stride that matters: then either may hold, and ``t`` is said.
    """
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    if column_stride == 1 or columns == 1:
        return "t"
    if row_stride == 1 or rows == 1:
        return "n"
    raise NoKernelError(
        f"{name} is contiguous along neither dimension (strides {list(tensor.stride())}); "
        "call .contiguous() on it"
    )


def _alignment_bytes(tensor: torch.Tensor) -> int:
    size = tensor.element_size()
    value = tensor.data_ptr()
    for extent, stride in zip(tensor.shape, tensor.stride()):
        if stride != 1 and extent != 1:
            value |= stride * size
    return _power_of_two(value)


def _power_of_two(value: int) -> int:
    """Largest power of two that divides ``value``, up to 256."""
    return min(MAX_ALIGNMENT_BYTES, value & -value) if value else MAX_ALIGNMENT_BYTES
