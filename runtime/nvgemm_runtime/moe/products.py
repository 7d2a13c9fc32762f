"""Grouped products of experts, and sums of rows: by a prebuilt kernel if one serves, else by torch.

They are operators, ``torch.ops.nvgemm_moe.rows``, ``added_rows``, ``columns`` and
``gathered_rows``, so torch.compile keeps them in its graph; the kernel is looked up where they run,
once for each problem. Those with a gate are in `traced`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..errors import NvgemmError
from ..gemm.epilogues import Epilogue
from ..gemm.extra_operands import ExtraOperands, check_offset_values
from ..gemm.moe_operators import ADDED_ROWS, COLUMNS, GATHERED_ROWS, NAMESPACE, ROWS
from ..gemm.operands import check_shapes
from ..gemm.problem import Op
from ..gemm.roles import sum_parts
from ..launch.fast_path import count_write
from ..launch.loader import LoadedKernel
from ..launch.select import choose_kernel
from ..matching.device import wants_determinism
from ..settings import is_debugging
from .by_torch import ALIGNMENT_BYTES, columns_by_torch, gathered_by_torch, rows_by_torch
from .operators import widen

_found: dict[tuple[object, ...], LoadedKernel | str] = {}
"""By all that decides: the kernel, or why none serves."""

_MAX_FOUND = 4096
_BY_TORCH = "torch computes a grouped product"
_GATE_LOST = "a compiled graph computes a gate by its product and torch's operators"
_SUMMED_BY_TORCH = "torch weighs or adds rows of tokens"
WARNINGS = (_BY_TORCH, _GATE_LOST, _SUMMED_BY_TORCH)
"""What a process is warned of, once each."""

_warned: set[str] = set()


def rows(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the rows of each group with the group's matrix, and add its bias.

    Args:
        a: Matrix [m, k], the groups' rows one after the other.
        b: Matrices [groups, k, n].
        offsets: End of each group along m, int32 [groups].
        bias: A row of n for each group, [groups, n], of the operands' type. Where no kernel adds
            it, torch does, to the rounded product.

    Returns:
        Matrix [m, n] of the operands' type; undefined in rows past the last end.
    """
    result: torch.Tensor = torch.ops.nvgemm_moe.rows(a, b, offsets, bias)
    return result


def added_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    other_a: torch.Tensor,
    other_b: torch.Tensor,
) -> torch.Tensor:
    """`rows` added to another such product, in the memory of that one; see `add_rows`.

    Args:
        a: Matrix [m, k], the groups' rows one after the other.
        b: Matrices [groups, k, n].
        offsets: End of each group along m, int32 [groups].
        other_a: Matrix [m, p] of the other product.
        other_b: Matrices [groups, p, n] of the other product.

    Returns:
        Matrix [m, n] of the operands' type; undefined in rows past the last end.
    """
    result: torch.Tensor = torch.ops.nvgemm_moe.added_rows(a, b, offsets, other_a, other_b)
    return result


def add_rows(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> None:
    """Add what `rows` gives to a matrix, in place; not to be traced.

    A kernel may get one matrix as addend and result: a tile has read an element of the addend
    before it writes the same element of the result, and no other tile writes it. At the end of a
    group a tile also reads rows of the next one, written or not, and stores nothing of them.

    Args:
        out: Matrix [m, n] of the operands' type. Where no kernel adds to it, torch does, the
            rounded product.
        a: Matrix [m, k].
        b: Matrices [groups, k, n].
        offsets: End of each group along m, int32 [groups].
    """
    is_empty = 0 in (a.numel(), b.numel())
    if is_empty or _run_kernel(out, a, b, offsets, out, None, adds_matrix=True):
        out.add_(rows(a, b, offsets))


def gated_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: Epilogue,
    indices: torch.Tensor | None = None,
    *,
    warns: bool = False,
) -> torch.Tensor | None:
    """`rows` with a gated epilogue, if a kernel serves it; not to be traced.

    With ``indices``, int32 [m], the kernel takes the rows of ``a`` that they name. ``warns`` gives
    the process' warning where none serves.

    Returns:
        What the epilogue stores, of the width that its form says; None if no kernel serves.
    """
    return _by_kernel(a, b, offsets, bias, epilogue, warns, indices)


