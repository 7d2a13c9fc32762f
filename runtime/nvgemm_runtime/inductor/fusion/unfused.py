"""Races Inductor's unfused code, as one choice, against fused kernels.

The torch names used here are private and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.codegen.subgraph import SubgraphChoiceCaller, inline_subgraph_to_ir_nodes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.select_algorithm import autotune_select_algorithm
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from ...gemm.aten import AtenGemm
from ...installed.digest import installed_digest
from ...settings import Mode, choosing_key, max_choices
from .. import report
from ..autotuning.choice_timing import timing_as_usual
from ..autotuning.choices import StockCall, gemm_choices
from ..autotuning.obstacles import obstacles
from ..configuration.modes import current_mode
from ..default_mode.dynamic_sizes import find_fused_dispatch_choice
from ..hook import join_dispatch, record_gemm, time_fairly
from ..offers import find_offers
from ..reading import UNFUSED
from ..report import raise_or_log

_log = logging.getLogger(__name__)

_numbers = itertools.count()


class UntimedError(Exception):
    """Inductor's unfused code has no time to compare a fused kernel with.

    Inductor treats a RuntimeError as an infinite time, and would choose the kernel. Any other class
    ends its timing, and nothing is cached.
    """


class Unfused(SubgraphChoiceCaller):  # type: ignore[misc]
    """Inductor's unfused code as one choice.

    It is timed as a whole. Its GEMMs are chosen among all of Inductor's and the bundles' choices.
    If it wins, its operations become part of the graph as in stock torch.

    Attributes:
        operands: Operands in the graph, for `output_node`.
        is_in_graph: True if it has won.
        offer: Competing kernels, as arguments for `report.met`.
    """

    def __init__(
        self,
        operands: Sequence[Any],
        nodes: list[Any],
        layout: ir.Layout,
        *,
        description: str,
        function: Callable[..., torch.Tensor],
    ) -> None:
        self.operands = operands
        self.is_in_graph = False
        self.nvgemm_aot_gemm = ""
        self.offer: dict[str, Any] = {}
        super().__init__(
            f"{UNFUSED}_{next(_numbers)}",
            nodes,
            layout,
            description=f"{description}, unfused",
            make_fx_graph=make_fx(function, decomposition_table=select_decomp_table()),
        )

    def benchmark(self, *args: Any, out: Any) -> float:
        """Returns a call's milliseconds.

        Raises:
            UntimedError: If it cannot be compiled or run separately, or its time is not finite.
        """
        try:
            time_ms = float(super().benchmark(*args, out=out))
        except Exception as error:
            raise UntimedError(f"{type(error).__name__}: {error}") from error
        if not math.isfinite(time_ms):
            raise UntimedError(f"its time is {time_ms} ms")
        return time_ms

    def hash_key(self) -> str:
        """Returns the key for its time, which depends on the bundles and backends for its GEMMs."""
        settings = (installed_digest(), config.max_autotune_gemm_backends, choosing_key())
        return "-".join([super().hash_key(), *map(str, settings)])

    def output_node(self) -> Any:
        """Returns the nodes that are scheduled if this choice wins."""
        self.is_in_graph = True
        return inline_subgraph_to_ir_nodes(self.gm, self.operands, self.name)

    def _compile_for_benchmarking(self) -> Any:
        """Compiles as the base class does, but with all choices for the GEMMs."""
        # Torch 2.11 has one kind of example inputs.
        static: Any = getattr(self, "benchmark_inputs", self.example_inputs)
        inputs = self.example_inputs if self.sym_inputs else static
        graph = GraphLowering(
            gm=self.gm,
            example_inputs=inputs,
            shape_env=V.graph._shape_env,
            is_inference=V.graph.is_inference,
            is_backward=V.graph.is_backward,
            name=f"benchmark_{self.name}",
        )
        for symbol in self.sym_inputs:
            graph.graph_inputs[symbol.name] = symbol
            graph.graph_input_names.append(symbol.name)
        with timing_as_usual(), V.set_graph_handler(graph):
            graph.run(*inputs)
            return graph.compile_to_module()


def choose(
    unfused: Unfused,
    *,
    fused: Callable[[], AtenGemm],
    stock: Callable[[str], StockCall],
    gemms: Callable[[], Sequence[AtenGemm]],
) -> Any:
    """Races kernels against Inductor's unfused code and returns the winner's node.

    The race ends at the result. Further operations that Inductor would compute in the same kernel
    are not part of it, so only results that GEMMs alone use may come here
    (`graph.ends_kernel`). If the unfused code cannot be timed, the graph stays without
    kernels.

    Args:
        unfused: Inductor's unfused code.
        fused: Reads the GEMM that a fused kernel computes.
        stock: Returns the call that kernels replace, for their problem's key.
        gemms: Reads the GEMMs in ``unfused``.
    """
    try:
        choices = _choices(unfused, fused, stock, gemms)
    except Exception as error:
        raise_or_log(error)
        choices = [unfused]
    if choices == [unfused]:
        return unfused.output_node()
    try:
        chosen = autotune_select_algorithm(
            UNFUSED, choices, unfused.input_nodes, unfused.layout, return_multi_template=False
        )
    except UntimedError as error:
        _log_once(unfused.nvgemm_aot_gemm, str(error))
        chosen = unfused.output_node()
    # Count the GEMM once: here, or when Inductor lowers the unfused choice.
    report_outcome = report.tried if unfused.is_in_graph else report.met
    report_outcome(unfused.nvgemm_aot_gemm, **unfused.offer)
    if not unfused.is_in_graph:  # otherwise `hook` records the GEMMs of the unfused choice
        for index in range(len(gemms())):
            record_gemm(lambda index=index: gemms()[index])  # type: ignore[misc]
    return chosen[0] if isinstance(chosen, tuple) else chosen  # torch 2.11 returns only the node


@functools.cache
def _log_once(gemm: str, why: str) -> None:
    _log.warning(
        "%s: skipped fused kernels, because the unfused code cannot be timed: %s",
        gemm,
        why,
    )


def _choices(
    unfused: Unfused,
    fused: Callable[[], AtenGemm],
    stock: Callable[[str], StockCall],
    gemms: Callable[[], Sequence[AtenGemm]],
) -> list[Any]:
    # Measurements rank kernels but do not decide against the unfused code, which they never timed.
    gemm = fused()
    offers = find_offers(gemm, max_choices(), needs_kernel=True)
    call = stock(offers.gemm)
    if not offers.kernels or obstacles(call.op, unfused.input_nodes, unfused.layout):
        return [unfused]  # strides differ from those in the graph
    kernels: list[Any] = gemm_choices(call, offers.kernels)
    offered = {choice.name: choice.offer.kernel.operator for choice in kernels}
    dispatch = find_fused_dispatch_choice(unfused, gemm, call, offers.kernels[0])
    timed = dispatch.choice
    if timed is not None:
        kernels.append(timed.choice)
        offered[timed.choice.name] = timed.description
    unfused.nvgemm_aot_gemm = offers.gemm
    unfused.offer = {
        "basis": offers.basis,
        "offered": offered,
        "measured": offers.measured,
        "doubtful": [*offers.doubtful, *dispatch.doubtful],
    }
    alternatives: list[Any] = [unfused]
    if current_mode() is Mode.REQUIRED and not all(
        find_offers(gemm, max_choices(), needs_kernel=True).kernels for gemm in gemms()
    ):
        alternatives = []  # the unfused choice has no prebuilt kernel
    choices = time_fairly(alternatives, kernels)
    return choices if timed is None else join_dispatch(choices, timed)
