"""Refuses calls that would silently lose a derivative, because kernels have none.

Operators refuse at torch's Autograd key. ``torch.func`` transforms dispatch before it and reach it
once per level; after it, derivatives are invisible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .fakes import OPERATORS

if TYPE_CHECKING:
    import torch

_libraries: list[torch.library.Library] = []
"""Live libraries; torch unregisters a deleted library's functions."""


def refuse_lost_derivative(where: str, **operands: torch.Tensor) -> None:
    """Refuses operands through which a derivative is recorded.

    Raises:
        RuntimeError: If gradients are recorded and an operand requires one, or an operand has a
            forward-mode tangent.
    """
    import torch
    from torch.autograd import forward_ad

    if torch.is_grad_enabled():
        for name, operand in operands.items():
            if operand.requires_grad:
                raise RuntimeError(
                    f"{where}: {name} requires grad, and the operator has no derivative; call it "
                    f"under torch.no_grad() or detach {name}"
                )
    if forward_ad._current_level >= 0:
        for name, operand in operands.items():
            if forward_ad.unpack_dual(operand).tangent is not None:
                raise RuntimeError(
                    f"{where}: {name} has a forward-mode tangent, and the operator has no "
                    f"derivative; pass torch.autograd.forward_ad.unpack_dual({name}).primal"
                )


def register_refusals() -> None:
    """Registers refusals at the Autograd key; accepted calls continue to the keys below."""
    import torch

    library = torch.library.Library("nvgemm_aot", "IMPL")
    for name in OPERATORS:
        packet = getattr(torch.ops.nvgemm_aot, name)
        argument_names = [argument.name for argument in packet.default._schema.arguments]
        is_plain = argument_names == ["a", "b", "kernel"]
        for overload, specialised in ((packet.default, _functional), (packet.out, _out_form)):
            make = specialised if is_plain else _any_form
            library.impl(overload, make(overload), "Autograd", with_keyset=True)
    _libraries.append(library)


def _functional(overload: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    import torch
    from torch.autograd import forward_ad

    # Local names for speed: every eager call outside inference mode runs this function.
    grad_enabled, redispatch = torch.is_grad_enabled, overload.redispatch
    below = torch._C._after_autograd_keyset
    where = overload.name()

    def run(
        keys: torch._C.DispatchKeySet, a: torch.Tensor, b: torch.Tensor, kernel: str
    ) -> torch.Tensor:
        if (grad_enabled() and (a.requires_grad or b.requires_grad)) or (
            forward_ad._current_level >= 0
        ):
            refuse_lost_derivative(where, a=a, b=b)
        return redispatch(keys & below, a, b, kernel)

    return run


def _out_form(overload: torch._ops.OpOverload) -> Callable[..., None]:
    import torch
    from torch.autograd import forward_ad

    grad_enabled, redispatch = torch.is_grad_enabled, overload.redispatch
    below = torch._C._after_autograd_keyset
    where = overload.name()

    def run(
        keys: torch._C.DispatchKeySet,
        a: torch.Tensor,
        b: torch.Tensor,
        kernel: str,
        *,
        out: torch.Tensor,
    ) -> None:
        if (grad_enabled() and (a.requires_grad or b.requires_grad or out.requires_grad)) or (
            forward_ad._current_level >= 0
        ):
            refuse_lost_derivative(where, a=a, b=b, out=out)
        _refuse_negated_out(where, out)
        redispatch(keys & below, a, b, kernel, out=out)

    return run


def _any_form(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Like the two above, for an operator with any arguments."""
    import torch

    redispatch = overload.redispatch
    below = torch._C._after_autograd_keyset
    where = overload.name()
    names = [argument.name for argument in overload._schema.arguments]

    def run(keys: torch._C.DispatchKeySet, *arguments: Any, **keywords: Any) -> Any:
        by_name = {**dict(zip(names, arguments)), **keywords}
        tensors = {
            name: value for name, value in by_name.items() if isinstance(value, torch.Tensor)
        }
        refuse_lost_derivative(where, **tensors)
        if "out" in tensors:
            _refuse_negated_out(where, tensors["out"])
        return redispatch(keys & below, *arguments, **keywords)

    return run


def _refuse_negated_out(where: str, out: torch.Tensor) -> None:
    if out.is_neg():
        # torch would write to a copy, then fail because the operator returns nothing.
        raise RuntimeError(
            f"{where}: out is a lazily negated view; pass a tensor without pending negation"
        )