def gate_gradients(
    grad: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    product: torch.Tensor,
    epilogue: Epilogue,
    *,
    warns: bool = False,
) -> torch.Tensor | None:
    """Gradients of gates and ups, if a kernel serves; not to be traced.

    Args:
        grad: Gradient of the down projection's result, [m, dim].
        b: Weights of the down projection, [groups, dim, n].
        offsets: End of each group along m, int32 [groups].
        product: The product of gates and ups, [m, 2 * n], in the epilogue's order of columns.
        epilogue: A gradient.
        warns: Whether to give the process' warning where no kernel serves.

    Returns:
        Matrix [m, 2 * n] in the order of the product; None if no kernel serves.
    """
    return _by_kernel(grad, b, offsets, product, epilogue, warns)


def summed_gate_gradients(
    grad: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    product: torch.Tensor,
    epilogue: Epilogue,
    *,
    warns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`gate_gradients`, and for each row the sum of what the gate gave times its gradient.

    ``epilogue`` is a gradient with sums.

    Returns:
        Matrix [m, 2 * n] and vector [m] in fp32; None if no kernel serves.
    """
    parts = grad.new_zeros((grad.shape[0], sum_parts(b.shape[2])), dtype=torch.float32)
    found = _by_kernel(grad, b, offsets, product, epilogue, warns, sums=parts)
    return None if found is None else (found, parts.sum(1))


def rows_into(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor | None = None,
) -> bool:
    """`rows` into a matrix that may have gaps between rows, if a kernel serves; not to be traced.

    With ``indices``, int32 [m], the kernel takes the rows of ``a`` that they name.

    Returns:
        Whether a kernel served.
    """
    return not _run_kernel(out, a, b, offsets, bias, None, indices=indices)


def serves_ups(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    gates: torch.Tensor,
    epilogue: Epilogue,
    indices: torch.Tensor | None = None,
) -> bool:
    """Whether a kernel serves `ups_into`, of the same arguments; not to be traced."""
    extras = ExtraOperands(offsets=offsets, rows=indices, addend=gates, gated=epilogue)
    found = _find(_op_of(indices), a, b, out, extras) if out.shape[0] else None
    return not isinstance(found, str)


def ups_into(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    gates: torch.Tensor,
    epilogue: Epilogue,
    indices: torch.Tensor | None = None,
    *,
    warns: bool = False,
) -> bool:
    """Ups, and behind them what the gate gives, if a kernel serves; not to be traced.

    Args:
        out: Matrix [m, 2 * n], which may have gaps between rows.
        a: Matrix [m, k].
        b: Weights of ups, [groups, k, n].
        offsets: End of each group along m, int32 [groups].
        gates: Matrix [m, n], which may have gaps between rows.
        epilogue: One of ups.
        indices: The row of ``a`` for each row of the result, int32 [m]; None for each in order.
        warns: Whether to give the process' warning where no kernel serves.

    Returns:
        Whether a kernel served.
    """
    reason = _run_kernel(out, a, b, offsets, gates, epilogue, indices=indices)
    if reason and warns:
        _warn_once(_GATE_LOST, reason)
    return not reason


def _by_kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    addend: torch.Tensor | None,
    epilogue: Epilogue,
    warns: bool,
    indices: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor | None:
    count = None if indices is None else indices.shape[0]
    shape = check_shapes(_op_of(indices), a, b, form=epilogue.form, rows=count)
    out = a.new_empty(shape)
    reason = _run_kernel(out, a, b, offsets, addend, epilogue, indices=indices, sums=sums)
    if reason and warns:
        _warn_once(_GATE_LOST, reason)
    return None if reason else out


def _run_kernel(
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
) -> str:
    """Compute ``out``, of any number of rows, by a kernel; why none serves, or nothing."""
    # Torch resolves negated views for operators, but this is none.
    a, b, offsets = a.resolve_neg(), b.resolve_neg(), offsets.resolve_neg()
    addend = None if addend is None else addend.resolve_neg()
    if addend is not None and addend.stride(-1) != 1:  # rows with gaps are read as they are
        addend = addend.contiguous()
    if is_debugging():
        check_offset_values(offsets, out.shape[0])
    if out.shape[0] == 0:
        return ""
    extras = ExtraOperands(
        offsets=offsets,
        rows=indices,
        addend=addend,
        sums=sums,
        adds_matrix=adds_matrix,
        gated=epilogue,
    )
    a, b = _with_unit_stride(a), _with_unit_stride(b)
    return _launch(_op_of(indices), a, b, out, extras)


def _op_of(indices: torch.Tensor | None) -> Op:
    return Op.GROUPED_MM if indices is None else Op.GATHERED_GROUPED_MM


def columns(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply, for each group, the transposed rows of one matrix with those of another.

    Args:
        a: Matrix [m, p].
        b: Matrix [m, q].
        offsets: End of each group along m, int32 [groups].

    Returns:
        Matrices [groups, p, q] of the operands' type; zero for a group with no row.
    """
    result: torch.Tensor = torch.ops.nvgemm_moe.columns(a, b, offsets)
    return result


def gathered_rows(
    matrix: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Add rows of a matrix, each times its weight, in fp32 (of fp64 in that), and round once.

    Args:
        matrix: Matrix [any number, n].
        rows: Which rows to add: int32 or int64 [m, k]. One outside the matrix, such as -1, adds
            nothing. None for each row by itself, in order; then there are weights [m, 1].
        weights: Factors, floating, of the shape of ``rows``; None to add rows as they are.

    Returns:
        Matrix [m, n] of the matrix' type.
    """
    result: torch.Tensor = torch.ops.nvgemm_moe.gathered_rows(matrix, rows, weights)
    return result


def narrow(indices: torch.Tensor) -> torch.Tensor:
    """Rows' numbers as kernels take them: int32, contiguous."""
    return indices.to(torch.int32).contiguous()


def owner_of_rows(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """The group of each of so many rows; the last one of rows past the last end."""
    places = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True).clamp(max=offsets.shape[0] - 1)


def _rows(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if is_debugging():
        check_offset_values(offsets, a.shape[0])
    out = a.new_empty((a.shape[0], b.shape[2]))
    if 0 in a.shape or out.numel() == 0:
        return out.zero_()
    a, b = _with_unit_stride(a), _with_unit_stride(b)
    plain = ExtraOperands(offsets=offsets)
    if bias is None:
        extras = plain
    else:
        bias = bias.contiguous()
        extras = ExtraOperands(offsets=offsets, addend=bias)
    reason = _launch(Op.GROUPED_MM, a, b, out, extras)
    if not reason:
        return out
    if bias is not None:
        reason = _launch(Op.GROUPED_MM, a, b, out, plain)
    if reason:
        _warn_once(_BY_TORCH, reason)
        del out  # torch makes its own
        out = rows_by_torch(a, b, offsets)
    return out if bias is None else out.add_(bias[owner_of_rows(offsets, a.shape[0])])


def _added_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    other_a: torch.Tensor,
    other_b: torch.Tensor,
) -> torch.Tensor:
    out = _rows(other_a, other_b, offsets, None)
    add_rows(out, a, b, offsets)
    return out


def _columns(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    if is_debugging():
        check_offset_values(offsets, a.shape[0])
    out = a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]))
    if a.shape[0] == 0 or out.numel() == 0:
        return out.zero_()
    a, b = _row_major(a), _row_major(b)
    reason = _launch(Op.K_GROUPED_MM, a.t(), b, out, ExtraOperands(offsets=offsets))
    if not reason:
        return out
    _warn_once(_BY_TORCH, reason)
    return columns_by_torch(a, b, offsets)


