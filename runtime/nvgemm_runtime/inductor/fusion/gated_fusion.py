"""Fuses a gated MLP's products with its gate into one kernel where that is measured to be faster.

Inductor's graphs contain a product, the two parts of its columns, and a gate's operations; or two
products, with two parts of one weight. A pattern finds the operations, and a walk from there finds
the product. If a bundle has a kernel for all of it, they become one node. Lowering that node races
the kernel against Inductor's own code (`gated_choices`). Without max-autotune, and if the user
allows it, their measured times decide instead (`measured_gates`).

A kernel rounds once, after the gate. Inductor stores products in 16 bits, unless a Triton template
applies the rest in fp32. So under max-autotune the rule in `epilogue_fusion` holds: nothing is
fused unless Triton is among the backends, nor if the user asks for eager's roundings.

Not fused:

- products with other uses;
- a gate that follows its up;
- a result that anything but GEMMs uses (`ends_kernel`);
- two weights that are not parts of one tensor in the graph, because kernels take one matrix B.

The torch names used here are private and were run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    Match,
    PatternExpr,
    get_mutation_region_id,
    register_graph_pattern,
)
from torch.fx import Node

from ...gemm.epilogues import Epilogue, Gate, GateRow, WeightOrder, find_gated
from ...gemm.operands import Operand
from ..report import raise_or_log
from .decompositions import DECOMPOSED, rounded
from .graph import (
    PASS,
    are_equal,
    ends_kernel,
    has_hints,
    has_timed_sizes,
    hint,
    is_allowed,
    is_allowed_by_measurement,
    is_autotuning,
    is_weighted,
    value_of,
    with_metadata,
)

if TYPE_CHECKING:
    from ...gemm.aten import AtenGemm

aten, prims = torch.ops.aten, torch.ops.prims


def install() -> None:
    """Registers the gate patterns."""
    from torch._inductor.fx_passes.post_grad import pass_patterns

    for gate, pattern in _patterns():
        register_graph_pattern(pattern, _may_fuse(gate), pass_dict=pass_patterns[PASS])(
            _rewrite(gate)
        )


def _patterns() -> Iterator[tuple[Gate, PatternExpr]]:
    for dtype in (torch.bfloat16, torch.float16):
        for gate in Gate:
            if gate.row.activation not in DECOMPOSED:
                continue  # torch keeps it as one operator, for which there is no pattern yet
            first, second = _factors(gate.row, dtype)
            yield gate, CallFunction(aten.mul.Tensor, first, second)
            first, second = _factors(gate.row, dtype)
            yield gate, CallFunction(aten.mul.Tensor, second, first)


def _factors(row: GateRow, dtype: torch.dtype) -> tuple[PatternExpr, PatternExpr]:
    """Matches a gate's two factors: the activated gate and the up."""
    gate, up = KeywordArg("gate"), KeywordArg("up")
    if row.limit is None:
        return rounded(DECOMPOSED[row.activation], gate, dtype), up
    convert = prims.convert_element_type.default

    def wide(x: PatternExpr) -> PatternExpr:
        return CallFunction(convert, x, torch.float32)

    cut = CallFunction(aten.clamp_max.default, wide(gate), row.limit)
    gates = CallFunction(convert, cut, dtype, _users=2)
    sigmoid = CallFunction(aten.sigmoid.default, CallFunction(aten.mul.Tensor, gates, row.alpha))
    below = CallFunction(aten.clamp_min.default, wide(up), -row.limit)
    ups = CallFunction(convert, CallFunction(aten.clamp_max.default, below, row.limit), dtype)
    return CallFunction(aten.mul.Tensor, gates, sigmoid), CallFunction(aten.add.Tensor, ups, 1)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Source of gates and ups in a graph.

    Attributes:
        a: Operand A of the product.
        b: Operand B of the product, or, if the graph has two products, their common weight [n, k].
        bias: Node added to the product, or None.
        order: Order of gates and ups among the columns.
        was_apart: True if the graph has two products.
        nodes: Nodes between the operands and the pattern, last first.
    """

    a: Node
    b: Node
    bias: Node | None
    order: WeightOrder
    was_apart: bool
    nodes: tuple[Node, ...]


def _find_source(gate: object, up: object) -> _Source | None:
    """Returns the source of gates and ups, or None if its nodes have other uses."""
    if not isinstance(gate, Node) or not isinstance(up, Node) or gate is up:
        return None
    if len(gate.users) != 1 or len(up.users) != 1:
        return None
    gates, ups = value_of(gate), value_of(up)
    if gates is None or ups is None or not are_equal(gates.shape, ups.shape):
        return None
    return _source_with_one_product(gate, up) or _source_with_two_products(gate, up)


def _source_with_one_product(gate: Node, up: Node) -> _Source | None:
    parts = _find_parts(gate, up, dim=-1)
    if parts is None:
        return None
    whole, order, between = parts
    path = _find_product(whole, users={*between} or {gate, up})
    if path is None:
        return None
    *_, product = path
    bias, a, b = (None, *product.args) if product.target is aten.mm.default else product.args
    return _Source(
        a=a, b=b, bias=bias, order=order, was_apart=False, nodes=(up, gate, *between, *path)
    )  # fmt: skip


def _source_with_two_products(gate: Node, up: Node) -> _Source | None:
    gate_path, up_path = _find_product(gate), _find_product(up)
    if gate_path is None or up_path is None:
        return None
    products = gate_path[-1], up_path[-1]
    if any(node.target is not aten.mm.default for node in products):
        return None
    (a, b_gate), (other_a, b_up) = (node.args for node in products)
    if not _are_same(a, other_a) or not all(_is_transposed(node) for node in (b_gate, b_up)):
        return None
    parts = _find_parts(b_gate.args[0], b_up.args[0], dim=0)
    if parts is None or parts[1] is not WeightOrder.HALVES:
        return None
    return _Source(
        a=a, b=parts[0], bias=None, order=WeightOrder.HALVES, was_apart=True,
        nodes=(*gate_path, *up_path),
    )  # fmt: skip


def _find_parts(
    gate: object, up: object, *, dim: int
) -> tuple[Node, WeightOrder, tuple[Node, ...]] | None:
    """Returns the whole of two parts along a dimension, their order, and any node in between."""
    if not isinstance(gate, Node) or not isinstance(up, Node):
        return None
    if gate.target is operator.getitem and up.target is operator.getitem:
        split, index = gate.args
        if split is not up.args[0] or (index, up.args[1]) != (0, 1):
            return None
        halves = _is_split_in_half(split, dim)
        return (split.args[0], WeightOrder.HALVES, (split,)) if halves else None
    if gate.target is not aten.slice.Tensor or up.target is not aten.slice.Tensor:
        return None
    whole = gate.args[0]
    value = value_of(whole)
    if whole is not up.args[0] or value is None:
        return None
    extent = value.shape[dim]
    if not isinstance(extent, int) or extent % 2:
        return None
    spans = tuple(_span(part, value.dim(), dim, extent) for part in (gate, up))
    half = extent // 2
    orders = {
        ((0, half, 1), (half, extent, 1)): WeightOrder.HALVES,
        ((0, extent, 2), (1, extent, 2)): WeightOrder.INTERLEAVED,
    }
    order = orders.get(spans)  # type: ignore[arg-type]
    return None if order is None else (whole, order, ())


def _is_split_in_half(split: object, dim: int) -> bool:
    """Returns True if a node splits a tensor into equal halves along a dimension, for two users."""
    if not isinstance(split, Node) or len(split.users) != 2:
        return False
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return False
    whole, size, along = (*split.args, split.kwargs.get("dim", 0))[:3]
    value = value_of(whole)
    if value is None or along not in (dim, dim % value.dim()):
        return False
    half = size[0] if isinstance(size, (list, tuple)) and len(set(size)) == 1 else size
    return isinstance(half, int) and are_equal(value.shape[dim:][:1], (2 * half,))


def _span(part: Node, rank: int, dim: int, extent: int) -> tuple[Any, ...] | None:
    """Returns a slice's start, end and step along a dimension, or None if it slices another."""
    arguments: list[Any] = list(part.args)
    _, along, start, end, step = arguments + [None, 0, 0, None, 1][len(arguments) :]
    if part.kwargs or along not in (dim, dim % rank):
        return None
    start, end = start or 0, extent if end is None else end
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    return start, min(end, extent), step


