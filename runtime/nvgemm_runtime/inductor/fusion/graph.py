"""Reads the nodes of Inductor's graphs, and decides if a fusion may end at one of them.

The torch names used here are private and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...gemm.epilogues import Activation
from ...installed.digest import has_bundles
from ...settings import Mode, serves_default_mode
from ..configuration.modes import current_mode, may_fuse_gates

aten = torch.ops.aten

PASS = 2
"""Index of the Inductor graph pass that separates sums from products. It visits later nodes first,
so an activation is matched before its sum."""


FIXES_SIZES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""True if Inductor specialises dynamic sizes when it times a subgraph."""


def is_autotuning() -> bool:
    """Returns True if Inductor times choices for GEMMs."""
    return bool(config.max_autotune or config.max_autotune_gemm)


def is_allowed(activation: Activation) -> bool:
    """Returns True if the settings allow fusing an activation, timed against separate code."""
    backends = {name.strip() for name in config.max_autotune_gemm_backends.upper().split(",")}
    return (
        is_autotuning()
        and backends >= _backends_needed(activation)
        and current_mode() is not Mode.OFF
        and not any(getattr(config, name, False) for name in _SETTINGS_AGAINST)
    )


def is_allowed_by_measurement() -> bool:
    """Returns True if the settings allow fusing gated products without timing them."""
    return (
        not is_autotuning()
        and may_fuse_gates()
        and serves_default_mode()
        and current_mode() is not Mode.OFF
        and not any(getattr(config, name, False) for name in _SETTINGS_AGAINST_ANY)
        and has_bundles()
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


_SETTINGS_AGAINST_ANY = (
    "emulate_precision_casts",  # asks for eager's roundings
    "cpp_wrapper",  # generated C++ has no ATen call for both
    "fx_wrapper",  # no Python text is generated
)

_SETTINGS_AGAINST = (
    *_SETTINGS_AGAINST_ANY,
    "deterministic",  # nothing is timed
    "distributed_max_autotune_gemm",  # ignores extern choices other than ATen's
    "pipeline_max_autotune_gemm",  # times each choice in a separate process
)


def has_timed_sizes(value: torch.Tensor) -> bool:
    """Returns True if Inductor can time a separate graph with a tensor of these sizes.

    It cannot if a size is unbacked: known only when the graph runs.
    """
    if FIXES_SIZES and any(isinstance(extent, torch.SymInt) for extent in value.shape):
        return False
    return has_hints(value)


def has_hints(value: torch.Tensor) -> bool:
    """Returns True if no size is unbacked: known only when the graph runs."""
    dynamic = (extent for extent in value.shape if isinstance(extent, torch.SymInt))
    return all(extent.node.has_hint() for extent in dynamic)


def is_weighted(node: torch.fx.Node) -> bool:
    """Returns True if a sum scales its summands. Patterns ignore ``alpha`` and ``beta``."""
    return any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))


def value_of(node: object) -> Any:
    """Returns a node's fake tensor, or None for anything else."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def are_equal(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns True if two shapes are equal for all values of their dynamic sizes."""
    return len(shape) == len(other) and all(
        statically_known_true(extent == other_extent) for extent, other_extent in zip(shape, other)
    )


def hint(extent: int | torch.SymInt) -> int:
    """Returns a size, or an example value if it is dynamic.

    For an unbacked size this is Inductor's own example, which it also uses for plain GEMMs.
    """
    value = extent if isinstance(extent, int) else extent.node.hint
    return int(config.unbacked_symint_fallback if value is None else value)


def with_metadata(lowering: Callable[..., Any], fake_result: Callable[..., torch.Tensor]) -> Any:
    """Attaches a function that gives Inductor the lowering's result for fake tensors.

    From torch 2.14 on, Inductor asks for it when another pass changes an input of the function's
    node, for example by inserting a node, and fails without an answer. Older releases do not ask.
    """
    lowering._inductor_lowering_output_metadata_fn = fake_result  # type: ignore[attr-defined]
    return lowering
