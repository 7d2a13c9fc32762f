"""Patterns for activations as torch decomposes them: computed in fp32, then rounded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._inductor.pattern_matcher import CallFunction, PatternExpr

from ...gemm.epilogues import Activation

aten, prims = torch.ops.aten, torch.ops.prims


def rounded(
    activation: Callable[[PatternExpr], PatternExpr], x: PatternExpr, dtype: torch.dtype
) -> PatternExpr:
    """Matches an activation as torch decomposes it: computed in fp32, then rounded."""
    convert = prims.convert_element_type.default
    return CallFunction(convert, activation(x), dtype)


def _wide(x: PatternExpr, users: int) -> PatternExpr:
    return CallFunction(prims.convert_element_type.default, x, torch.float32, _users=users)


def silu(x: PatternExpr) -> PatternExpr:
    """Matches torch's decomposition of silu."""
    wide = _wide(x, 2)
    exponential = CallFunction(aten.exp.default, CallFunction(aten.neg.default, wide))
    return CallFunction(aten.div.Tensor, wide, CallFunction(aten.add.Tensor, exponential, 1))


def gelu_tanh(x: PatternExpr) -> PatternExpr:
    """Matches torch's decomposition of gelu's tanh form."""

    def times(left: object, right: object) -> PatternExpr:
        return CallFunction(aten.mul.Tensor, left, right)

    wide = _wide(x, 4)
    cubic = times(times(times(wide, wide), wide), 0.044715)
    inner = times(CallFunction(aten.add.Tensor, wide, cubic), 0.7978845608028654)
    outer = CallFunction(aten.add.Tensor, CallFunction(aten.tanh.default, inner), 1)
    return times(times(wide, 0.5), outer)


DECOMPOSED = {Activation.SILU: silu, Activation.GELU_TANH: gelu_tanh}
"""Patterns for activations that torch decomposes and computes in fp32: all but relu."""