def _find_product(node: object, users: set[Node] | None = None) -> tuple[Node, ...] | None:
    """Returns the path from a node to its product, through at most one reshape.

    Returns None if the reshape changes the columns or an intermediate has other users. ``users``
    are the node's only allowed users; None allows any.
    """
    path = []
    if isinstance(node, Node) and node.target is aten.reshape.default:
        value, before = value_of(node), value_of(node.args[0])
        if value is None or before is None or value.shape[-1] != before.shape[-1]:
            return None
        path.append(node)
        node = node.args[0]
    if not isinstance(node, Node) or node.target not in (aten.mm.default, aten.addmm.default):
        return None
    path.append(node)
    first, *rest = path
    if users is not None and {*first.users} != users:
        return None
    return tuple(path) if all(len(step.users) == 1 for step in rest) else None


def _are_same(node: object, other: object) -> bool:
    """Returns True if two nodes are identical, or equal reshapes."""
    if node is other:
        return True
    nodes = isinstance(node, Node) and isinstance(other, Node)
    return (
        nodes
        and node.target is aten.reshape.default is other.target  # type: ignore[attr-defined]
        and node.args == other.args  # type: ignore[attr-defined]
    )


def _is_transposed(node: object) -> bool:
    return (
        isinstance(node, Node)
        and node.target is aten.permute.default
        and list(node.args[1]) == [1, 0]
    )


def _may_fuse(gate: Gate) -> Callable[[Match], bool]:
    def may_fuse(match: Match) -> bool:
        try:
            if not (is_allowed(gate.row.activation) or is_allowed_by_measurement()):
                return False
            if not ends_kernel(match.output_node()):
                return False
            source = _find_source(match.kwargs["gate"], match.kwargs["up"])
            return (
                source is not None
                and _are_one_region(match, source)
                and _is_plain(match, source, gate)
                and (_has_kernels if is_autotuning() else _is_measured_as_faster)(source, gate)
            )
        except Exception as error:
            raise_or_log(error)
            return False

    return may_fuse


