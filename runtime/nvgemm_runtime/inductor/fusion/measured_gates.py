"""Fuses gated products without max-autotune, where measured rankings say so. Times nothing.

`tune` measures a gated kernel against ATen's product and Inductor's kernel for the gate, which is
what plain torch.compile runs. Where bundled kernels compute the product alone, their gain shortens
that time. By m, the generated code calls a gated kernel, or Inductor's code for the separate
operations.

The torch names used here are private and were run on torch 2.11 to 2.14.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from ...gemm.aten import AtenGemm, kernel_order
from ...gemm.problem import Problem
from ...launch.dispatch_table import find_dispatch
from ...matching.device import DeviceFacts
from ...matching.dispatch import Dispatch
from ...matching.thresholds import ATEN, DispatchTable
from ...recording.declarable import read_requests
from ...reporting.counters import COUNTERS
from .. import report
from ..autotuning.choices import GemmChoice, StockCall, define_in_python, fix_strides
from ..autotuning.obstacles import obstacles
from ..default_mode.default_choices import (
    describe_aten,
    find_obstacle,
    report_kernels,
    require,
    tune_arguments,
)
from ..default_mode.dispatched_choices import DispatchChoice, DispatchOffer
from ..hook import record_gemm
from ..offers import facts_for
from ..reading import RowRange, rows_of_nodes
from ..report import raise_or_log

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """Measured decision for a gated product in a graph.

    Attributes:
        problem: Gated problem at the graph's m, or at the hint.
        rows: Range of m in the graph.
        dispatch: Decision at every m.
        table: Its part for the graph.
        facts: Device.
    """

    problem: Problem
    rows: RowRange
    dispatch: Dispatch
    table: DispatchTable
    facts: DeviceFacts


def is_faster(fused: AtenGemm, gemms: Sequence[AtenGemm], rows: RowRange) -> bool:
    """Returns True if a gated kernel was measured as faster at some m in a graph; else reports why.

    Args:
        fused: GEMM that a gated kernel computes.
        gemms: GEMMs among the separate operations.
        rows: Range of m in the graph.

    Raises:
        RequiredError: If kernels are required, the gated product is declared, and its kernel cannot
            be used.
    """
    decision = _decide(fused, gemms, rows)
    if decision is None:
        return False
    obstacle = find_obstacle(fused.op) if decision.table.has_kernels else None
    _require(decision, obstacle)
    if obstacle is None and decision.table.has_kernels:
        return True
    problem, dispatch = decision.problem, decision.dispatch
    basis, reason = describe_aten(problem, rows, dispatch, decision.facts)
    reason = obstacle or reason
    _log.debug("%s: computed separately: %s", problem.key, reason)
    arguments = tune_arguments(rows, dispatch)
    report.tried(problem.key, basis=basis, measured=reason, **arguments)
    return False


def lower(
    stock: Callable[[str], StockCall],
    operands: Sequence[Any],
    function: Callable[..., torch.Tensor],
    fused: AtenGemm,
    gemms: Sequence[AtenGemm],
) -> Any:
    """Lowers a gated product to a kernel's call, or by m to that and the separate operations.

    If no kernel takes the operands as Inductor lays them out, only the operations are lowered.

    Args:
        stock: Returns the call that kernels replace, for their problem's key.
        operands: Operands in the graph.
        function: Computes the separate operations.
        fused: GEMM that a gated kernel computes.
        gemms: GEMMs among the separate operations.
    """
    call, offer = stock(""), None
    try:
        rows = rows_of_nodes(call.op, call.inputs)
        decision = None if rows is None else _decide(fused, gemms, rows)
        if decision is not None:
            call = stock(decision.problem.key)
            offer = _offer(call, decision)
    except Exception as error:
        raise_or_log(error)
    if offer is not None:
        for node in call.inputs:
            fix_strides(node)
    if offer is not None and ATEN not in offer.table.kernels:
        for gemm in gemms:  # otherwise `hook` records them
            record_gemm(lambda gemm=gemm: gemm)  # type: ignore[misc]
        if offer.table.bounds:
            return DispatchChoice(call, offer, None).output_node()
        return GemmChoice(call, offer.kernels[offer.table.kernels[0]]).output_node()
    graph, examples = _trace(function, call.inputs)
    # Counted within the graph, so that all processes generate equal code.
    name = f"nvgemm_aot_separate_{len(V.graph.operations)}"
    if offer is None:
        return inline_subgraph_to_ir_nodes(graph, list(operands), name)
    return ir.TensorBox.create(GatedNode(call, offer, graph, examples, name))


def _decide(fused: AtenGemm, gemms: Sequence[AtenGemm], rows: RowRange) -> _Decision | None:
    """Decides by measurements; returns None if they cannot, as for two separate products."""
    requests = read_requests(fused)
    if isinstance(requests, str) or len(gemms) != 1:
        return None
    facts = facts_for(fused)
    with COUNTERS.spending("matching"):
        request, dispatch = find_dispatch(requests, facts, product=_dispatch_of(gemms[0]))
    table = dispatch.table.within(rows.least, rows.most)
    problem = request.problem
    return _Decision(problem=problem, rows=rows, dispatch=dispatch, table=table, facts=facts)


def _dispatch_of(product: AtenGemm) -> Dispatch | None:
    """Returns the decision for a product alone, or None if no kernel can compute it."""
    requests = read_requests(product)
    if isinstance(requests, str):
        return None
    return find_dispatch(requests, facts_for(product))[1]


def _offer(call: StockCall, decision: _Decision) -> DispatchOffer | None:
    """Returns the kernels to call by m, or None if none can be called, and reports them."""
    obstacle = next(iter(obstacles(call.op, call.inputs, call.layout)), None)
    _require(decision, obstacle)
    if obstacle is not None or not decision.table.has_kernels:
        _log.debug("%s: computed separately: %s", call.gemm, obstacle or "strides differ")
        return None
    problem, rows, dispatch = decision.problem, decision.rows, decision.dispatch
    offer = DispatchOffer.of(dispatch, decision.table)
    report_kernels(problem, rows, dispatch, offer, {offer.name_for(call): str(offer)})
    return offer


def _require(decision: _Decision, obstacle: str | None) -> None:
    require(decision.problem, decision.rows, decision.dispatch, decision.facts, obstacle)


def _trace(
    function: Callable[..., torch.Tensor], nodes: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Returns a function's graph for nodes, and example tensors with their symbolic sizes."""
    with V.fake_mode:
        examples = [ir.ir_node_to_tensor(node) for node in nodes]
    graph = make_fx(function, decomposition_table=select_decomp_table())(*examples)
    ir.gm_original_output_strides(graph)
    return graph, examples


