"""Products of groups for gates, by a kernel or not at all: `gates` and `gradients` have the rest.

They store the product, gates or ups, or gradients of these, for `nvgemm_runtime.moe.products.rows`
has no place for them. Each says whether a kernel served; none is to be traced.
"""

from __future__ import annotations

import torch

from ..gemm.epilogues import Epilogue
from ..gemm.operands import check_shapes
from ..gemm.roles import sum_parts
from .launching import GATE_LOST, Extras, find, launch_groups, op_of_rows, warn_once


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
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Gradients of gates and ups, if a kernel serves; not to be traced.

    Args:
        grad: Gradient of the down projection's result, [m, dim].
        b: Weights of the down projection, [groups, dim, n].
        offsets: End of each group along m, int32 [groups].
        product: The product of gates and ups, [m, 2 * n], in the epilogue's order of columns.
        epilogue: A gradient.
        warns: Whether to give the process' warning where no kernel serves.

    Returns:
        Matrix [m, 2 * n] in the order of the product. Of an epilogue with sums also for each row
        the sum of what the gate gave times its gradient, a vector [m] in fp32, which is 0 past the
        last end: the launch zeroes sums, and a kernel writes those of groups' rows alone. None if
        no kernel serves.
    """
    parts = None
    if epilogue.form is not None and epilogue.form.row.has_sums:
        parts = grad.new_empty((grad.shape[0], sum_parts(b.shape[2])), dtype=torch.float32)
    found = _by_kernel(grad, b, offsets, product, epilogue, warns, sums=parts)
    if found is None:
        return None
    return found, None if parts is None else parts.sum(1)


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
    """Whether a kernel serves `ups_into`, of the same arguments; not to be traced."""
    extras = Extras(offsets=offsets, rows=indices, addend=gates, gated=epilogue)
    found = find(op_of_rows(indices), a, b, out, extras) if out.shape[0] else None
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
    """Rows' numbers as kernels take them: int32, contiguous."""
    return indices.to(torch.int32).contiguous()