def _gathered_rows(
    matrix: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    count = matrix.shape[0]
    shape = (count, 1) if rows is None else rows.shape
    out = matrix.new_empty((shape[0], matrix.shape[1]))
    if 0 in (matrix.numel(), *shape):
        return out.zero_()
    if rows is None:
        named = torch.arange(count, device=matrix.device, dtype=torch.int32)[:, None]
    else:  # what 32 bits do not hold is outside as well
        named = (rows if rows.dtype is torch.int32 else rows.clamp(-1, count)).to(torch.int32)
    if weights is None:
        factors = torch.ones(shape, device=matrix.device, dtype=torch.float32)
    else:
        factors = widen(weights).contiguous()
    extras = ExtraOperands(rows=named.contiguous())
    reason = _launch(Op.GATHERED_MM, factors, _row_major(matrix), out, extras)
    if not reason:
        return out
    del out  # torch makes its own
    if _BY_TORCH not in _warned:  # of which there is a warning then
        _warn_once(_SUMMED_BY_TORCH, reason)
    return gathered_by_torch(matrix, rows, weights)


def weight_gradient(
    grad: torch.Tensor, taken: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Gradient of weights [experts, columns of grad, columns of taken], as they lie in memory."""
    if weight.stride(-1) != 1 and weight.stride(-2) == 1:
        return columns(taken, grad, offsets).mT
    return columns(grad, taken, offsets)


def _launch(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands
) -> str:
    """Compute ``out`` by the best kernel; why none serves, or nothing."""
    kernel = _find(op, a, b, out, extras)
    if isinstance(kernel, str):
        return kernel
    count_write(out)
    kernel.launch(a, b, out, *extras.tensors())
    return ""


def _find(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands
) -> LoadedKernel | str:
    """The best kernel, looked up once a problem, or why none serves."""
    tensors = (a, b, out, *extras.tensors())
    facts = (
        (one.device, one.dtype, one.shape, one.stride(), one.data_ptr() % 128) for one in tensors
    )
    key = (op, wants_determinism(), *extras.wanted(), *facts)
    kernel = _found.get(key)
    if kernel is None:
        try:
            kernel = choose_kernel(op, a, b, out, extras)
        except NvgemmError as error:
            kernel = str(error)
        if len(_found) >= _MAX_FOUND:
            _found.clear()
        _found[key] = kernel
    return kernel


def _warn_once(what: str, reason: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"nvgemm_runtime.moe: {what}, and from here on every other that no kernel serves, "
            f"without another warning: {reason}",
            stacklevel=2,
        )


def _with_unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy where neither of its last dimensions is contiguous."""
    is_dense = 1 in (matrix.stride(-1), matrix.stride(-2))
    return matrix if is_dense else matrix.contiguous()


def _row_major(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy where rows have gaps or begin at addresses that kernels cannot read."""
    pitch = matrix.stride(0) * matrix.element_size()
    is_aligned = (pitch | matrix.data_ptr()) % ALIGNMENT_BYTES == 0
    return matrix if matrix.stride(1) == 1 and is_aligned else matrix.contiguous()


def _fake_rows(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[2]))


def _fake_columns(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]))


def _fake_gathered_rows(matrix: torch.Tensor, rows: torch.Tensor | None, _: Any) -> torch.Tensor:
    return matrix.new_empty(((matrix if rows is None else rows).shape[0], matrix.shape[1]))


library = torch.library.Library(NAMESPACE, "DEF")
"""Kept for the life of the process: torch unregisters the operators of a deleted library."""


def define(
    name: str,
    operands: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    gives: str = "Tensor",
) -> None:
    """Define an operator, and what it gives for fake tensors."""
    library.define(f"{name}({operands}) -> {gives}", tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


define(ROWS, "Tensor a, Tensor b, Tensor offsets, Tensor? bias", _rows, _fake_rows)
define(
    ADDED_ROWS,
    "Tensor a, Tensor b, Tensor offsets, Tensor other_a, Tensor other_b",
    _added_rows,
    _fake_rows,
)
define(COLUMNS, "Tensor a, Tensor b, Tensor offsets", _columns, _fake_columns)
define(
    GATHERED_ROWS,
    "Tensor matrix, Tensor? rows, Tensor? weights",
    _gathered_rows,
    _fake_gathered_rows,
)
