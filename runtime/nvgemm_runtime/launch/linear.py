"""``torch.nn.functional.linear`` with the kernels that plain torch.compile uses, for eager calls.

Serving engines call some products outside their compiled graphs, such as the head's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import NoKernelError, RequiredError
from ..gemm.extra_operands import NO_EXTRAS, ExtraOperands
from ..gemm.operands import Operand, requests
from ..gemm.problem import Op, Problem
from ..installed.registry import INSTALLATION
from ..installed.required import require_opened
from ..matching.device import DeviceFacts
from ..matching.dispatch import Dispatch
from ..matching.thresholds import ATEN
from ..settings import (
    DEFAULT_MODE_VARIABLE,
    MAX_CHOICES_VARIABLE,
    MODE_VARIABLE,
    Mode,
    default_mode,
    max_choices,
    serves_default_mode,
)
from .compiled import warn_of_memory
from .dispatch_table import find_dispatch
from .dispatched import MeasuredTable
from .loading.fork_locks import ForkLock
from .loading.upload import is_capturing
from .select import facts_of

if TYPE_CHECKING:
    import torch

_PLANNED_ROWS = 2
"""Rows of A in the problem that is looked up. Tables hold for all rows; a single one could be read
in either layout."""

_MOST_PLANS = 4096
"""Most weights of different shapes, strides, dtypes and devices that are kept."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Kernels for a weight.

    Attributes:
        bounds: Ascending first row count for each segment after the first.
        has_kernel: True per segment if a kernel computes it; one more than bounds.
        table: Kernels; None if torch computes all segments.
        refusals: Reasons by rows why declared problems lack their kernels, in mode ``required``.
    """

    bounds: Sequence[int] = ()
    has_kernel: Sequence[bool] = (False,)
    table: MeasuredTable | None = None
    refusals: Mapping[int, str] = field(default_factory=dict)


_TORCH_ALONE = _Plan()

_plans: dict[tuple[object, ...], _Plan] = {}
"""Plans by all that decides them: a weight without its address, and a bias."""

_planning = ForkLock()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes ``torch.nn.functional.linear``, with a bundled kernel where it was measured faster.

    Dispatches by the number of rows like torch.compile without max-autotune: see
    `nvgemm_runtime.dispatch_table` for ``linear``'s ``x`` and ``weight.t()``. All other calls go to
    ``torch.nn.functional.linear``: those that record gradients, run under autocast, in a mode or a
    transform, or are traced or compiled; subclasses other than ``Parameter``; and every size,
    dtype, layout and device without a measured kernel.

    The first call with a weight's shape, strides, dtype and device looks up its dispatch by the
    settings at that time, and loads its kernels onto the device. During a CUDA graph capture
    nothing is loaded: torch computes until such a call was made outside a capture.

    Args:
        x: Tensor [..., k]. Kernels take matrices, also with gaps between rows, and contiguous
            tensors with more dimensions.
        weight: Matrix [n, k].
        bias: Vector [n], or None.

    Returns:
        A new tensor [..., n] with x's dtype.

    Raises:
        RequiredError: In mode ``required``, if the product is declared and its kernel cannot be
            used, or a bundle cannot be opened.
        SettingError: If NVGEMM_AOT has an unknown value.
        RuntimeError: As ``torch.nn.functional.linear``.
    """
    import torch

    if torch.compiler.is_compiling() or _is_observed() or not _are_plain(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    key = (
        weight.dtype,
        weight.device,
        weight.shape,
        weight.stride(),
        None if bias is None else (bias.dtype, bias.shape),
    )
    plan = _plans.get(key) or _find_plan(key, weight, bias)
    if x.dim() > 1 and (columns := x.shape[-1]):
        rows = x.numel() // columns
        if plan.has_kernel[bisect_right(plan.bounds, rows)]:
            assert plan.table is not None  # as a segment has a kernel
            result = _compute(plan.table, rows, x, weight, bias)
            if result is not None:
                return result
        elif rows in plan.refusals:
            raise _required_error(weight, rows, plan.refusals[rows])
    return torch.nn.functional.linear(x, weight, bias)


def _is_observed() -> bool:
    """Returns True for a derivative, a transform, a mode, a trace or autocast.

    A function mode is active too while make_fx traces before dispatch.
    """
    import torch

    return (
        torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._get_tracing_state() is not None
        or torch._C._is_any_autocast_enabled()
    )


def _are_plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Returns True for operands in memory whose gradients are not recorded."""
    import torch

    plain, strided, records = (
        (torch.Tensor, torch.nn.Parameter),
        torch.strided,
        torch.is_grad_enabled(),
    )
    for operand in (x, weight) if bias is None else (x, weight, bias):
        if (
            type(operand) not in plain
            or operand.layout is not strided
            or operand.is_nested
            or (records and operand.requires_grad)
        ):
            return False
    return True


def _compute(
    table: MeasuredTable,
    rows: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """Launches the table's kernel; returns None if it does not take the operands."""
    # Operands on several devices, and pending negations, are not visible to kernels.
    if x.device != weight.device or x.is_neg() or weight.is_neg():
        return None
    if bias is not None and (bias.device != weight.device or bias.is_neg()):
        return None
    n = weight.shape[0]
    if x.dim() == 2:
        a = x
        result = out = x.new_empty((rows, n))
    elif x.is_contiguous():
        a = x.view(rows, x.shape[-1])
        result = x.new_empty((*x.shape[:-1], n))
        out = result.view(rows, n)
    else:
        return None
    operands = (a, weight.t(), out) if bias is None else (a, weight.t(), out, bias)
    try:
        done = table.compute(*operands)
        if done is True:
            return result
        # An integer is the slot of a kernel that has not run on this device.
        if done is not False and not is_capturing(x.device) and table.finish(done, *operands):
            return result
    except RuntimeError as error:
        warn_of_memory(table.name, error)
    return None


def _find_plan(key: tuple[object, ...], weight: torch.Tensor, bias: torch.Tensor | None) -> _Plan:
    """Returns the plan for a weight, made outside captures and once."""
    if is_capturing(weight.device):
        return _TORCH_ALONE
    with _planning.current:
        plan = _plans.get(key)
        if plan is None:
            if len(_plans) >= _MOST_PLANS:
                return _TORCH_ALONE  # tables are never freed
            plan = _plans[key] = _make_plan(weight, bias)
    return plan


def _make_plan(weight: torch.Tensor, bias: torch.Tensor | None) -> _Plan:
    """Looks up the dispatch for a weight and loads its kernels.

    Raises:
        RequiredError: If a bundle cannot be opened, in mode ``required``.
        SettingError: If NVGEMM_AOT has an unknown value.
    """
    mode = default_mode()
    if mode is Mode.OFF or not serves_default_mode() or weight.dim() != 2:
        return _TORCH_ALONE
    if mode is Mode.REQUIRED:
        require_opened()
    n, k = weight.shape
    a = _operand(weight, (_PLANNED_ROWS, k), (k, 1))
    b = _operand(weight, (k, n), tuple(reversed(weight.stride())))
    extras = NO_EXTRAS
    if bias is not None:
        extras = ExtraOperands(addend=_operand(bias, tuple(bias.shape), (1,) * bias.dim()))
    try:
        readings = requests(Op.MM, a, b, weight.dtype, extras=extras)
    except (NoKernelError, ValueError):
        return _TORCH_ALONE
    facts = facts_of(weight)
    request, dispatch = find_dispatch(readings, facts)
    refusals = _refusals(request.problem, dispatch, facts) if mode is Mode.REQUIRED else {}
    table = dispatch.table
    if not table.has_kernels or not max_choices():
        return _Plan(refusals=refusals)
    origins = {id_: dispatch.measured[id_].bundle.origin for id_ in table.used}
    measured = MeasuredTable(table.bounds, table.kernels, origins)
    measured.load_onto(weight.device)
    return _Plan(
        bounds=table.bounds,
        has_kernel=tuple(kernel_id != ATEN for kernel_id in table.kernels),
        table=measured,
        refusals=refusals,
    )


def _operand(like: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Returns an aligned stand-in for an operand: kernels check addresses at each call."""
    return Operand(dtype=like.dtype, device=like.device, shape=shape, strides=strides, address=0)


def _refusals(problem: Problem, dispatch: Dispatch, facts: DeviceFacts) -> Mapping[int, str]:
    """Returns the reasons by m why kernels for declared problems cannot be used."""
    reasons = dict(INSTALLATION.index(facts).missing_sizes(problem))
    reasons |= {m: why for m, why in dispatch.open_reasons.items() if m in dispatch.declared}
    if not max_choices():
        reasons |= {
            m: f"{MAX_CHOICES_VARIABLE}=0 allows no kernels"
            for m in dispatch.declared
            if dispatch.table.at(m) != ATEN
        }
    return reasons


def _required_error(weight: torch.Tensor, rows: int, reason: str) -> RequiredError:
    n, k = weight.shape
    return RequiredError(
        f"linear: {MODE_VARIABLE}=required forbids computing m {rows}, n {n}, k {k} in "
        f"{weight.dtype}, which a bundle declares, without its kernel: {reason}; measure it on "
        "this GPU with this torch (nvgemm-aot confirm), or let torch compute it: set "
        f"{MODE_VARIABLE}=auto, or {DEFAULT_MODE_VARIABLE}=0, which limits mode required to "
        "max-autotune",
        (reason,),
    )
