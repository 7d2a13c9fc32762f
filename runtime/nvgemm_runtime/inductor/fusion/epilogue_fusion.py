"""Fuses a sum and the activation behind it into one kernel where that is measured to be faster.

Inductor's graphs contain ``addmm`` (or ``mm`` and a sum) and the operations of an activation. If a
bundle has a kernel with that activation as its epilogue, a pattern replaces them with one node.
Lowering that node races the kernel against Inductor's unfused code, which is compiled and timed as
a whole (`epilogue_choices`). An activation whose result feeds anything but GEMMs is not fused
(`ends_kernel`).

A kernel rounds once, after the activation, like Inductor's Triton template with a fused activation.
ATen's addmm also rounds before it. To round only where stock torch may:

- relu, which gives the same result either way, is fused if ATen is among the backends;
- other activations are fused only if Triton is too;
- nothing is fused if the user asks for eager's roundings (``emulate_precision_casts``).

The torch names used here are private and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    Match,
    PatternExpr,
    register_lowering_pattern,
)

from ...gemm.epilogues import Activation
from ...gemm.operands import Operand
from ..autoload import EXPERTS, after_import, install_module
from ..report import raise_or_log
from . import gated_fusion
from .decompositions import DECOMPOSED, rounded
from .graph import (
    PASS,
    are_equal,
    ends_kernel,
    has_timed_sizes,
    hint,
    is_allowed,
    is_weighted,
    value_of,
    with_metadata,
)

aten = torch.ops.aten


def install() -> None:
    """Registers the patterns for sums with activations, for gates, and for recording experts."""
    from torch._inductor.fx_passes.post_grad import pass_patterns

    for activation, pattern in _patterns():
        lowering = _lowering(activation)
        register_lowering_pattern(pattern, _may_fuse(activation), pass_dict=pass_patterns[PASS])(
            lowering
        )
        with_metadata(lowering, _fake_result)  # after registering, which resets it
    gated_fusion.install()
    after_import(EXPERTS, functools.partial(install_module, "recorded_experts"))


def _patterns() -> Iterator[tuple[Activation, PatternExpr]]:
    for form in _SUMS:
        yield Activation.RELU, CallFunction(aten.relu.default, form())
        for dtype in (torch.bfloat16, torch.float16):
            for activation, pattern in DECOMPOSED.items():
                yield activation, rounded(pattern, form(), dtype)


def _addmm() -> PatternExpr:
    return CallFunction(aten.addmm.default, KeywordArg("bias"), KeywordArg("a"), KeywordArg("b"))


def _mm() -> PatternExpr:
    return CallFunction(aten.mm.default, KeywordArg("a"), KeywordArg("b"))


def _reshaped(product: PatternExpr) -> PatternExpr:
    return CallFunction(aten.reshape.default, product, KeywordArg("shape"))


_SUMS: tuple[Callable[[], PatternExpr], ...] = (
    _addmm,
    lambda: _reshaped(_addmm()),
    lambda: CallFunction(aten.add.Tensor, _mm(), KeywordArg("bias")),
    lambda: CallFunction(aten.add.Tensor, KeywordArg("bias"), _mm()),
    lambda: CallFunction(aten.add.Tensor, _reshaped(_mm()), KeywordArg("bias")),
    lambda: CallFunction(aten.add.Tensor, KeywordArg("bias"), _reshaped(_mm())),
)
"""Forms that a product with a bias takes in graphs."""


def _may_fuse(activation: Activation) -> Callable[[Match], bool]:
    def may_fuse(match: Match) -> bool:
        try:
            return (
                is_allowed(activation)
                and ends_kernel(match.output_node())
                and _is_plain(match)
                and _has_kernels(match, activation)
            )
        except Exception as error:
            raise_or_log(error)
            return False

    return may_fuse


def _is_plain(match: Match) -> bool:
    """Returns True if the sum adds a row, all dtypes agree, and the sizes can be timed."""
    if any(is_weighted(node) for node in match.nodes):
        return False
    values = [value_of(match.kwargs[name]) for name in ("bias", "a", "b")]
    values.append(value_of(match.output_node()))
    if any(value is None for value in values):
        return False  # the addend is a number
    if not all(map(has_timed_sizes, values)):
        return False
    return len({value.dtype for value in values}) == 1 and _adds_a_row(match, *values)


def _adds_a_row(match: Match, bias: Any, a: Any, b: Any, out: Any) -> bool:
    """Returns True if the addend is one row of n and the sum has the product's shape.

    A product that is reshaped before the sum may be broadcast with it, and the row may lie along a
    dimension other than n.
    """
    n = b.shape[1]
    if not are_equal(bias.shape, (1, n) if bias.dim() == 2 else (n,)):
        return False
    if aten.addmm.default in match.targets.values():
        return True  # any reshape follows the sum
    reshaped = [node for node in match.nodes if node.target is aten.reshape.default]
    summand = value_of(reshaped[0]).shape if reshaped else (a.shape[0], n)
    return are_equal(out.shape, summand) and are_equal(summand[-1:], (n,))


def _has_kernels(match: Match, activation: Activation) -> bool:
    """Returns True if a bundle has a kernel.

    Assumes row-major results, because Inductor fixes strides later.
    """
    from ...gemm.aten import read_inputs
    from ...settings import max_choices
    from ..offers import find_offers
    from ..reading import operand_of_tensor

    bias, a, b = (
        operand_of_tensor(match.kwargs[name].meta["val"], hint) for name in ("bias", "a", "b")
    )
    m, n = a.shape[0], b.shape[1]
    out = Operand(dtype=a.dtype, device=a.device, shape=(m, n), strides=(n, 1), address=0)
    gemm = read_inputs("addmm", [bias, a, b], {}, out, activation)
    return bool(find_offers(gemm, max_choices(), needs_kernel=True).kernels)


def _lowering(activation: Activation) -> Callable[..., Any]:
    def nvgemm_aot_fused(match: Match, *, bias: Any, a: Any, b: Any, shape: Any = None) -> Any:
        from torch._inductor.lowering import lowerings

        from .epilogue_choices import lower

        was_apart = aten.mm.default in match.targets.values()
        result = lower(activation, bias, a, b, was_apart=was_apart)
        return result if shape is None else lowerings[aten.reshape.default](result, shape)

    return nvgemm_aot_fused


def _fake_result(
    *, bias: object, a: torch.Tensor, b: torch.Tensor, shape: Any = None
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]) if shape is None else shape)
