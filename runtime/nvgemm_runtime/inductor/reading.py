"""The GEMM that Inductor asks choices for, read off them and its graph.

The names of torch that are used here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor import select_algorithm as autotuning
from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
from torch._inductor.virtualized import V

from ..gemm.aten import (
    BIAS_ADDMM,
    GEMMS,
    OPERATORS,
    AtenGemm,
    aten_name,
    named_arguments,
    read_call,
    read_inputs,
)
from ..gemm.operands import Operand
from ..gemm.types import SWIZZLED_ALIGNMENT_BYTES
from ..matching.trust import TRITON

_BASE_ALIGNMENT_BYTES = SWIZZLED_ALIGNMENT_BYTES
"""Alignment that buffers are taken to have: torch's allocators give 64 bytes and more.

Inductor knows of 16. An input that has no more than those, say because it is a view, goes to ATen
where a kernel needs more, for the launcher looks again."""


_TRITONS = (ir.TritonTemplateCallerBase, SubgraphChoiceCaller)


def find_operator(choices: list[Any]) -> tuple[str, Any] | None:
    """ATen's name of the operator, and a choice that takes its operands; None if it is no GEMM."""
    if not choices:
        return None
    packet = getattr(V.graph.current_node.target, "overloadpacket", None)
    named = [(aten_operator(choice), choice) for choice in choices]
    for operator, choice in (*named, (getattr(packet, "__name__", None), choices[0])):
        if operator in GEMMS:
            return operator, choice
    return None


def aten_operator(choice: Any) -> str | None:
    """ATen's name of the operator that a choice is; None for a choice that is none of ATen's."""
    ours: str | None = getattr(choice, "nvgemm_aot_operator", None)
    if ours is not None:
        return ours  # ATen's all the same, of a lowering of ours
    if type(choice) is not autotuning.ExternKernelCaller:
        return None
    return aten_name(str(choice.choice.name))


def find_aten_gemm(choices: list[Any]) -> tuple[str, Any] | None:
    """ATen's choice for a GEMM that kernels may compute, behind its operator; None without one."""
    for choice in choices:
        operator = aten_operator(choice)
        if operator in OPERATORS and choice.name != BIAS_ADDMM:
            return operator, choice
    return None


def backends_beside_aten(choices: list[Any]) -> frozenset[str]:
    """Backends with choices for a GEMM besides ATen: `TRITON`, or else the class of the choices.

    `TRITON` is the one that `tune` asks. Where Inductor is to search more, that is another.

    A graph of Inductor's own, such as a decomposed k, stands beside Triton's choices alone, and is
    among those of which the fastest was measured.
    """
    space = config.max_autotune_gemm_search_space
    triton = TRITON if space == "DEFAULT" else f"{TRITON}, {space}"
    return frozenset(
        triton if isinstance(choice, _TRITONS) else type(choice).__name__
        for choice in choices
        if aten_operator(choice) is None
    )


def find_usual_aten(choices: list[Any], aten: Any) -> Any:
    """Of ATen's choices for a GEMM, the one that computes it as ATen does outside of graphs."""
    usual = (one for one in choices if aten_operator(one) and one.name == BIAS_ADDMM)
    return next(usual, aten)


def read_choice(operator: str, choice: Any) -> AtenGemm:
    """The GEMM that a choice is for; the choice may be another than ATen's, for the same nodes."""
    tensors = [operand(node) for node in choice.input_nodes]
    options = getattr(choice, "kwargs", {})
    return read_inputs(operator, tensors, options, operand_of(choice.layout, 0))


def operand(node: Any) -> Operand:
    """An operand as Inductor knows it; sizes that are symbols count as their hints."""
    layout = node.get_layout()
    # Inductor asks for the alignment of inputs on GPUs only, and calls all others unaligned.
    known = layout.device.type == "cpu" or node.get_name() not in V.graph.unaligned_buffers
    return operand_of(layout, _BASE_ALIGNMENT_BYTES if known else layout.dtype.itemsize)


def operand_of(layout: Any, base_address: int) -> Operand:
    """A tensor of Inductor's layout, in a buffer that begins at an address."""
    hint = V.graph.sizevars.optimization_hint
    return Operand(
        dtype=layout.dtype,
        device=layout.device,
        shape=tuple(int(hint(extent)) for extent in layout.size),
        strides=tuple(int(hint(stride)) for stride in layout.stride),
        address=base_address + int(hint(layout.offset)) * layout.dtype.itemsize,
    )


def gemms_of_graph() -> Iterator[AtenGemm]:
    """The GEMMs of the graph that Inductor is lowering, as far as can be told beforehand.

    Inductor may yet choose other strides for what it computes.
    """
    for node in V.graph.graph.nodes:
        overload = node.target
        if not isinstance(overload, torch._ops.OpOverload) or overload.namespace != "aten":
            continue
        operator = overload.overloadpacket.__name__
        if operator not in OPERATORS:
            continue
        try:
            arguments = named_arguments(overload, node.args, node.kwargs, _value_of)
            yield read_call(operator, arguments, _value_of(node))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # no size that is known yet; the GEMM comes up again by itself


def _value_of(argument: Any) -> Any:
    """An argument of a graph's node: tensors as operands, all else as it is."""
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument
    return operand_of_tensor(value) if isinstance(value, torch.Tensor) else value


def _hint(extent: Any) -> int:
    if isinstance(extent, torch.SymInt):
        extent = V.graph.sizevars.optimization_hint(extent.node.expr)
    return int(extent)


def operand_of_tensor(tensor: torch.Tensor, hint: Callable[[Any], int] = _hint) -> Operand:
    """A tensor of a graph, as far as it is known beforehand.

    Args:
        tensor: Fake, and perhaps of sizes that are symbols.
        hint: The number that a size counts as.
    """
    return Operand(
        dtype=tensor.dtype,
        device=tensor.device,
        shape=tuple(map(hint, tensor.shape)),
        strides=tuple(map(hint, tensor.stride())),
        address=_BASE_ALIGNMENT_BYTES + hint(tensor.storage_offset()) * tensor.dtype.itemsize,
    )
