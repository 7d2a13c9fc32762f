"""Offers kernels for ``_scaled_mm_v2`` with swizzled scales, which stock Inductor leaves to ATen.

Inductor asks for choices only if its own templates support the scales. For swizzled block scales
this module registers a lowering, whose choices are ATen's operator and bundled kernels. If no
kernel joins, Inductor lowers the call as stock torch does.

The torch names used here are private and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._inductor import lowering
from torch._inductor import select_algorithm as autotuning
from torch._inductor.virtualized import V

from ..entry_point import join
from ..report import raise_or_log

_log = logging.getLogger(__name__)

_OPERATOR = torch.ops.aten._scaled_mm_v2.default

_NAME = "nvgemm_aot_scaled_mm_v2"

_OPTIONS = ("recipe_a", "swizzle_a", "recipe_b", "swizzle_b")


def install() -> None:
    """Registers the lowering before Inductor's own."""
    if hasattr(lowering, "user_lowerings"):  # from torch 2.12 on
        lowering.user_lowerings.setdefault(_OPERATOR, _lower_or_decline)
        return
    if _OPERATOR in lowering.lowerings:
        return  # another package's
    # Inductor would register the same at the first call: ATen, with unchanged strides.
    constraint = lowering.constrain_to_fx_strides
    lowering.make_fallback(_OPERATOR, layout_constraint=constraint, warn=False)
    lowering.lowerings[_OPERATOR] = _with_stock(lowering.lowerings[_OPERATOR])


def _with_stock(stock: Callable[..., Any]) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        lowered = _lower_or_decline(*args, **kwargs)
        return stock(*args, **kwargs) if lowered is None else lowered

    return lower


def _lower_or_decline(*args: Any, **kwargs: Any) -> Any:
    """Returns the result's node, or None if no kernel joins."""
    names = (argument.name for argument in _OPERATOR._schema.arguments)
    arguments = {**dict(zip(names, args)), **kwargs}
    try:
        if _inductor_has_choices(arguments):
            return None
        return _lower(arguments)
    except Exception as error:
        raise_or_log(error)
        return None


def _inductor_has_choices(arguments: dict[str, Any]) -> bool:
    """Returns True if Inductor itself asks for choices, as it does for ``_scaled_mm``."""
    if not hasattr(lowering, "user_lowerings") or _OPERATOR not in lowering.lowerings:
        return False
    return not any((*arguments["swizzle_a"], *arguments["swizzle_b"]))


def _aten(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe_a: int,
    swizzle_a: int,
    recipe_b: int,
    swizzle_b: int,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """Runs ATen's operator for Inductor's timing."""
    result: torch.Tensor = torch.ops.aten._scaled_mm_v2.out(
        a, b, [scale_a], [recipe_a], [swizzle_a], [scale_b], [recipe_b], [swizzle_b], bias,
        out_dtype, [], use_fast_accum, out=out,
    )  # fmt: skip
    return result


_CHOICE = autotuning.ExternKernelChoice(_aten, name=_NAME)


class _AtenChoice(autotuning.ExternKernelCaller):  # type: ignore[misc]
    """ATen's operator as a choice. If it wins, Inductor generates the stock call."""

    nvgemm_aot_operator = "_scaled_mm_v2"

    def __init__(
        self, nodes: list[Any], layout: Any, options: dict[str, Any], stock: Callable[[], Any]
    ) -> None:
        super().__init__(_CHOICE, nodes, layout, options)
        self._stock = stock

    def benchmark(self, *args: Any, out: Any) -> float:
        """Returns a call's milliseconds, or infinity if ATen does not compute it."""
        try:
            return float(super().benchmark(*args, out=out))
        except (RuntimeError, ValueError) as error:  # includes NotImplementedError
            _log.debug("ATen does not compute it: %s", error)
            return math.inf

    def output_node(self) -> Any:
        """Returns ATen's node, built as Inductor builds it."""
        return self._stock()


def _lower(arguments: Mapping[str, Any]) -> Any:
    """Chooses how to compute a call.

    Returns:
        The result's node, or None if no kernel joins.
    """
    from torch._inductor.kernel.mm_common import mm_args

    _, _, _, layout, a, b = mm_args(
        arguments["self"], arguments["mat2"], out_dtype=arguments.get("out_dtype")
    )
    extras = [arguments["scale_a"][0], arguments["scale_b"][0], arguments.get("bias")]
    nodes = [a, b, *(autotuning.realize_inputs(tensor) for tensor in extras if tensor is not None)]
    options = {
        **{name: int(arguments[name][0]) for name in _OPTIONS if arguments[name]},
        "out_dtype": arguments.get("out_dtype"),
        "use_fast_accum": bool(arguments.get("use_fast_accum", False)),
    }
    levels = max(len(arguments[f"scale_{side}"]) for side in "ab")
    if levels > 1:
        options["levels"] = levels

    def stock() -> Any:
        overload = torch.ops.aten._scaled_mm_v2.default
        values = {"contraction_dim": [], **arguments}
        ordered = [
            values[argument.name]
            for argument in overload._schema.arguments
            if argument.name in values
        ]
        return lowering.fallback_handler(overload, add_to_fallback_set=False)(*ordered)

    aten = _AtenChoice(nodes, layout, options, stock)
    choices = join([aten])
    if choices == [aten]:
        return None
    inputs = {
        index: _example
        for index, node in enumerate(nodes)
        if node.get_dtype() in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
    }
    chosen = autotuning.autotune_select_algorithm(
        _NAME,
        choices,
        nodes,
        layout,
        input_gen_fns=inputs,
        return_multi_template=False,
    )
    return chosen[0] if isinstance(chosen, tuple) else chosen  # torch 2.11 returns only the node


def _example(node: Any) -> torch.Tensor:
    """Creates a tensor of ones for a node whose dtype torch cannot fill randomly."""
    hint = V.graph.sizevars.optimization_hint
    shape = [int(hint(extent)) for extent in node.get_size()]
    strides = [int(hint(stride)) for stride in node.get_stride()]
    unit = 127 if node.get_dtype() is torch.float8_e8m0fnu else 0x22  # 0x22 is two fp4 ones
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides))
    flat = torch.full((reach,), unit, dtype=torch.uint8, device=node.get_device())
    return flat.view(node.get_dtype()).as_strided(shape, strides)
