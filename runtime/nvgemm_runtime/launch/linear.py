"""``torch.nn.functional.linear`` with the kernels that plain torch.compile uses, for eager calls.

Serving engines call some products outside their compiled graphs, such as the head's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import NoKernelError
from ..gemm.extra_operands import NO_EXTRAS, ExtraOperands
from ..gemm.operands import Operand, requests
from ..gemm.problem import Op
from ..matching.thresholds import ATEN
from ..settings import Mode, default_mode, max_choices, serves_default_mode
from .compiled import warn_of_memory
from .dispatch_table import find_dispatch
from .dispatched import MeasuredTable
from .loading.fork_locks import ForkLock
from .loading.upload import is_capturing
from .select import facts_of

if TYPE_CHECKING:
    import torch

_PLANNED_ROWS = 2
"""Rows of A in the problem that is looked up. Tables hold for all; one row could be read as either
layout."""

_MOST_PLANS = 4096


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Kernels for a weight.

    Attributes:
        bounds: Ascending first row count for each segment after the first.
        has_kernel: True per segment if a kernel computes it; one more than bounds.
        table: Kernels; None if ATen computes all segments.
    """

    bounds: Sequence[int] = ()
    has_kernel: Sequence[bool] = (False,)
    table: MeasuredTable | None = None


_ATEN_ALONE = _Plan()

_plans: dict[tuple[object, ...], _Plan] = {}
"""Plans by what decides them: all but x's rows and addresses."""

_planning = ForkLock()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes ``torch.nn.functional.linear`` with a bundled kernel where it was measured faster.

    Uses the same dispatch by m as torch.compile without max-autotune, see
    `nvgemm_runtime.dispatch_table`. ``torch.nn.functional.linear`` computes all other calls: those
    that record gradients, run under autocast, a mode or a transform, or are traced or compiled;
    tensor subclasses; and every size, dtype, layout and device without a measured kernel.

    The first call with a weight's shape, strides, dtype and device looks up its table and loads
    its kernels, so call it before a CUDA graph capture. During a capture, a kernel that has not
    run yet is left to torch.

    Args:
        x: Tensor [..., k]. Kernels take matrices, and contiguous tensors with more dimensions.
        weight: Matrix [n, k].
        bias: Vector [n], or None.

    Returns:
        A new tensor [..., n] with x's dtype.

    Raises:
        SettingError: If NVGEMM_AOT has an unknown value.
        RuntimeError: As ``torch.nn.functional.linear``.
    """
    import torch

    function = torch.nn.functional.linear
    if torch.compiler.is_compiling() or _is_seen_by_torch(x, weight, bias):
        return function(x, weight, bias)
    key = (
        weight.dtype,
        weight.device,
        weight.shape,
        weight.stride(),
        None if bias is None else (bias.dtype, bias.shape, bias.stride()),
    )
    plan = _plans.get(key) or _plan_for(key, weight, bias)
    if plan.table is None or x.dim() < 2:
        return function(x, weight, bias)
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    if not plan.has_kernel[bisect_right(plan.bounds, rows)]:
        return function(x, weight, bias)
    result = _compute(plan.table, rows, x, weight, bias)
    return function(x, weight, bias) if result is None else result


def _is_seen_by_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Returns True if torch must see the call.

    It must for a gradient, autocast, a mode, a transform or a trace, and for tensors that are not
    plain matrices in memory.
    """
    import torch

    internals = torch._C
    if (
        torch.autograd.forward_ad._current_level >= 0
        or internals._functorch.peek_interpreter_stack() is not None
        or internals._len_torch_dispatch_stack()
        or internals._is_torch_function_mode_enabled()
        or internals._get_tracing_state() is not None
        or internals._is_any_autocast_enabled()
    ):
        return True
    records = torch.is_grad_enabled()
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or (records and tensor.requires_grad)
            or tensor.layout is not torch.strided
            or tensor.is_nested
        ):
            return True
    return False


def _compute(
    table: MeasuredTable,
    rows: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """Launches the table's kernel; returns None if it does not take the operands."""
    if x.is_neg() or weight.is_neg() or (bias is not None and bias.is_neg()):
        return None
    if x.dim() == 2:
        a = x
        result = out = x.new_empty((rows, weight.shape[0]))
    elif x.is_contiguous():
        a = x.view(rows, x.shape[-1])
        result = x.new_empty((*x.shape[:-1], weight.shape[0]))
        out = result.view(rows, weight.shape[0])
    else:
        return None
    operands = (a, weight.t(), out) if bias is None else (a, weight.t(), out, bias)
    try:
        done = table.compute(*operands)
        if done is True:
            return result
        # An int is the slot of a kernel that has not run yet.
        if done is not False and not is_capturing(x.device) and table.finish(done, *operands):
            return result
    except RuntimeError as error:
        warn_of_memory(table.name, error)
    return None


def _plan_for(key: tuple[object, ...], weight: torch.Tensor, bias: torch.Tensor | None) -> _Plan:
    with _planning.current:
        plan = _plans.get(key)
        if plan is None:
            plan = _make_plan(weight, bias)
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


def _make_plan(weight: torch.Tensor, bias: torch.Tensor | None) -> _Plan:
    """Looks up the dispatch for a weight and loads its kernels.

    Raises:
        SettingError: If NVGEMM_AOT has an unknown value.
    """
    if default_mode() is Mode.OFF or not serves_default_mode() or not max_choices():
        return _ATEN_ALONE
    if weight.dim() != 2:
        return _ATEN_ALONE
    n, k = weight.shape
    a = _operand(weight, (_PLANNED_ROWS, k), (k, 1))
    b = _operand(weight, (k, n), tuple(reversed(weight.stride())))
    extras = NO_EXTRAS
    if bias is not None:
        extras = ExtraOperands(addend=_operand(bias, tuple(bias.shape), bias.stride()))
    try:
        readings = requests(Op.MM, a, b, weight.dtype, extras=extras)
    except (NoKernelError, ValueError):
        return _ATEN_ALONE
    _, dispatch = find_dispatch(readings, facts_of(weight))
    table = dispatch.table
    if not table.has_kernels:
        return _ATEN_ALONE
    return _Plan(
        bounds=table.bounds,
        has_kernel=tuple(kernel_id != ATEN for kernel_id in table.kernels),
        table=MeasuredTable(
            table.bounds,
            table.kernels,
            {id_: dispatch.measured[id_].bundle.origin for id_ in table.used},
        ),
    )


def _operand(like: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Returns an aligned stand-in for an operand: kernels check addresses at each call."""
    return Operand(dtype=like.dtype, device=like.device, shape=shape, strides=strides, address=0)
