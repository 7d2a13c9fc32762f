"""Reasons why no bundled kernel can join the choices for a GEMM.

The torch names used here are private and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.virtualized import V

from ...gemm.aten import OPERATORS


def obstacles(op: str, inputs: Sequence[Any], layout: Any) -> list[str]:
    """Returns the reasons why no bundled kernel can join a call's choices."""
    why_not_in_cpp = cpp_obstacle(op)
    if why_not_in_cpp is not None:
        return [why_not_in_cpp]
    if getattr(config, "distributed_max_autotune_gemm", False):
        return ["distributed_max_autotune_gemm ignores extern choices other than ATen's"]
    if op == "_scaled_mm" and not all(_can_be_random(node.get_dtype()) for node in inputs):
        return ["this torch cannot create random fp4 tensors, so choices cannot be autotuned"]
    if not isinstance(layout, ir.FixedLayout):
        return ["Inductor has not fixed the strides of the result"]
    if not all(_can_fix_strides(node) for node in inputs):
        return ["Inductor must change the strides of an operand"]
    return []


def cpp_obstacle(op: str) -> str | None:
    """Returns the reason why generated C++ cannot call bundled kernels, or None."""
    if not config.cpp_wrapper:
        return None
    if not OPERATORS[op].has_cpp_call:
        return f"generated C++ cannot call ATen's {op} with an existing tensor as its result"
    platform = getattr(config.aot_inductor, "cross_target_platform", None)
    if platform:
        return f"generated C++ for {platform} does not call bundled kernels, which run on Linux"
    if getattr(getattr(config, "aot_inductor_mode", None), "compile_standalone", False):
        return "generated C++ that is compiled standalone has no torch to call kernels through"
    return None


@functools.cache
def _can_be_random(dtype: torch.dtype) -> bool:
    """Returns True if torch can create random tensors of a dtype. Up to 2.12 it raises for fp4."""
    from torch._dynamo.testing import rand_strided

    try:
        rand_strided((2,), (1,), dtype=dtype)
    except RuntimeError:  # includes NotImplementedError
        return False
    return True


def _can_fix_strides(node: Any) -> bool:
    """Returns True if an operand may keep the strides that the choice is made for.

    Inductor fixes a computed buffer's strides as late as it can. If they change after two extern
    choices are made for the buffer, torch 2.13 to 2.15 raise a KeyError.
    """
    if isinstance(getattr(node, "data", node), ir.ReinterpretView):
        return True
    constraint = V.graph.buffer_layout_constraints.get(node.get_name())
    layout = node.get_layout()
    return constraint is None or (
        list(constraint.size) == list(layout.size)
        and list(constraint.stride) == list(layout.stride)
    )
