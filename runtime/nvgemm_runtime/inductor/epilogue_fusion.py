"""Fuses a sum and the activation behind it into one kernel, where that is measured to be faster.

Inductor's graphs have ``addmm`` (or ``mm`` and a sum) and the operations that an activation is made
of. Where a bundle has a kernel with that activation in its epilogue, a pattern makes them one node.
When that is lowered, the kernel competes with what Inductor lowers without it, which is compiled
and timed as a whole (`epilogue_choices`). An activation that is followed by anything but GEMMs is
left as it is (`ends_kernel`).

A kernel rounds once, behind the activation, like Inductor's Triton template with the activation
fused; ATen's addmm rounds in between. To round no differently than stock torch may, relu, which
gives the same either way, is fused wherever ATen is among the backends, the others only where
Triton is too, and nothing where the user asks for eager's roundings (``emulate_precision_casts``).

The names of torch that are used here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    Match,
    PatternExpr,
    register_lowering_pattern,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..gemm.epilogues import Activation
from ..gemm.operands import Operand
from ..settings import Mode
from .autoload import EXPERTS, after_import, install_module
from .modes import current_mode
from .report import survive

aten, prims = torch.ops.aten, torch.ops.prims

PASS = 2
"""Number of Inductor's pass over a graph in which it separates sums from products. It visits later
nodes first, so an activation is matched before its sum."""


def install() -> None:
    """Register the patterns of sums with activations, of gates, and of experts to record."""
    from torch._inductor.fx_passes.post_grad import pass_patterns

    from . import gated_fusion

    for activation, pattern in _patterns():
        lowering = _lowering(activation)
        register_lowering_pattern(pattern, _may_fuse(activation), pass_dict=pass_patterns[PASS])(
            lowering
        )
        with_metadata(lowering, _fake_result)  # registering resets it
    gated_fusion.install()
    after_import(EXPERTS, functools.partial(install_module, "recorded_experts"))


def _patterns() -> Iterator[tuple[Activation, PatternExpr]]:
    for form in _SUMS:
        yield Activation.RELU, CallFunction(aten.relu.default, form())
        for dtype in (torch.bfloat16, torch.float16):
            yield Activation.SILU, rounded(silu, form(), dtype)
            yield Activation.GELU_TANH, rounded(gelu_tanh, form(), dtype)


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
"""The forms of a product and a bias in graphs."""


def rounded(
    activation: Callable[[PatternExpr], PatternExpr], x: PatternExpr, dtype: torch.dtype
) -> PatternExpr:
    """An activation as torch decomposes it: in fp32, and rounded."""
    convert = prims.convert_element_type.default
    return CallFunction(convert, activation(x), dtype)


def _wide(x: PatternExpr, users: int) -> PatternExpr:
    return CallFunction(prims.convert_element_type.default, x, torch.float32, _users=users)


def silu(x: PatternExpr) -> PatternExpr:
    """Silu as torch decomposes it."""
    wide = _wide(x, 2)
    exponential = CallFunction(aten.exp.default, CallFunction(aten.neg.default, wide))
    return CallFunction(aten.div.Tensor, wide, CallFunction(aten.add.Tensor, exponential, 1))


def gelu_tanh(x: PatternExpr) -> PatternExpr:
    """Gelu's tanh form as torch decomposes it."""

    def times(one: object, other: object) -> PatternExpr:
        return CallFunction(aten.mul.Tensor, one, other)

    wide = _wide(x, 4)
    cubic = times(times(times(wide, wide), wide), 0.044715)
    inner = times(CallFunction(aten.add.Tensor, wide, cubic), 0.7978845608028654)
    outer = CallFunction(aten.add.Tensor, CallFunction(aten.tanh.default, inner), 1)
    return times(times(wide, 0.5), outer)


