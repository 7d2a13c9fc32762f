"""What torch's operators compute between products, and who else may look at operators."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode

PIECE = 1 << 24
"""Elements of each fp32 tensor between products, except where all rows are computed at once."""


def is_watched(*tensors: torch.Tensor | None) -> bool:
    """Whether a tracer, a dispatch mode or a tensor subclass observes operators.

    Also of tensors without memory, whose results only operators can make.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return True
    # In turn, make_fx before dispatch, and torch.jit.trace.
    if _len_torch_dispatch_stack_pre_dispatch() or torch._C._get_tracing_state() is not None:
        return True
    plain = (torch.Tensor, torch.nn.Parameter)
    return any(one is not None and (type(one) not in plain or one.is_meta) for one in tensors)


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether what an operator runs may be called itself, which saves half of its host time.

    Not where operators are observed, nor of lazily negated views, which an operator resolves.
    """
    if is_watched(*tensors):
        return False
    return not any(one is not None and one.is_neg() for one in tensors)


_WITH_AUTOCAST = ("cuda", "cpu")
"""Kinds of devices that are asked whether autocast is on; Dynamo of torch 2.11 cannot trace the
question whether a kind has it."""


def autocast_type(x: Any) -> torch.dtype | None:
    """The type that autocast wants on a tensor's device, if it is on."""
    kind = x.device.type if isinstance(x, torch.Tensor) else ""
    if kind in _WITH_AUTOCAST and torch.is_autocast_enabled(kind):
        wanted: torch.dtype = torch.get_autocast_dtype(kind)
        return wanted
    return None


def widen(matrix: torch.Tensor) -> torch.Tensor:
    """Convert to fp32; a matrix of fp64 stays as it is."""
    return matrix if matrix.dtype is torch.float64 else matrix.float()


def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to a type; a matrix of that type stays as it is.

    Compiled by torch 2.11, a function whose result is ``to`` of its own type has no gradients.
    """
    return matrix if matrix.dtype is dtype else matrix.to(dtype)


def sum_products(one: torch.Tensor, other: torch.Tensor, *, is_compiled: bool) -> torch.Tensor:
    """For each row, the sum of two matrices' products, in fp32 (of fp64 in that): [rows]."""
    if is_compiled or not multiplies_into_fp32(one):
        return (widen(one) * other).sum(-1)
    product = torch.bmm(one.unsqueeze(1), other.unsqueeze(2), out_dtype=torch.float32)
    return product.flatten()


def multiplies_into_fp32(matrix: torch.Tensor) -> bool:
    """Whether ``torch.bmm`` may give fp32 of such a matrix; FLOP counters do not know that form."""
    is_16_bit = matrix.dtype in (torch.bfloat16, torch.float16)
    return matrix.is_cuda and is_16_bit and not is_watched(matrix)


def taken_rows(matrix: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    """The rows of a matrix that indices name; without any, all of them as they are."""
    return matrix if indices is None else matrix.index_select(0, indices)


def count_taken(matrix: torch.Tensor, indices: torch.Tensor | None) -> int:
    """How many rows `taken_rows` gives."""
    count: int = (matrix if indices is None else indices).shape[0]
    return count


def dense_like(matrix: torch.Tensor) -> torch.Tensor:
    """Memory for a matrix of that shape, row-major without gaps."""
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


def pieces(count: int, elements: int) -> list[slice]:
    """Of so many rows, each of so many elements, those to compute at a time; at least one piece."""
    step = max(1, PIECE // max(elements, 1))
    return [slice(begin, begin + step) for begin in range(0, max(count, 1), step)]
