"""Checks if a kernel serves an experts' product while tensors have no memory yet.

While torch.compile traces, sizes may be symbols and addresses are unknown. A kernel serves any
number of rows, so an example decides, with aligned addresses. If a call's addresses are not
aligned, the traced operator computes without the kernel.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..errors import NvgemmError
from ..gemm.epilogues import Epilogue
from ..gemm.extra_operands import ExtraOperands
from ..gemm.operand_checks import check_shapes
from ..gemm.operands import MAX_ALIGNMENT_BYTES, Operand, Request, requests
from ..gemm.problem import Op
from ..gemm.roles import sum_parts
from ..launch.select import find
from ..matching.device import device_facts
from ..matching.matches import Match
from ..settings import COMPILE_OPTION, Mode, checked_mode, named_mode

_EXAMPLE = 4096
"""Stands for a size or stride for which torch has no example."""

_log = logging.getLogger(__name__)


def is_served(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    addend: torch.Tensor | None,
    epilogue: Epilogue | None,
    *,
    pitch: int | None = None,
    adds_matrix: bool = False,
    indices: torch.Tensor | None = None,
) -> bool:
    """Returns True if torch.compile may use a kernel for such grouped rows.

    This covers `nvgemm_runtime.moe.products.rows` and the functions in `gated_products`.

    Args:
        a: Matrix [m, k].
        b: Matrices [groups, k, n].
        offsets: Group ends along m, int32 [groups].
        addend: Bias row for each group, product that a gradient reads, gates, or a matrix.
        epilogue: Gated epilogue; None for the plain product.
        pitch: Elements between the result's rows, if there are gaps.
        adds_matrix: True if the addend is a matrix [m, n] to add.
        indices: Row in ``a`` for each row in the result, [m]; None for all rows in order.
    """
    arguments = (a, b, offsets, addend, epilogue, pitch, adds_matrix, indices)
    return _is_kernel_found(a.device, lambda: _requests_of(*arguments))


def is_sum_served(matrix: torch.Tensor, count: int, each: int) -> bool:
    """Returns True if torch.compile may use a kernel for `row_sums.gathered_rows`.

    Args:
        matrix: Matrix like the one with the rows, with any number of rows: [any, n].
        count: Number of sums.
        each: Rows in each sum.
    """

    def make_requests() -> tuple[Request, ...]:
        added = _contiguous(_operand(matrix))
        sums = _example(count) or 1
        factors = _contiguous(replace(added, dtype=torch.float32, shape=(sums, _example(each))))
        indices = replace(factors, dtype=torch.int32)
        out = _contiguous(replace(added, shape=(sums, added.shape[1])))
        return requests(Op.GATHERED_MM, factors, added, out=out, extras=ExtraOperands(rows=indices))

    return _is_kernel_found(matrix.device, make_requests)


def _is_kernel_found(
    device: torch.device, make_requests: Callable[[], tuple[Request, ...]]
) -> bool:
    """Returns True if a kernel serves a request and is not turned off. Logs failures."""
    if _is_off() or (device.type == "cuda" and not torch.cuda.is_available()):
        return False
    try:
        facts = device_facts(device.type, device.index or 0)
        return isinstance(find(make_requests(), facts)[1], Match)
    except NvgemmError as error:
        _log.debug("experts are traced without a kernel: %s", error)
    except Exception as error:  # the user's compilation continues without kernels
        _log.warning("experts are traced without a kernel: %r", error)
    return False


def _is_off() -> bool:
    """Returns True if the user turned kernels off, for this compilation or for all."""
    config = sys.modules.get("torch._inductor.config")
    mode = checked_mode(getattr(config, COMPILE_OPTION, named_mode()), COMPILE_OPTION)
    return mode is Mode.OFF


def _requests_of(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    addend: torch.Tensor | None,
    epilogue: Epilogue | None,
    pitch: int | None,
    adds_matrix: bool,
    indices: torch.Tensor | None,
) -> tuple[Request, ...]:
    a_operand, b_operand = _with_unit_stride(_operand(a)), _with_unit_stride(_operand(b))
    added = None if addend is None else _operand(addend)
    if added is not None and added.strides[-1] != 1:
        added = _contiguous(added)
    form = None if epilogue is None else epilogue.form
    rows = None if indices is None else replace(_contiguous(_operand(indices)), dtype=torch.int32)
    op = Op.GROUPED_MM if rows is None else Op.GATHERED_GROUPED_MM
    count = None if rows is None else rows.shape[0]
    shape = check_shapes(op, a_operand, b_operand, form=form, rows=count)
    out = _make_operand(a_operand, shape, (shape[-1] if pitch is None else _example(pitch), 1))
    has_sums = form is not None and form.row.has_sums
    extras = ExtraOperands(
        offsets=_operand(offsets),
        rows=rows,
        addend=added,
        sums=_sums(a_operand, b_operand) if has_sums else None,
        adds_matrix=adds_matrix,
        gated=epilogue,
    )
    return requests(op, a_operand, b_operand, out=out, extras=extras)


def _sums(a: Operand, b: Operand) -> Operand:
    shape = (a.shape[0], sum_parts(b.shape[-1]))
    return replace(_make_operand(a, shape, (shape[1], 1)), dtype=torch.float32)


def _operand(tensor: torch.Tensor) -> Operand:
    """Returns a tensor as an operand, with examples for symbolic sizes. 0 rows count as 1."""
    shape = tuple(_example(extent) or 1 for extent in tensor.shape)
    return _make_operand(tensor, shape, tuple(_example(step) for step in tensor.stride()))


def _example(extent: int | torch.SymInt) -> int:
    """Returns a size, or torch's example for it, without a guard."""
    value: Any = extent if isinstance(extent, int) else extent.node.hint
    return _EXAMPLE if value is None else int(value)


def _make_operand(like: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Operand:
    return Operand(
        dtype=like.dtype,
        device=like.device,
        shape=shape,
        strides=strides,
        address=MAX_ALIGNMENT_BYTES,
    )


def _with_unit_stride(operand: Operand) -> Operand:
    """Returns an operand, or the copy that the call will make."""
    return operand if 1 in operand.strides[-2:] else _contiguous(operand)


def _contiguous(operand: Operand) -> Operand:
    strides = torch.empty(operand.shape, device="meta").stride()
    return _make_operand(operand, operand.shape, strides)
