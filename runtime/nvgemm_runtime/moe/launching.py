"""Kernels for experts: which one serves a call, and its launch; and how operators are defined."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import NvgemmError
from ..gemm.epilogues import Epilogue
from ..gemm.extra_operands import ExtraOperands, check_offset_values
from ..gemm.moe_operators import NAMESPACE
from ..gemm.problem import Op
from ..launch.fast_path import count_write
from ..launch.loader import LoadedKernel
from ..launch.select import choose_kernel
from ..matching.device import wants_determinism
from ..settings import is_debugging
from .by_torch import ALIGNMENT_BYTES


class Extras(NamedTuple):
    """The extra operands of experts' kernels, as `ExtraOperands` has them.

    Of that, one is made where a kernel is looked up for the first time: to make it takes longer
    than to find the kernel again.
    """

    offsets: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    addend: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    adds_matrix: bool = False
    gated: Epilogue | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Those that there are, in the order of `nvgemm_runtime.gemm.roles.extra_roles`."""
        of_all = (self.offsets, self.rows, self.addend, self.sums)
        return [one for one in of_all if one is not None]


_found: dict[tuple[object, ...], LoadedKernel | str] = {}
"""By all that decides: the kernel, or why none serves."""

_MAX_FOUND = 4096

BY_TORCH = "torch computes a grouped product"
GATE_LOST = "a compiled graph computes a gate by its product and torch's operators"
SUMMED_BY_TORCH = "torch weighs or adds rows of tokens"
WARNINGS = (BY_TORCH, GATE_LOST, SUMMED_BY_TORCH)
"""What a process is warned of, once each."""

_warned: set[str] = set()


def launch(op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: Extras) -> str:
    """Compute ``out`` by the best kernel; why none serves, or nothing."""
    kernel = find(op, a, b, out, extras)
    if isinstance(kernel, str):
        return kernel
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
    extras = Extras(
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
    """The operation on rows of groups: as they are, or those that indices name."""
    return Op.GROUPED_MM if indices is None else Op.GATHERED_GROUPED_MM


def find(
    op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, extras: Extras
) -> LoadedKernel | str:
    """The best kernel, looked up once a problem, or why none serves."""
    # Others are on this device, or the native launcher refuses them.
    key = (
        op, a.device, wants_determinism(), extras.adds_matrix, extras.gated,
        *(None if one is None else _facts(one) for one in (a, b, out, *extras[:4])),
    )  # fmt: skip
    kernel = _found.get(key)
    if kernel is None:
        try:
            kernel = choose_kernel(op, a, b, out, ExtraOperands(**extras._asdict()))
        except NvgemmError as error:
            if error.stops_compilation:
                raise
            kernel = str(error)
        if len(_found) >= _MAX_FOUND:
            _found.clear()
        _found[key] = kernel
    return kernel


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 128


def warn_once(what: str, reason: str) -> None:
    """Warn of one of `WARNINGS` and why it is so, once a process."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"nvgemm_runtime.moe: {what}, and from here on every other that no kernel serves, "
            f"without another warning: {reason}",
            stacklevel=2,
        )


def was_warned(what: str) -> bool:
    """Whether this process was warned of one of `WARNINGS`."""
    return what in _warned


def with_unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy where neither of its last dimensions is contiguous."""
    is_dense = 1 in (matrix.stride(-1), matrix.stride(-2))
    return matrix if is_dense else matrix.contiguous()


def row_major(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy where rows have gaps or begin at addresses that kernels cannot read."""
    pitch = matrix.stride(0) * matrix.element_size()
    is_aligned = (pitch | matrix.data_ptr()) % ALIGNMENT_BYTES == 0
    return matrix if matrix.stride(1) == 1 and is_aligned else matrix.contiguous()


library = torch.library.Library(NAMESPACE, "DEF")
"""Kept for the life of the process: torch unregisters the operators of a deleted library."""


def define(
    name: str,
    operands: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    gives: str = "Tensor",
) -> Callable[..., Any]:
    """Define an operator, and what it gives for fake tensors; returns it."""
    library.define(f"{name}({operands}) -> {gives}", tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    operator: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name)
    return operator
