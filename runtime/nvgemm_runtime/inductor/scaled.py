"""Kernels for ``_scaled_mm_v2`` with swizzled scales, which Inductor computes by ATen alone.

Inductor asks for choices for the scales that its own templates know. For the others, the scales of
blocks in their swizzle, this lowering does: ATen's operator and bundled kernels are the choices. It
declines where no kernel is there, and Inductor lowers the call as stock torch does.

The names of torch that are used here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import lowering

from .failures import survive

_OPERATOR = torch.ops.aten._scaled_mm_v2.default


def install() -> None:
    """Have Inductor ask us first."""
    if hasattr(lowering, "user_lowerings"):  # from torch 2.12 on
        lowering.user_lowerings.setdefault(_OPERATOR, _lower_or_decline)
        return
    if _OPERATOR in lowering.lowerings:
        return  # somebody else's
    # What Inductor itself would come to, once it met the operator: ATen, with strides as they are.
    constraint = lowering.constrain_to_fx_strides
    lowering.make_fallback(_OPERATOR, layout_constraint=constraint, warn=False)
    lowering.lowerings[_OPERATOR] = _with_stock(lowering.lowerings[_OPERATOR])


def _with_stock(stock: Callable[..., Any]) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        lowered = _lower_or_decline(*args, **kwargs)
        return stock(*args, **kwargs) if lowered is None else lowered

    return lower


def _lower_or_decline(*args: Any, **kwargs: Any) -> Any:
    """The node of the result, or None where what Inductor has for it is all there is."""
    names = (argument.name for argument in _OPERATOR._schema.arguments)
    arguments = {**dict(zip(names, args)), **kwargs}
    try:
        if _has_choices_of_its_own(arguments):
            return None
        from .scaled_choices import lower

        return lower(arguments)
    except Exception as error:
        survive(error)
        return None


def _has_choices_of_its_own(arguments: dict[str, Any]) -> bool:
    """Whether Inductor asks for choices itself, which are those of ``_scaled_mm`` then."""
    if not hasattr(lowering, "user_lowerings") or _OPERATOR not in lowering.lowerings:
        return False
    return not any((*arguments["swizzle_a"], *arguments["swizzle_b"]))
