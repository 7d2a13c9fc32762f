"""Grouped GEMMs with gates, computed by a kernel or not at all.

They write into views or read a second matrix, which `nvgemm_runtime.moe.products.rows` cannot. Each
reports if a kernel served. None can be traced. `gates` and `gradients` handle the other cases.
"""

from __future__ import annotations

import torch

from ..gemm.epilogues import Epilogue
from ..gemm.extra_operands import ExtraOperands
from ..gemm.operands import check_shapes
from ..gemm.roles import sum_parts
from .launching import GATE_LOST, find, launch_groups, op_of_rows, warn_once


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
    """Computes `rows` with a gated epilogue if a kernel serves. Cannot be traced.

    ``indices``, int32 [m], selects ``a``'s rows. ``warns`` issues the process's warning if no
    kernel serves.

    Returns:
        The epilogue's output, whose width depends on its form, or None if no kernel serves.
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
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Computes the gate and up gradients if a kernel serves. Cannot be traced.

    Args:
        grad: Gradient for the down projection's result, [m, dim].
        b: Down projection weights, [groups, dim, n].
        offsets: Group ends along m, int32 [groups].
        product: Product with gates and ups, [m, 2 * n], in the epilogue's column order.
        epilogue: Gradient epilogue.
        warns: Issue the process's warning if no kernel serves.

    Returns:
        Matrix [m, 2 * n] in the product's column order, and sums or None. For an epilogue with
            sums,
        these are a vector [m] in fp32: for each row, the sum over the gate's results times their
        gradients. It is 0 past the last end, because the launch zeroes sums and a kernel writes
            only
        rows in groups. None if no kernel serves.
    """
    parts = None
    if epilogue.form is not None and epilogue.form.row.has_sums:
        parts = grad.new_empty((grad.shape[0], sum_parts(b.shape[2])), dtype=torch.float32)
    gradients = _by_kernel(grad, b, offsets, product, epilogue, warns, sums=parts)
    if gradients is None:
        return None
    return gradients, None if parts is None else parts.sum(1)


def rows_into(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor | None = None,
) -> bool:
    """Computes `rows` into a matrix that may have gaps between rows. Cannot be traced.

    ``indices``, int32 [m], selects ``a``'s rows.

    Returns:
        True if a kernel served.
    """
    return not launch_groups(out, a, b, offsets, bias, None, indices=indices)


def serves_ups(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    gates: torch.Tensor,
    epilogue: Epilogue,
    indices: torch.Tensor | None = None,
) -> bool:
    """Returns True if a kernel serves `ups_into` with the same arguments. Cannot be traced."""
    extras = ExtraOperands(offsets=offsets, rows=indices, addend=gates, gated=epilogue)
    kernel = find(op_of_rows(indices), a, b, out, extras) if out.shape[0] else None
    return not isinstance(kernel, str)


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
    """Computes ups, followed by the gate's result, if a kernel serves. Cannot be traced.

    Args:
        out: Matrix [m, 2 * n], which may have gaps between rows.
        a: Matrix [m, k].
        b: Up weights, [groups, k, n].
        offsets: Group ends along m, int32 [groups].
        gates: Matrix [m, n], which may have gaps between rows.
        epilogue: Epilogue with the form UPS.
        indices: Row in ``a`` for each row in the result, int32 [m]; None for all rows in order.
        warns: Issue the process's warning if no kernel serves.

    Returns:
        True if a kernel served.
    """
    reason = launch_groups(out, a, b, offsets, gates, epilogue, indices=indices)
    if reason and warns:
        warn_once(GATE_LOST, reason)
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
    shape = check_shapes(op_of_rows(indices), a, b, form=epilogue.form, rows=count)
    out = a.new_empty(shape)
    reason = launch_groups(out, a, b, offsets, addend, epilogue, indices=indices, sums=sums)
    if reason and warns:
        warn_once(GATE_LOST, reason)
    return None if reason else out


def narrow(indices: torch.Tensor) -> torch.Tensor:
    """Converts row indices to contiguous int32, as kernels take them."""
    return indices.to(torch.int32).contiguous()
