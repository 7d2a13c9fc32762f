"""A call of a public function: what it is given is looked at, a kernel found, and launched.

The quick way past all this, for a loaded kernel and a result that is there, is in `fast_path`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import NoKernelError
from ..gemm.extra_operands import NO_EXTRAS, ExtraOperands, check_offset_values
from ..gemm.operands import (
    check_empty,
    check_kind,
    check_kinds,
    check_shapes,
    torch_dtype,
    usual_out_dtype,
)
from ..gemm.problem import Op
from .autograd import refuse_lost_derivative
from .debugging import is_debugging
from .fast_path import refuse_negation, refuse_tracing
from .library import LoadedKernel
from .select import choose_kernel, load_kernel

if TYPE_CHECKING:
    import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_disabled: dict[Callable[..., Any], Callable[..., Any]] = {}


def unseen_by_dynamo(function: Function) -> Function:
    """Keep ``torch.compile`` out of a function: Dynamo fails on parts of the search."""
    dynamo = sys.modules.get("torch._dynamo")  # not loaded for its own sake: that takes seconds
    if dynamo is None:
        return function
    if function not in _disabled:
        _disabled[function] = dynamo.disable(function)
    return _disabled[function]  # type: ignore[return-value]


def resolve(
    where: str, op: Op, kernel: str | LoadedKernel | None, extras: ExtraOperands = NO_EXTRAS
) -> LoadedKernel | None:
    """The kernel that a caller names, if one is named.

    Raises:
        NoKernelError: If no bundle holds it.
        TypeError: If it is named by something else.
        ValueError: If it computes something else.
    """
    if kernel is None:
        return None
    if isinstance(kernel, str):
        kernel = load_kernel(kernel)
    elif not isinstance(kernel, LoadedKernel):
        raise TypeError(
            f"{where}: kernel must be an id, what choose() gave, or None (got "
            f"{type(kernel).__name__})"
        )
    signature = kernel.kernel.signature
    activation = None if signature.epilogue is None else signature.epilogue.activation
    recipe = extras.recipe or signature.scales
    if kernel.op is not op or activation is not extras.activation or recipe is not signature.scales:
        raise ValueError(f"{where}: kernel {kernel.kernel.id[:12]} computes {signature.key}")
    return kernel


def result_of(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    kernel: LoadedKernel | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Memory for a result: of the type that is named, else the kernel's, else the usual one.

    Raises:
        ValueError: If shapes do not fit.
    """
    shape = check_shapes(op, a, b)
    if out_dtype is None:
        signature = None if kernel is None else kernel.kernel.signature
        out_dtype = usual_out_dtype(a.dtype) if signature is None else torch_dtype(signature.out)
    return a.new_empty(shape, dtype=out_dtype)


def run_with_extras(
    where: str,
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    kernel: str | LoadedKernel | None,
    extras: ExtraOperands,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute something that takes more than A and B.

    Args:
        where: What messages call the function.
        op: Its operation.
        a: First operand.
        b: Second operand.
        out: Where the result goes; made if None.
        kernel: The kernel; the best-ranked if None.
        extras: What else there is.
        out_dtype: Type of a result that is made, where it is not the usual one.

    Returns:
        ``out``.
    """
    refuse_tracing(where)
    loaded = resolve(where, op, kernel, extras)
    operands = {"a": a, "b": b, **extras.named()}
    if out is not None:
        operands["out"] = out
    refuse_lost_derivative(where, **operands)
    for name, tensor in operands.items():
        check_kind(where, name, tensor)
    if out is None:
        out = result_of(op, a, b, loaded, out_dtype)
    else:
        check_shapes(op, a, b, out)
        if out_dtype not in (None, out.dtype):
            raise ValueError(f"{where}: out is {out.dtype}, out_dtype {out_dtype}; leave one away")
    refuse_negation(where, out, *operands.values())
    if out.numel() == 0 or (extras.addend is None and 0 in (a.numel(), b.numel())):
        check_empty(op, a, b, out, extras)
        return out.zero_()  # as ATen: a sum of nothing is zero
    if a.numel() == 0:
        raise NoKernelError(
            f"{where}: k is 0, so that the result is what is added alone; add it with torch"
        )
    if extras.offsets is not None and is_debugging():
        check_offset_values(extras.offsets, a.shape[0])
    loaded = loaded or choose_kernel(op, a, b, out, extras)
    _count_up(out)
    loaded.launch(a, b, out, *extras.tensors())
    return out


def _count_up(out: torch.Tensor) -> None:
    """Tell autograd that a tensor is written: what was saved of it is lost from then on."""
    import torch

    torch._C._increment_version((out,))


def prepare_call(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    kernel: str | LoadedKernel | None,
) -> tuple[torch.Tensor, LoadedKernel | None]:
    """Prepare ``out = a @ b``.

    Returns:
        ``out``, and the kernel that is to be launched; none where ``out`` holds the result already.
    """
    refuse_tracing(op.value)
    loaded = resolve(op.value, op, kernel)
    if out is None or loaded is None:
        refuse_lost_derivative(op.value, a=a, b=b, **({} if out is None else {"out": out}))
        check_kinds(op, a, b, out)
        if out is None:
            out = result_of(op, a, b, loaded)
        else:
            check_shapes(op, a, b, out)
    refuse_negation(op.value, a, b, out)
    if loaded is None:
        if out.numel() == 0 or a.numel() == 0:
            check_empty(op, a, b, out)
            return out.zero_(), None  # as ATen: a sum of nothing is zero
        loaded = choose_kernel(op, a, b, out)
    return out, loaded
