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

from ...gemm.epilogues import Activation
from ...gemm.operands import Operand
from ...settings import Mode
from ..autoload import EXPERTS, after_import, install_module
from ..configuration.modes import current_mode
from ..report import raise_or_log

aten, prims = torch.ops.aten, torch.ops.prims

PASS = 2
"""Index of the Inductor graph pass that separates sums from products. It visits later nodes first,
so an activation is matched before its sum."""


def install() -> None:
    """Registers the patterns for sums with activations, for gates, and for recording experts."""
    from torch._inductor.fx_passes.post_grad import pass_patterns

    from . import gated_fusion

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

FIXES_SIZES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""True if Inductor specialises dynamic sizes when it times a subgraph."""


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


def is_allowed(activation: Activation) -> bool:
    """Returns True if the settings allow fusing an activation."""
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
    """Returns True if only GEMMs and the graph's caller use a node's result.

    Inductor would compute any other use in the same kernel as the activation. The race ends at the
    activation's result, so it would count that kernel as saved, although the graph still needs it
    for the other use.
    """
    return all(
        user.op == "output"
        or user.target in _GEMMS
        or getattr(user.target, "_inductor_lowering_function", False)  # a GEMM pattern's node
        or (user.target in _VIEWS and ends_kernel(user))
        for user in node.users
    )


def _backends_needed(activation: Activation) -> set[str]:
    """Returns the backends that ``max_autotune_gemm_backends`` must have.

    ATen is the fallback. Where rounding once changes results, Triton is the precedent in stock
    torch.
    """
    return {"ATEN"} if activation.row.commutes_with_rounding else {"ATEN", "TRITON"}


_SETTINGS_AGAINST = (
    "emulate_precision_casts",  # asks for eager's roundings
    "deterministic",  # nothing is timed
    "distributed_max_autotune_gemm",  # ignores extern choices other than ATen's
    "pipeline_max_autotune_gemm",  # times each choice in a separate process
    "cpp_wrapper",  # generated C++ has no ATen call for both
)


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


def has_timed_sizes(value: torch.Tensor) -> bool:
    """Returns True if Inductor can time a separate graph with a tensor of these sizes.

    It cannot if a size is unbacked: known only when the graph runs.
    """
    dynamic = [extent for extent in value.shape if isinstance(extent, torch.SymInt)]
    return not dynamic if FIXES_SIZES else all(extent.node.has_hint() for extent in dynamic)


def is_weighted(node: torch.fx.Node) -> bool:
    """Returns True if a sum scales its summands. Patterns ignore ``alpha`` and ``beta``."""
    return any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))


def value_of(node: object) -> Any:
    """Returns a node's fake tensor, or None for anything else."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


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


def are_equal(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns True if two shapes are equal for all values of their dynamic sizes."""
    return len(shape) == len(other) and all(
        statically_known_true(extent == other_extent) for extent, other_extent in zip(shape, other)
    )


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


def hint(extent: int | torch.SymInt) -> int:
    """Returns a size, or an example value if it is dynamic.

    For an unbacked size this is Inductor's own example, which it also uses for plain GEMMs.
    """
    value = extent if isinstance(extent, int) else extent.node.hint
    return int(config.unbacked_symint_fallback if value is None else value)


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
    """Attaches a function that gives Inductor the lowering's result for fake tensors.

    From torch 2.14 on, Inductor asks for it when another pass changes an input of the function's
    node, for example by inserting a node, and fails without an answer. Older releases do not ask.
    """
    lowering._inductor_lowering_output_metadata_fn = fake_result  # type: ignore[attr-defined]
    return lowering