FIXES_SIZES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether Inductor specialises dynamic sizes when it times a part of a graph."""


def _may_fuse(activation: Activation) -> Callable[[Match], bool]:
    def may_fuse(match: Match) -> bool:
        try:
            return (
                is_wanted(activation)
                and ends_kernel(match.output_node())
                and _is_plain(match)
                and _has_kernels(match, activation)
            )
        except Exception as error:
            survive(error)
            return False

    return may_fuse


def is_wanted(activation: Activation) -> bool:
    """Whether settings allow it."""
    backends = {name.strip() for name in config.max_autotune_gemm_backends.upper().split(",")}
    return (
        (config.max_autotune or config.max_autotune_gemm)
        and backends >= _backends_needed(activation)
        and current_mode() is not Mode.OFF
        and not any(getattr(config, name, False) for name in _SETTINGS_AGAINST)
    )


_GEMMS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._int_mm.default,
        aten._scaled_mm.default,
        aten._grouped_mm.default,
        aten._scaled_grouped_mm.default,
    }
)

_VIEWS = frozenset(
    {aten.reshape.default, aten.view.default, aten.permute.default, aten.unsqueeze.default}
)


def ends_kernel(node: torch.fx.Node) -> bool:
    """Whether only GEMMs, and who called the graph, use what a node computes.

    Inductor would compute any other use in the kernel that applies the activation. The race ends at
    the activation's result, so it would count that kernel as saved, and the graph would still have
    it for the other use.
    """
    return all(
        user.op == "output"
        or user.target in _GEMMS
        or getattr(user.target, "_inductor_lowering_function", False)  # a pattern's, of a GEMM
        or (user.target in _VIEWS and ends_kernel(user))
        for user in node.users
    )


def _backends_needed(activation: Activation) -> set[str]:
    """Backends that ``max_autotune_gemm_backends`` must have.

    ATen is the fallback. Where rounding once makes a difference, Triton is its precedent in stock
    torch.
    """
    return {"ATEN"} if activation.row.commutes_with_rounding else {"ATEN", "TRITON"}


_SETTINGS_AGAINST = (
    "emulate_precision_casts",  # asks for eager's roundings
    "deterministic",  # nothing is timed
    "distributed_max_autotune_gemm",  # ignores extern choices other than ATen's
    "pipeline_max_autotune_gemm",  # times each choice in a process of its own
    "cpp_wrapper",  # generated C++ has no ATen call for both
)


def _is_plain(match: Match) -> bool:
    """Whether a row is added, all types agree, and the sizes allow timing both ways."""
    if any(is_weighted(node) for node in match.nodes):
        return False
    values = [value_of(match.kwargs[name]) for name in ("bias", "a", "b")]
    values.append(value_of(match.output_node()))
    if any(value is None for value in values):
        return False  # the addend is a number
    if not all(map(has_timed_sizes, values)):
        return False
    return len({value.dtype for value in values}) == 1 and _adds_a_row(match, *values)


def has_timed_sizes(value: torch.Tensor) -> bool:
    """Whether Inductor can time a graph of its own with a tensor of these sizes.

    It cannot where a size is known only when the graph runs.
    """
    dynamic = [extent for extent in value.shape if isinstance(extent, torch.SymInt)]
    return not dynamic if FIXES_SIZES else all(extent.node.has_hint() for extent in dynamic)


def is_weighted(node: torch.fx.Node) -> bool:
    """Whether a sum weights its summands, which patterns do not see: they drop such arguments."""
    return any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))


def value_of(node: object) -> Any:
    """The fake tensor of a node; None for anything else."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _adds_a_row(match: Match, bias: Any, a: Any, b: Any, out: Any) -> bool:
    """Whether the addend is one row of n, and the sum has the shape of the product.

    A product that is reshaped before the sum may be broadcast with it, and the row may lie along
    another of its dimensions than n.
    """
    n = b.shape[1]
    if not are_equal(bias.shape, (1, n) if bias.dim() == 2 else (n,)):
        return False
    if aten.addmm.default in match.targets.values():
        return True  # any reshape follows the sum
    reshaped = [node for node in match.nodes if node.target is aten.reshape.default]
    summand = value_of(reshaped[0]).shape if reshaped else (a.shape[0], n)
    return are_equal(out.shape, summand) and are_equal(summand[-1:], (n,))


def are_equal(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether shapes are equal for all values of their dynamic sizes."""
    return len(shape) == len(other) and all(
        statically_known_true(one == two) for one, two in zip(shape, other)
    )


def _has_kernels(match: Match, activation: Activation) -> bool:
    """Whether a bundle has a kernel, assuming row-major results: Inductor fixes strides later."""
    from ..gemm.aten import read_inputs
    from ..settings import max_choices
    from .offers import find_offers
    from .reading import operand_of_tensor

    bias, a, b = (
        operand_of_tensor(match.kwargs[name].meta["val"], hint) for name in ("bias", "a", "b")
    )
    m, n = a.shape[0], b.shape[1]
    out = Operand(dtype=a.dtype, device=a.device, shape=(m, n), strides=(n, 1), address=0)
    gemm = read_inputs("addmm", [bias, a, b], {}, out, activation)
    return bool(find_offers(gemm, max_choices(), needs_kernel=True).kernels)


def hint(extent: int | torch.SymInt) -> int:
    """A size of the graph, or an example of one that is dynamic.

    Of a size that is known only when the graph runs it is Inductor's own example, which counts for
    plain GEMMs too.
    """
    known = extent if isinstance(extent, int) else extent.node.hint
    return int(config.unbacked_symint_fallback if known is None else known)


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


def with_metadata(lowering: Callable[..., Any], fake_result: Callable[..., torch.Tensor]) -> Any:
    """Tell Inductor what a lowering function gives for fake tensors.

    From torch 2.14 on, it asks when another pass changed what the function's node depends on, as a
    new node in front of it does, and fails without an answer. Older releases ask nothing.
    """
    lowering._inductor_lowering_output_metadata_fn = fake_result  # type: ignore[attr-defined]
    return lowering