class GatedNode(ir.SubgraphBuffer):  # type: ignore[misc]
    """Gated product that kernels compute at some m, and the separate operations at others."""

    def __init__(
        self,
        stock: StockCall,
        offer: DispatchOffer,
        graph: torch.fx.GraphModule,
        examples: list[torch.Tensor],
        name: str,
    ) -> None:
        self.stock = stock
        self.offer = offer
        self.name_in_code = offer.name_for(stock)
        super().__init__(stock.layout, list(stock.inputs), graph, examples, name)

    def codegen(self, wrapper: Any) -> None:
        """Writes both calls and the condition on m, and what they need at the module's start."""
        stock, offer = self.stock, self.offer
        report.used_by_m(stock.gemm, self.name_in_code, list(offer.kernels), str(offer))
        define_in_python(wrapper, self.name_in_code, *offer.python_definition(stock))
        wrapper.codegen_subgraph_common(
            SimpleNamespace(graph=self.subgraph, name=self.subgraph.name)
        )
        inputs = [node.codegen_reference() for node in self.inputs]
        first = kernel_order(stock.op, len(inputs))[0]
        rows, columns = map(wrapper.codegen_python_sizevar, stock.layout.size)
        kernel = (
            f"{self.name_in_code}({', '.join(inputs)}, "
            f"out={inputs[first]}.new_empty(({rows}, {columns})))"
        )
        separate = f"{self.subgraph.name}([{', '.join([*self.sym_inputs, *inputs])}])[0]"
        condition = " or ".join(_conditions(rows, offer.table))
        wrapper.writeline(f"{self.name} = {kernel} if {condition} else {separate}")


def _conditions(rows: str, table: DispatchTable) -> Iterator[str]:
    """Yields a Python condition on m for each segment of a table that has a kernel."""
    starts, ends = (None, *table.bounds), (*table.bounds, None)
    for start, end, kernel_id in zip(starts, ends, table.kernels):
        if kernel_id == ATEN:
            continue
        lower = "" if start is None else f"{start} <= "
        yield f"{lower}{rows}" + ("" if end is None else f" < {end}")
