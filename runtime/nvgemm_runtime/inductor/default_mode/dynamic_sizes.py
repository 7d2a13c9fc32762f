"""Adds a choice that dispatches by m to max-autotune, for graphs with dynamic m.

Its table comes from measurements on this device. One measurement is enough, because Inductor times
the choice again at its own size and at several measured sizes.

The torch names used here are private and were run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.testing import rand_strided
from torch._inductor.utils import sympy_subs
from torch._inductor.virtualized import V

from ...gemm.aten import OPERATORS, AtenGemm, kernel_order
from ...gemm.operand_checks import RANKS
from ...gemm.problem import Op
from ...gemm.roles import Role
from ...launch.dispatch_table import find_dispatch
from ...matching.dispatch import TunedTogether
from ...matching.evidence import Evidence
from ...matching.thresholds import ATEN
from ...recording.declarable import read_requests
from ...reporting.counters import COUNTERS
from ..autotuning.choice_timing import SizedOperands
from ..autotuning.choices import StockCall
from ..offers import Offer, facts_for
from ..reading import AutotunedGemm, is_known, rows_of
from .dispatched_choices import DispatchChoice, DispatchOffer

MOST_SIZES = 4
"""Largest number of sizes, besides Inductor's own, at which the choice is timed. Each costs as
much as timing two choices."""


@dataclass(frozen=True, kw_only=True)
class TimedDispatch:
    """Choice that dispatches by m.

    Attributes:
        choice: The choice.
        sizes: Create operands for the sizes, besides Inductor's own, at which it is timed.
    """

    choice: DispatchChoice
    sizes: list[SizedOperands]

    @property
    def description(self) -> str:
        """The dispatch table as text."""
        return f"by m: {self.choice.offer}"


@dataclass(frozen=True, kw_only=True)
class DispatchResult:
    """Result of measured rankings for a graph with dynamic m.

    Attributes:
        choice: The choice. None if the winner does not change with m, or if a kernel is needed at
            each m and ATen would compute some.
        is_left_to_aten: True if the table has ATen at every m in the graph and no kernel is needed.
            Also true if no measurement counts.
        doubtful: Bundles whose measurements of the graph's sizes are in doubt or contradict each
            other; see `report.met`.
    """

    choice: TimedDispatch | None = None
    is_left_to_aten: bool = False
    doubtful: Sequence[TunedTogether] = ()


def find_dispatch_choice(
    gemm: AutotunedGemm, stock: StockCall, *, needs_kernel: bool = False
) -> DispatchResult:
    """Finds the dispatching choice if the measured winner changes with m, and bundles in doubt.

    Args:
        gemm: The GEMM.
        stock: Call that kernels replace.
        needs_kernel: True if a kernel must compute at every m in the graph.
    """
    result = _find_dispatch(gemm, gemm.call, stock, None)
    if not needs_kernel:
        return result
    is_whole = result.choice is not None and ATEN not in result.choice.choice.offer.table.kernels
    return DispatchResult(choice=result.choice if is_whole else None, doubtful=result.doubtful)


def find_fused_dispatch_choice(
    unfused: Any, call: AtenGemm, stock: StockCall, default: Offer
) -> DispatchResult:
    """Finds the dispatching choice for a GEMM with an activation or a gate.

    The table has no ATen rows. Measurements compared kernels with ATen's separate operations, so
    they give the fastest kernel, but do not tell if it beats Inductor's fused code.

    Args:
        unfused: Inductor's choice.
        call: GEMM that kernels compute.
        stock: Call that they replace.
        default: Kernel for sizes where no kernel won. Without dispatch it computes at every m.
    """
    gemm = AutotunedGemm(op=stock.op, choice=unfused, is_served=False)
    return _find_dispatch(gemm, call, stock, default)


def _find_dispatch(
    gemm: AutotunedGemm, call: AtenGemm, stock: StockCall, default: Offer | None
) -> DispatchResult:
    rows = rows_of(gemm)
    if rows is None or rows.is_one:
        return DispatchResult()
    requests = read_requests(call)
    if isinstance(requests, str):
        return DispatchResult()
    facts = facts_for(call)
    with COUNTERS.spending("matching"):
        request, dispatch = find_dispatch(
            requests,
            facts,
            is_precise=call.is_precise,
            evidence=Evidence.ONCE,
            only_deterministic=False,  # `facts` has the program's own demand
        )
    table = dispatch.table.within(rows.least, rows.most)
    offer = DispatchOffer.of(dispatch, table)
    if default is not None:
        offer = offer.without_aten(default)
    doubtful = dispatch.doubtful_within(rows.least, rows.most)
    if not offer.table.bounds:
        return DispatchResult(is_left_to_aten=not offer.table.has_kernels, doubtful=doubtful)
    other_sizes = [
        size.m for size in dispatch.sizes if size.m in rows and size.m != request.problem.m
    ]
    sizes = [_operands_at(gemm, m) for m in _spread(other_sizes)]
    choice = DispatchChoice(stock, offer, gemm.choice)
    timed = TimedDispatch(
        choice=choice, sizes=[operands for operands in sizes if operands is not None]
    )
    return DispatchResult(choice=timed, doubtful=doubtful)


def _spread(sizes: Sequence[int]) -> list[int]:
    """Returns at most `MOST_SIZES` of some ascending sizes, including the first and the last."""
    count = min(MOST_SIZES, len(sizes))
    if count < 2:
        return list(sizes[:count])
    return [sizes[index * (len(sizes) - 1) // (count - 1)] for index in range(count)]


def _operands_at(gemm: AutotunedGemm, m: int) -> SizedOperands | None:
    """Returns a function that creates operands with m rows in A, or None if m is impossible."""
    nodes = gemm.choice.input_nodes
    rows = V.graph.sizevars.simplify(nodes[kernel_order(gemm.op, len(nodes))[0]].get_size()[-2])
    symbols = list(rows.free_symbols)
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    multiple = sympy_subs(rows, {symbol: 1})
    if not is_known(multiple) or rows != multiple * symbol or m % int(multiple):
        return None
    return functools.partial(
        _make_operands,
        dict(zip(OPERATORS[gemm.op].tensors.values(), (node.get_layout() for node in nodes))),
        gemm.choice.layout,
        m,
        {symbol: m // int(multiple)},
    )


def _make_operands(
    layouts: Mapping[Role, Any], result: Any, m: int, values: Mapping[Any, int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Creates random operands and a result from Inductor's layouts and its symbols' values.

    Groups are equal in size, as far as m rows, or k, divide evenly, as in `tune`'s measurements.
    """
    a, b = layouts[Role.A], layouts[Role.B]
    is_along_k = (len(a.size), len(b.size)) == RANKS[Op.K_GROUPED_MM]
    shared = int(sympy_subs(a.size[-1], values)) if is_along_k else m

    def make(layout: Any, role: Role = Role.OUT) -> torch.Tensor:
        if role is Role.OFFSETS:
            groups = int(layout.size[0])
            ends = [shared * group // groups for group in range(1, groups + 1)]
            return torch.tensor(ends, dtype=layout.dtype, device=layout.device)
        size, stride = (
            tuple(int(sympy_subs(extent, values)) for extent in extents)
            for extents in (layout.size, layout.stride)
        )
        tensor: torch.Tensor = rand_strided(size, stride, dtype=layout.dtype, device=layout.device)
        return tensor

    return [make(layout, role) for role, layout in layouts.items()], make(result)
