"""Computes an eager GEMM: refuses calls that torch would have to see, then launches a kernel."""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import NoKernelError
from ..gemm.epilogues import ADD
from ..gemm.extra_operands import (
    NO_EXTRAS,
    ExtraOperands,
    check_offset_values,
    check_row_values,
)
from ..gemm.group_limits import too_large_reason_for
from ..gemm.operand_checks import check_kind, check_shapes
from ..gemm.operands import check_empty, torch_dtype, usual_out_dtype
from ..gemm.problem import Op
from ..matching.device import wants_determinism, warns_on_nondeterminism
from ..matching.refusals import timing_refusal
from ..settings import is_debugging
from .autograd import refuse_lost_derivative
from .fast_path import count_write, refuse_negation, refuse_tracing
from .loading.loader import LoadedKernel
from .select import choose_kernel, load_kernel

if TYPE_CHECKING:
    import torch

_Member = TypeVar("_Member", bound=enum.Enum)

_run_untraced: Callable[..., torch.Tensor] | None = None


def compute(*arguments: Any) -> torch.Tensor:
    """Calls `_run` outside ``torch.compile``: Dynamo fails on parts of the kernel search."""
    global _run_untraced
    dynamo = sys.modules.get("torch._dynamo")  # importing it would take seconds
    if dynamo is None:
        return _run(*arguments)
    if _run_untraced is None:
        _run_untraced = dynamo.disable(_run)
    return _run_untraced(*arguments)


def _run(
    where: str,
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    kernel: str | LoadedKernel | None,
    extras: ExtraOperands = NO_EXTRAS,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes a GEMM: refuses calls that torch would have to see, finds and launches a kernel."""
    refuse_tracing(where)
    loaded = None if kernel is None else _load_named(where, op, kernel, extras)
    operands = {"a": a, "b": b, **extras.named}
    if out is not None:
        operands["out"] = out
    refuse_lost_derivative(where, **operands)
    for name, tensor in operands.items():
        check_kind(where, name, tensor)
    form = None if extras.gated is None else extras.gated.form
    shape = check_shapes(op, a, b, out, form=form, groups=extras.groups, rows=extras.gathered_rows)
    if out is None:
        signature = None if loaded is None else loaded.kernel.signature
        default_dtype = (
            usual_out_dtype(a.dtype) if signature is None else torch_dtype(signature.out)
        )
        out = a.new_empty(shape, dtype=out_dtype or default_dtype)
    elif out_dtype not in (None, out.dtype):
        raise ValueError(f"{where}: out is {out.dtype}, out_dtype {out_dtype}; omit one of them")
    refuse_negation(where, out, *operands.values())
    sums = extras.sums
    is_without_groups = op.groups_rows and b.shape[0] == 0
    reads = extras.gated is not None and extras.gated.reads_addend
    adds = extras.addend is not None and not reads
    is_without_products = not adds and 0 in (a.numel(), b.numel())
    if out.numel() == 0 or is_without_products or is_without_groups:
        check_empty(op, a, b, out, extras)
        if sums is not None:
            sums.zero_()
        return out.zero_()  # like ATen: an empty sum is zero
    if a.numel() == 0:
        raise NoKernelError(f"{where}: k is 0, so the result is the addend; use torch")
    if extras.offsets is not None and is_debugging():
        if op is Op.K_GROUPED_MM:
            check_offset_values(extras.offsets, a.shape[1], op.value, "k")
        else:
            check_offset_values(extras.offsets, out.shape[0], op.value)
            if extras.rows is not None:
                check_row_values(extras.rows, a.shape[0], extras.offsets)
    if loaded is not None and op.has_groups:
        _require_small_enough(where, loaded, a, out)
    loaded = loaded or choose_kernel(op, a, b, out, extras)
    if sums is not None:
        sums.zero_()  # a kernel writes only some elements
    count_write(out)
    loaded.launch(a, b, out, *extras.tensors())
    return out


def _require_small_enough(
    where: str, loaded: LoadedKernel, a: torch.Tensor, out: torch.Tensor
) -> None:
    """Applies matching's size limits to a kernel that the caller names."""
    divided = a.shape[1] if loaded.op is Op.K_GROUPED_MM else out.shape[0]
    row_bytes = out.element_size() * (out.stride(-2) if out.shape[-2] > 1 else out.shape[-1])
    reason = too_large_reason_for(loaded.kernel.provider, loaded.op, divided, row_bytes)
    if reason is not None:
        raise NoKernelError(f"{where}: kernel {loaded.kernel.id[:12]}: {reason}", (reason,))


def _load_named(
    where: str, op: Op, kernel: str | LoadedKernel, extras: ExtraOperands
) -> LoadedKernel:
    """Returns the kernel that the caller names."""
    if isinstance(kernel, str):
        kernel = load_kernel(kernel)
    elif not isinstance(kernel, LoadedKernel):
        raise TypeError(
            f"{where}: kernel must be an id, a kernel from choose(), or None (got "
            f"{type(kernel).__name__})"
        )
    signature, epilogue = kernel.kernel.signature, kernel.kernel.signature.epilogue
    recipe = extras.recipe or signature.scales
    reason = timing_refusal(kernel.kernel, wants_determinism())
    if reason is not None:
        message = f"{where}: kernel {kernel.kernel.id[:12]}: {reason}"
        if not warns_on_nondeterminism():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=5)  # at the public function's caller
    if extras.gated is not None or signature.is_gated:
        computes = epilogue is extras.gated
    else:
        computes = (epilogue and epilogue.activation) is extras.activation
        if op.groups_rows:  # here a bias may have a matrix addend's shape
            computes = computes and (epilogue is ADD) is extras.adds_matrix
    if kernel.op is not op or not computes or recipe is not signature.scales:
        raise ValueError(f"{where}: kernel {kernel.kernel.id[:12]} computes {signature.key}")
    return kernel


def enum_of(where: str, kind: type[_Member], value: _Member | str | None) -> _Member | None:
    """Returns an enum member that a caller may give by value."""
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"{where}: no such {kind.__name__}: {value!r} (known: {known})") from None