def _are_one_region(match: Match, source: _Source) -> bool:
    """Returns True if nothing between the product and the pattern's end writes to a tensor."""
    nodes = (*match.nodes, *source.nodes)
    return len({get_mutation_region_id(match.graph, node) for node in nodes}) == 1


def _is_plain(match: Match, source: _Source, gate: Gate) -> bool:
    """Returns True if the bias fits the gate, all dtypes agree, and the sizes can be timed."""
    if any(is_weighted(node) for node in (*match.nodes, *source.nodes)):
        return False
    if (source.bias is not None) is not gate.row.is_biased:
        return False
    values = [value_of(node) for node in (source.a, source.b, match.output_node())]
    if source.bias is not None:
        bias, b = value_of(source.bias), values[1]
        values.append(bias)
        if bias is None or b is None or not are_equal(bias.shape, b.shape[1:]):
            return False
    if any(value is None for value in values) or len({value.dtype for value in values}) != 1:
        return False
    if not all(map(has_timed_sizes if is_autotuning() else has_hints, values)):
        return False
    n = values[1].shape[0 if source.was_apart else 1]
    return isinstance(n, int) and n % 2 == 0


def _has_kernels(source: _Source, gate: Gate) -> bool:
    """Returns True if a bundle has a kernel.

    Assumes row-major results, because Inductor fixes strides later.
    """
    from ...settings import max_choices
    from ..offers import find_offers

    gemm = _read(source, find_gated(gate, source.order))
    return bool(find_offers(gemm, max_choices(), needs_kernel=True).kernels)


def _is_measured_as_faster(source: _Source, gate: Gate) -> bool:
    """Returns True if a measured kernel is faster than the separate operations at some m."""
    from ..reading import rows_of_tensor
    from .measured_gates import is_faster

    rows = rows_of_tensor(source.a.meta["val"])
    if rows is None or source.was_apart:
        return False
    gemm = _read(source, find_gated(gate, source.order))
    return is_faster(gemm, [_read(source)], rows)


def _read(source: _Source, epilogue: Epilogue | None = None) -> AtenGemm:
    """Reads the GEMM that a gated kernel computes, or without an epilogue the product alone."""
    from ...gemm.aten import read_inputs
    from ..reading import operand_of_tensor

    b = source.b.meta["val"]
    biases = [] if source.bias is None else [source.bias.meta["val"]]
    tensors = [*biases, source.a.meta["val"], b.t() if source.was_apart else b]
    operands = [operand_of_tensor(tensor, hint) for tensor in tensors]
    *_, x, y = operands
    m, n = x.shape[0], y.shape[1] // (1 if epilogue is None else 2)
    out = Operand(dtype=x.dtype, device=x.device, shape=(m, n), strides=(n, 1), address=0)
    return read_inputs("addmm" if biases else "mm", operands, {}, out, gated=epilogue)


def _rewrite(gate: Gate) -> Callable[..., None]:
    def rewrite(match: Match, **parts: Node) -> None:
        source = _find_source(parts["gate"], parts["up"])
        assert source is not None  # `may_fuse` has found it
        output, graph = match.output_node(), match.graph
        value = output.meta["val"]
        b = source.b
        if source.was_apart:
            b = graph.call_function(aten.permute.default, (source.b, [1, 0]))
            b.meta["val"] = source.b.meta["val"].t()
        operands = (source.a, b, *(() if source.bias is None else (source.bias,)))
        lowering = _lowering(find_gated(gate, source.order), was_apart=source.was_apart)
        result = graph.call_function(lowering, operands)
        result.meta.update(output.meta)
        if value.dim() != 2:
            half = value.shape[-1]
            shape = [*_leading_extents(source), half]
            result.meta["val"] = value.reshape(-1, half)
            result = graph.call_function(aten.reshape.default, (result, shape))
            result.meta.update(output.meta)
        output.replace_all_uses_with(result)
        match.erase_nodes()
        for node in source.nodes:
            if not node.users and not node._erased:
                graph.erase_node(node)

    return rewrite


def _leading_extents(source: _Source) -> list[Any]:
    """Returns the extents before the columns to which the product was reshaped."""
    (reshape, *_) = (node for node in source.nodes if node.target is aten.reshape.default)
    return list(reshape.args[1])[:-1]


def _lowering(epilogue: Epilogue, *, was_apart: bool) -> Any:
    def nvgemm_aot_gated(a: Any, b: Any, bias: Any = None) -> Any:
        from .gated_choices import lower

        return lower(epilogue, a, b, bias, was_apart=was_apart)

    # Marks a function that takes and returns Inductor's own nodes.
    nvgemm_aot_gated._inductor_lowering_function = True  # type: ignore[attr-defined]
    return with_metadata(nvgemm_aot_gated, _fake_result)


def _fake_result(a: torch.Tensor, b: torch.Tensor, bias: object = None) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1] // 2))
