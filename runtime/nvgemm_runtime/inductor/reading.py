"""Reads a GEMM from Inductor's choices and graph.

The torch names used here are private and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    UNSERVED,
    AtenGemm,
    aten_name,
    kernel_order,
    named_arguments,
    read_call,
    read_inputs,
)
from ..gemm.operands import Operand
from ..gemm.types import SWIZZLED_ALIGNMENT_BYTES
from ..matching.trust import TRITON

_BASE_ALIGNMENT_BYTES = SWIZZLED_ALIGNMENT_BYTES
"""Assumed buffer alignment. Torch's allocators give at least 64 bytes.

Inductor itself assumes 16. If an input is less aligned than a kernel needs, for example a view, the
launcher refuses it and the generated call runs ATen.
"""

_TRITONS = (ir.TritonTemplateCallerBase, SubgraphChoiceCaller)


UNFUSED = "nvgemm_aot_unfused"
"""Prefix for graphs that compete with a kernel that applies an activation."""

_ALTERNATIVE = re.compile(rf"(benchmark_)?(decompose_k|contiguous_(add)?mm|{UNFUSED})_.*")
"""Names of such graphs and of Inductor's subgraph templates."""


def is_alternative() -> bool:
    """Returns True if Inductor is lowering an alternative for a GEMM it has already met.

    Inductor lowers each alternative as a separate graph.
    """
    name = getattr(V.graph, "name", None)
    return isinstance(name, str) and _ALTERNATIVE.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class AutotunedGemm:
    """GEMM for which Inductor requests choices.

    Attributes:
        op: ATen's operator name.
        choice: ATen's choice that kernels can replace; otherwise any choice with these operands.
        is_served: True if kernels can replace `choice`: it is ATen's, and kernels compute its
            operator.
    """

    op: str
    choice: Any
    is_served: bool

    @functools.cached_property
    def call(self) -> AtenGemm:
        """ATen's call. Symbolic sizes count as their hints."""
        nodes, out = self.choice.input_nodes, operand_of(self.choice.layout, 0)
        if self.op in OPERATORS:
            options = getattr(self.choice, "kwargs", {})
            return read_inputs(self.op, [operand(node) for node in nodes], options, out)
        first = int(UNSERVED[self.op].adds_first)
        a, b = map(operand, nodes[first : first + 2])
        return AtenGemm(op=self.op, a=a, b=b, out=out)

    def __str__(self) -> str:
        layout = self.choice.layout
        return f"{self.op} into {layout.dtype}[{', '.join(map(str, layout.size))}]"


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """Range of m that a graph can take: ``least..most``, without end if ``most`` is None."""

    least: int
    most: int | None

    @property
    def is_one(self) -> bool:
        """True if it is a single m."""
        return self.least == self.most

    def __contains__(self, m: int) -> bool:
        return self.least <= m and (self.most is None or m <= self.most)


def rows_of(gemm: AutotunedGemm) -> RowRange | None:
    """Returns the range of m that the graph can take, or None if another size is dynamic."""
    return rows_of_nodes(gemm.op, gemm.choice.input_nodes)


def rows_of_nodes(op: str, nodes: Sequence[Any]) -> RowRange | None:
    """Returns the same for an ATen operator's tensors, in schema order."""
    a, b = (nodes[index].get_size() for index in kernel_order(op, len(nodes))[:2])
    if not all(map(is_known, (*a[:-2], a[-1], *b))):
        return None
    m = V.graph.sizevars.simplify(a[-2])
    return _range_of(m, V.graph.sizevars.shape_env)


def rows_of_tensor(a: torch.Tensor) -> RowRange | None:
    """Returns the range of m for a graph's fake tensor A, or None if its k is dynamic."""
    m, k = a.shape
    if not isinstance(k, int):
        return None
    if isinstance(m, int):
        return RowRange(least=m, most=m)
    return _range_of(m.node.expr, m.node.shape_env)


def _range_of(m: Any, shape_env: Any) -> RowRange:
    if is_known(m):
        return RowRange(least=int(m), most=int(m))
    bounds = shape_env.bound_sympy(m)
    most = int(bounds.upper) if is_known(bounds.upper) else None
    return RowRange(least=int(bounds.lower) if is_known(bounds.lower) else 0, most=most)


def is_symbolic(gemm: AutotunedGemm) -> bool:
    """Returns True if a size of the result is dynamic."""
    return not all(map(is_known, gemm.choice.layout.size))


