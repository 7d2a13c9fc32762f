"""Finds and launches kernels for experts, and defines operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..errors import NvgemmError
from ..gemm.epilogues import Epilogue
from ..gemm.extra_operands import ExtraOperands, check_offset_values
from ..gemm.moe_operators import NAMESPACE
from ..gemm.problem import Op
from ..launch.fast_path import count_write
from ..launch.select import Unserved, find_kernel
from ..settings import is_debugging
from .by_torch import ALIGNMENT_BYTES

BY_TORCH = "torch computes a grouped GEMM"
GATE_LOST = "a compiled graph computes a gate by torch's operators"
SUMMED_BY_TORCH = "torch applies routing weights or adds token rows"
WARNINGS = (BY_TORCH, GATE_LOST, SUMMED_BY_TORCH)
"""Subjects of warnings, each issued once per process."""

_warned: set[str] = set()


def launch(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands
) -> str:
    """Computes ``out`` by the best kernel. Returns the reason why none serves, or ""."""
    try:
        kernel = find_kernel(op, a, b, out, extras)
    except NvgemmError as error:
        if error.stops_compilation:
            raise
        return str(error)
    if isinstance(kernel, Unserved):
        return kernel.message
    if extras.sums is not None:
        extras.sums.zero_()
    count_write(out)
    kernel.launch(a, b, out, *extras.tensors())
    return ""


def launch_groups(
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
    """Computes ``out``, with any number of rows, by a kernel. Returns why none serves, or ""."""
    # Torch resolves negated views only for operators.
    a, b, offsets = a.resolve_neg(), b.resolve_neg(), offsets.resolve_neg()
    addend = None if addend is None else addend.resolve_neg()
    if addend is not None and addend.stride(-1) != 1:  # kernels read rows with gaps
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
    a, b = with_unit_stride(a), with_unit_stride(b)
    return launch(op_of_rows(indices), a, b, out, extras)


def op_of_rows(indices: torch.Tensor | None) -> Op:
    """Returns the op for grouped rows: gathered if there are indices."""
    return Op.GROUPED_MM if indices is None else Op.GATHERED_GROUPED_MM


def has_kernel(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: ExtraOperands
) -> bool:
    """Returns True if `launch` has a kernel for the operands."""
    try:
        return not isinstance(find_kernel(op, a, b, out, extras), Unserved)
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


library = torch.library.Library(NAMESPACE, "DEF")
"""Lives as long as the process: torch unregisters a deleted library's operators."""


def define(
    name: str,
    operands: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    gives: str = "Tensor",
) -> Callable[..., Any]:
    """Defines and returns an operator with its fake implementation."""
    library.define(f"{name}({operands}) -> {gives}", tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    operator: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name)
    return operator
