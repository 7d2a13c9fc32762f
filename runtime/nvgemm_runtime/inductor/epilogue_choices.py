"""Chooses between one kernel for a sum and its activation, and what Inductor has for the two.

The names of torch that are used here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.codegen.subgraph import SubgraphChoiceCaller, inline_subgraph_to_ir_nodes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel.mm_common import mm_args
from torch._inductor.select_algorithm import autotune_select_algorithm, realize_inputs
from torch._inductor.utils import is_gpu
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from ..gemm.aten import AtenGemm, read_inputs
from ..gemm.types import Activation
from ..settings import Mode, choosing_key, max_choices
from . import report
from .cache_key import installed_digest
from .choice_timing import timing_as_usual
from .choices import StockCall, gemm_choices, obstacles
from .hook import on_equal_terms, record_gemm
from .modes import current_mode
from .offers import Offers, find_offers
from .reading import UNFUSED, operand, operand_of
from .report import survive

_log = logging.getLogger(__name__)

_numbers = itertools.count()


def _function(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    row = activation.row
    return partial(getattr(functional, row.torch_name), **row.torch_options)


def lower(activation: Activation, bias: Any, a: Any, b: Any, *, was_apart: bool) -> Any:
    """Lower ``activation(a @ b + bias)`` to the node of the result [m, n].

    ``a`` is [m, k], ``b`` is [k, n], and ``bias`` is a row. ``was_apart``
    says whether the graph had a product and a sum, and no ``addmm``.
    """
    operands = [bias, a, b]
    _, _, _, layout, a, b = mm_args(a, b)
    nodes = [realize_inputs(bias), a, b]
    unfused = _Unfused(activation, operands, nodes, layout, was_apart)
    try:
        choices = _choices(activation, unfused)
    except Exception as error:
        survive(error)
        choices = [unfused]
    if choices == [unfused]:
        return unfused.output_node()
    chosen = autotune_select_algorithm(UNFUSED, choices, nodes, layout, return_multi_template=False)
    # The GEMM counts once: here, or when Inductor lowers the unfused choice.
    tell = report.tried if unfused.is_in_graph else report.met
    tell(unfused.nvgemm_aot_gemm, **unfused.offer)
    if not unfused.is_in_graph:  # otherwise `hook` records the GEMM of the unfused choice
        record_gemm(lambda: _read(None, unfused))
    return chosen[0] if isinstance(chosen, tuple) else chosen  # torch 2.11 gives the node alone


def _choices(activation: Activation, unfused: _Unfused) -> list[Any]:
    offers = _find_offers(activation, unfused)
    if not offers.kernels or obstacles("addmm", unfused.input_nodes, unfused.layout):
        return [unfused]  # strides differ from those in the graph
    stock = StockCall(
        op="addmm",
        gemm=offers.gemm,
        inputs=unfused.input_nodes,
        layout=unfused.layout,
        activation=activation,
    )
    fused = gemm_choices(stock, offers.kernels)
    offered = {choice.name: choice.offer.kernel.operator for choice in fused}
    unfused.nvgemm_aot_gemm = offers.gemm
    unfused.offer = {"basis": offers.basis, "offered": offered, "measured": offers.measured}
    if current_mode() is Mode.REQUIRED and not _find_offers(None, unfused).kernels:
        return on_equal_terms([], fused)  # the unfused choice has no prebuilt kernel
    return on_equal_terms([unfused], fused)


def _find_offers(activation: Activation | None, unfused: _Unfused) -> Offers:
    # A measurement decides which kernel, and not whether one: it compared with ATen's addmm.
    return find_offers(_read(activation, unfused), max_choices(), needs_kernel=True)


def _read(activation: Activation | None, unfused: _Unfused) -> AtenGemm:
    """The GEMM with an activation behind it, or the one that Inductor lowers unfused."""
    tensors = [operand(node) for node in unfused.input_nodes]
    if activation is None and unfused.is_apart:
        return read_inputs("mm", tensors[1:], {}, operand_of(unfused.layout, 0))
    return read_inputs("addmm", tensors, {}, operand_of(unfused.layout, 0), activation)


class _Unfused(SubgraphChoiceCaller):  # type: ignore[misc]
    """What Inductor lowers without a fused kernel, as one choice.

    It is timed as a whole, with its GEMM chosen among all that Inductor and bundles have for it.
    Where it wins, its operations become part of the graph as in stock torch.

    Attributes:
        operands: As the graph gives them, for `output_node`.
        is_apart: Whether Inductor would compute the product and the sum separately.
        is_in_graph: Whether it has won.
        offer: The kernels that compete with it, as arguments of `report.met`.
    """

    def __init__(
        self,
        activation: Activation,
        operands: list[Any],
        nodes: list[Any],
        layout: ir.Layout,
        was_apart: bool,
    ) -> None:
        self.operands = operands
        self.is_apart = _sums_apart(layout, was_apart)
        self.is_in_graph = False
        self.nvgemm_aot_gemm = ""
        self.offer: dict[str, Any] = {}
        super().__init__(
            f"{UNFUSED}_{next(_numbers)}",
            nodes,
            layout,
            description=f"addmm and {activation.value} without a kernel for both",
            make_fx_graph=make_fx(
                _sum_and(activation, self.is_apart), decomposition_table=select_decomp_table()
            ),
        )

    def benchmark(self, *args: Any, out: Any) -> float:
        """Milliseconds of a call; infinite where it cannot be compiled by itself."""
        try:
            return float(super().benchmark(*args, out=out))
        except Exception as error:
            _log.debug("%s cannot be timed: %s", self.name, error, exc_info=True)
            return math.inf

    def hash_key(self) -> str:
        """The key of its time, which depends on the bundles and backends for its GEMM."""
        known = (installed_digest(), config.max_autotune_gemm_backends, choosing_key())
        return "-".join([super().hash_key(), *map(str, known)])

    def output_node(self) -> Any:
        """The nodes that are scheduled when this choice has won."""
        self.is_in_graph = True
        return inline_subgraph_to_ir_nodes(self.gm, self.operands, self.name)

    def _compile_for_benchmarking(self) -> Any:
        """As the base class does, but with all choices for the GEMM."""
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


def _sum_and(activation: Activation, is_apart: bool) -> Callable[..., torch.Tensor]:
    function = _function(activation)

    def in_one(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function(torch.addmm(bias, a, b))

    def apart(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function(a @ b + bias)

    return apart if is_apart else in_one


def _sums_apart(layout: ir.Layout, was_apart: bool) -> bool:
    """Whether Inductor separates a sum from its product, in front of an activation.

    On GPUs it does, so that sum and activation become one kernel; from torch 2.13 on it keeps addmm
    for half precision.
    """
    if not is_gpu(layout.device.type):
        return False
    half = layout.dtype in (torch.bfloat16, torch.float16)
    return was_apart or not (half and getattr(config, "keep_addmm_fused_for_half_dtypes", False))