def is_known(extent: Any) -> bool:
    """Returns True if a size is a number."""
    return isinstance(extent, int) or bool(getattr(extent, "is_Integer", False))


def find_gemm(choices: list[Any]) -> AutotunedGemm | None:
    """Returns the GEMM that choices are for, or None if they are for something else."""
    operators = [aten_operator(choice) for choice in choices]
    for op, choice in zip(operators, choices):
        if op in OPERATORS and choice.name != BIAS_ADDMM:
            return AutotunedGemm(op=op, choice=choice, is_served=True)
    packet = getattr(getattr(V.graph, "current_node", None), "target", None)
    operators.append(getattr(getattr(packet, "overloadpacket", None), "__name__", None))
    for op, choice in zip(operators, [*choices, *choices[:1]]):
        if op in GEMMS:
            return AutotunedGemm(op=op, choice=choice, is_served=False)
    return None


def aten_operator(choice: Any) -> str | None:
    """Returns the ATen operator of a choice, or None if the choice is not ATen's."""
    operator: str | None = getattr(choice, "nvgemm_aot_operator", None)
    if operator is not None:
        return operator  # set by a lowering in this package
    if type(choice) is not autotuning.ExternKernelCaller:
        return None
    return aten_name(str(choice.choice.name))


def backends_beside_aten(choices: list[Any]) -> frozenset[str]:
    """Returns the other backends that have choices for a GEMM.

    Triton's choices count as `TRITON`, others by their class name. `TRITON` is the search space
    that `tune` measures; a larger search space has another name. Inductor's own graphs, such as a
    decomposed k, appear only next to Triton's choices and are part of that measurement.
    """
    space = config.max_autotune_gemm_search_space
    triton = TRITON if space == "DEFAULT" else f"{TRITON}, {space}"
    return frozenset(
        triton if isinstance(choice, _TRITONS) else type(choice).__name__
        for choice in choices
        if aten_operator(choice) is None
    )


def find_eager_aten(choices: list[Any], aten: Any) -> Any:
    """Returns the ATen choice that computes a GEMM as eager ATen does."""
    bias_choices = (
        choice for choice in choices if aten_operator(choice) and choice.name == BIAS_ADDMM
    )
    return next(bias_choices, aten)


def operand(node: Any) -> Operand:
    """Returns a node as an operand. Symbolic sizes count as their hints."""
    layout = node.get_layout()
    # Inductor checks the alignment of inputs only on GPUs, and lists all others as unaligned.
    is_aligned = layout.device.type == "cpu" or node.get_name() not in V.graph.unaligned_buffers
    return operand_of(layout, _BASE_ALIGNMENT_BYTES if is_aligned else layout.dtype.itemsize)


def operand_of(layout: Any, base_address: int) -> Operand:
    """Returns a tensor with Inductor's layout in a buffer that begins at an address."""
    hint = V.graph.sizevars.optimization_hint
    return Operand(
        dtype=layout.dtype,
        device=layout.device,
        shape=tuple(int(hint(extent)) for extent in layout.size),
        strides=tuple(int(hint(stride)) for stride in layout.stride),
        address=base_address + int(hint(layout.offset)) * layout.dtype.itemsize,
    )


def gemms_of_graph() -> Iterator[AtenGemm]:
    """Yields the GEMMs of the graph that Inductor is lowering, with the graph's strides.

    Inductor may yet choose other strides for intermediate results.
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
            continue  # a size is unknown yet; Inductor asks for this GEMM later


def _value_of(argument: Any) -> Any:
    """Returns the value of a graph node's argument, with tensors as operands."""
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument
    return operand_of_tensor(value) if isinstance(value, torch.Tensor) else value


def _hint(extent: Any) -> int:
    if isinstance(extent, torch.SymInt):
        extent = V.graph.sizevars.optimization_hint(extent.node.expr)
    return int(extent)


def operand_of_tensor(tensor: torch.Tensor, hint: Callable[[Any], int] = _hint) -> Operand:
    """Returns a graph's fake tensor as an operand."""
    return Operand(
        dtype=tensor.dtype,
        device=tensor.device,
        shape=tuple(map(hint, tensor.shape)),
        strides=tuple(map(hint, tensor.stride())),
        address=_BASE_ALIGNMENT_BYTES + hint(tensor.storage_offset()) * tensor.dtype.itemsize,
    )
