"""Kernels for experts' products: launched if one serves, or found for a trace.

While torch.compile traces, sizes may be symbols and addresses are unknown. A kernel serves any
number of rows, so an example decides, with aligned addresses. If a call's addresses are not
aligned, the traced operator computes without the kernel.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..errors import NvgemmError
from ..gemm.epilogues import Epilogue
from ..gemm.extra_operands import ExtraOperands, check_offset_values
from ..gemm.operand_checks import check_shapes
from ..gemm.operands import MAX_ALIGNMENT_BYTES, Operand, Request, requests
from ..gemm.problem import Op
from ..gemm.roles import sum_parts
from ..launch.fast_path import count_write
from ..launch.select import UnservedOperands, find, find_kernel
from ..matching.device import device_facts
from ..matching.matches import Match
from ..settings import COMPILE_OPTION, Mode, checked_mode, is_debugging, named_mode

ALIGNMENT_BYTES = 16
"""Alignment of rows and pointers that ``torch._grouped_mm`` requires, from its error message."""

BY_TORCH = "torch computes a grouped GEMM"
GATE_LOST = "a compiled graph computes a gate by torch's operators"
SUMMED_BY_TORCH = "torch applies routing weights or adds token rows"
WARNINGS = (BY_TORCH, GATE_LOST, SUMMED_BY_TORCH)
"""Subjects of warnings, each issued once per process."""

_warned: set[str] = set()

_EXAMPLE = 4096
"""Stands for a size or stride for which torch has no example."""

_log = logging.getLogger(__name__)


def launch(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands
) -> str:
    """Computes ``out`` by the best kernel. Returns the reason why none serves, or ""."""
    if out.shape[0] == 0:
        return ""
    try:
        kernel = find_kernel(op, a, b, out, extras)
    except NvgemmError as error:
        if error.stops_compilation:
            raise
        return str(error)
    if isinstance(kernel, UnservedOperands):
        return kernel.message
    if extras.sums is not None:
        extras.sums.zero_()
    count_write(out)
    kernel.launch(a, b, out, *extras.tensors())
    return ""


def grouped_operands(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    addend: torch.Tensor | None,
    epilogue: Epilogue | None,
    *,
    adds_matrix: bool = False,
    indices: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> tuple[Op, torch.Tensor, torch.Tensor, torch.Tensor, ExtraOperands]:
    """Returns `launch`'s arguments for grouped rows, with copies of what kernels cannot read."""
    # Torch resolves negated views only for operators.
    a, b, offsets = a.resolve_neg(), b.resolve_neg(), offsets.resolve_neg()
    addend = None if addend is None else addend.resolve_neg()
    if addend is not None and addend.stride(-1) != 1:  # kernels read rows with gaps
        addend = addend.contiguous()
    if is_debugging():
        check_offset_values(offsets, out.shape[0])
    extras = ExtraOperands(
        offsets=offsets,
        rows=indices,
        addend=addend,
        sums=sums,
        adds_matrix=adds_matrix,
        gated=epilogue,
    )
    return op_of_rows(indices), with_unit_stride(a), with_unit_stride(b), out, extras


def op_of_rows(indices: torch.Tensor | None) -> Op:
    """Returns the op for grouped rows: gathered if there are indices."""
    return Op.GROUPED_MM if indices is None else Op.GATHERED_GROUPED_MM


def has_kernel(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands
) -> bool:
    """Returns True if `launch` has a kernel for the operands, or nothing to compute."""
    try:
        return out.shape[0] == 0 or not isinstance(
            find_kernel(op, a, b, out, extras), UnservedOperands
        )
    except NvgemmError as error:
        if error.stops_compilation:
            raise
        return False


def warn_once(what: str, reason: str) -> None:
    """Issues one of `WARNINGS` with its reason, once per process."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"nvgemm_runtime.moe: {what} (later calls without a kernel give no warning): {reason}",
            stacklevel=2,
        )


def was_warned(what: str) -> bool:
    """Returns True if this process has issued one of `WARNINGS`."""
    return what in _warned


def with_unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the matrix, or a copy if neither of its last two dimensions is contiguous."""
    is_dense = 1 in (matrix.stride(-1), matrix.stride(-2))
    return matrix if is_dense else matrix.contiguous()


def row_major(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the matrix, or a copy if rows have strides or addresses that kernels cannot read."""
    pitch = matrix.stride(0) * matrix.element_size()
    is_aligned = (pitch | matrix.data_ptr()) % ALIGNMENT_BYTES == 0
    return matrix if matrix.stride(1) == 1 and is_aligned else matrix.contiguous()


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
    """Returns True if torch.compile may use a kernel for `routing.gathered_rows`.

    Args:
        matrix: Matrix like the one with the rows, with any number of rows: [any, n].
        count: Number of sums.
        each: Rows in each sum.
    """

    def make_requests() -> tuple[Request, ...]:
        added = _contiguous(_operand(matrix))
        sums = _example(count) or 1
        weights = _contiguous(replace(added, dtype=torch.float32, shape=(sums, _example(each))))
        indices = replace(weights, dtype=torch.int32)
        out = _contiguous(replace(added, shape=(sums, added.shape[1])))
        return requests(Op.GATHERED_MM, weights, added, out=out, extras=ExtraOperands(rows=indices))

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
    op = op_of_rows(indices)
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
