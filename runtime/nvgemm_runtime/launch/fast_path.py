"""Fastest Python call to a loaded kernel, with the checks that every call needs.

Torch does not see such a call, so this module does what torch does for its own operators: it
refuses to lose a derivative or a traced operation, and increments the output's version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..gemm.operand_checks import check_kinds, check_shapes
from ..gemm.problem import Op
from .autograd import refuse_lost_derivative
from .loading import native
from .loading.loader import LoadedKernel

if TYPE_CHECKING:
    import torch


_Function = Callable[..., "torch.Tensor"]
"""``function(a, b, out=None, kernel=None)``."""


def skip_if_loaded(op: Op) -> Callable[[_Function], _Function]:
    """Decorates a GEMM function so that ``out`` with a loaded kernel skips its body.

    Such a call should cost little more than the launch, so it is one Python frame that reads only
    local names. For the same reason it does not check for ``torch.jit.trace``.
    """

    def decorate(function: _Function) -> _Function:
        grad_enabled: Any = None
        forward_ad: Any = None
        modes: Any = None
        count_up: Any = None
        launch: Any = None

        @functools.wraps(function)
        def call(
            a: torch.Tensor,
            b: torch.Tensor,
            out: torch.Tensor | None = None,
            kernel: str | LoadedKernel | None = None,
        ) -> torch.Tensor:
            nonlocal grad_enabled, forward_ad, modes, count_up, launch
            if type(kernel) is not LoadedKernel or kernel.quick_op is not op or out is None:
                return function(a, b, out, kernel)
            if launch is None:
                grad_enabled, forward_ad, modes, count_up = _torch_functions()
                launch = native.load().launch
            if (
                (grad_enabled() and (a.requires_grad or b.requires_grad or out.requires_grad))
                or forward_ad._current_level >= 0
                or modes()
            ):
                refuse_lost_derivative(op.value, a=a, b=b, out=out)
                refuse_tracing(op.value)
            if kernel.sees_negation and (a.is_neg() or b.is_neg() or out.is_neg()):
                refuse_negation(op.value, a, b, out)
            count_up((out,))  # like count_write; before the launch, which may fail half-way
            try:
                launch(kernel.handle, a, b, out)
            except (RuntimeError, ValueError):
                # DLPack refuses some tensors before the launcher; these messages are better.
                check_kinds(op, a, b, out)
                check_shapes(op, a, b, out)
                raise
            return out

        return call

    return decorate


@functools.cache
def _torch_functions() -> tuple[Any, ...]:
    import torch
    from torch.autograd import forward_ad

    return (
        torch.is_grad_enabled,
        forward_ad,
        torch._C._len_torch_dispatch_stack,
        torch._C._increment_version,
    )


def count_write(out: torch.Tensor) -> None:
    """Tells autograd that a tensor was written, so backward refuses its earlier saved value."""
    import torch

    torch._C._increment_version((out,))


def refuse_tracing(where: str) -> None:
    """Refuses a call while torch records operations, because the recording would miss it.

    Raises:
        RuntimeError: If ``torch.jit.trace`` runs or a dispatch mode is active.
    """
    import torch

    if torch._C._get_tracing_state() is not None:
        recorder = "torch.jit.trace"
    elif torch._C._len_torch_dispatch_stack():
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        recorder = type(_get_current_dispatch_mode()).__name__
    else:
        return
    raise RuntimeError(
        f"nvgemm_runtime.{where} cannot be recorded by {recorder}, which is active; call "
        f"torch.ops.nvgemm_aot.{where} (registered by nvgemm_runtime.load_operators())"
    )


def refuse_negation(where: str, *operands: torch.Tensor) -> None:
    """Refuses lazily negated views: the launcher would read and write negated values.

    Raises:
        ValueError: If an operand is one.
    """
    if any(operand.is_neg() for operand in operands):
        raise ValueError(f"{where}: an operand is a lazily negated view; call .resolve_neg() on it")
