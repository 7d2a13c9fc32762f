"""Under max-autotune, one more choice for a graph of any m: what takes another kernel by m.

What was measured on this device makes its table, if only once, since it is timed again: at
Inductor's own size and at several others of those that were measured.

The names of torch that are used here are private, and were run on torch 2.11 to 2.15.
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

from ..counters import COUNTERS
from ..gemm.aten import OPERATORS, AtenGemm, kernel_order
from ..gemm.operands import RANKS
from ..gemm.problem import Op
from ..gemm.roles import Role
from ..launch.dispatch_table import find_dispatch
from ..matching.dispatch import TunedTogether
from ..matching.evidence import Evidence
from ..matching.thresholds import ATEN
from ..recording.declarable import read_requests
from .choice_timing import SizedOperands
from .choices import StockCall
from .dispatched_choices import DispatchedChoice, DispatchOffer
from .offers import Offer, facts_for
from .reading import AutotunedGemm, is_known, rows_of

MOST_SIZES = 4
"""Most sizes at which the choice is timed besides Inductor's own: each takes as long as timing two
choices."""


@dataclass(frozen=True, kw_only=True)
class ChoiceByM:
    """A choice that takes another kernel by m.

    Attributes:
        choice: The choice.
        sizes: What makes operands of the sizes at which it is timed besides Inductor's own.
    """

    choice: DispatchedChoice
    sizes: list[SizedOperands]

    @property
    def told(self) -> str:
        """In words, which kernel it takes at which m."""
        return f"by m: {self.choice.offer}"


@dataclass(frozen=True, kw_only=True)
class FoundByM:
    """What measured rankings give a graph of any m.

    Attributes:
        choice: The choice; None where what was measured to compute does not change with m, or where
            a kernel is needed at each and ATen would compute at some.
        is_left_to_aten: Whether the table has ATen alone at every m of the graph, also where no
            measurement counts, and no kernel is needed.
        doubtful: The bundles whose measurements of sizes of the graph are in doubt or contradict
            each other; see `report.met`.
    """

    choice: ChoiceByM | None = None
    is_left_to_aten: bool = False
    doubtful: Sequence[TunedTogether] = ()


def find_choice_by_m(
    gemm: AutotunedGemm, stock: StockCall, *, needs_kernel: bool = False
) -> FoundByM:
    """The choice, where what was measured to be the fastest changes with m, and what is in doubt.

    Args:
        gemm: The GEMM.
        stock: The call that kernels replace.
        needs_kernel: Whether a kernel must compute at every m of the graph.
    """
    found = _find_choice(gemm, gemm.call, stock, None)
    if not needs_kernel:
        return found
    is_whole = found.choice is not None and ATEN not in found.choice.choice.offer.table.kernels
    return FoundByM(choice=found.choice if is_whole else None, doubtful=found.doubtful)


def find_fused_choice_by_m(
    unfused: Any, call: AtenGemm, stock: StockCall, usual: Offer
) -> FoundByM:
    """As `find_choice_by_m`, for a GEMM with an activation or a gate.

    Measurements tell which kernel is fastest, and not whether one is faster than what Inductor has:
    they compared with ATen's separate operations, which is not that. So ATen has no rows.

    Args:
        unfused: Inductor's choice.
        call: What kernels compute.
        stock: The call that they replace.
        usual: What computes where no kernel was measured to: otherwise it would at every m.
    """
    gemm = AutotunedGemm(op=stock.op, choice=unfused, is_served=False)
    return _find_choice(gemm, call, stock, usual)


def _find_choice(
    gemm: AutotunedGemm, call: AtenGemm, stock: StockCall, usual: Offer | None
) -> FoundByM:
    rows = rows_of(gemm)
    if rows is None or rows.is_one:
        return FoundByM()
    asked = read_requests(call)
    if isinstance(asked, str):
        return FoundByM()
    facts = facts_for(call)
    with COUNTERS.spending("matching"):
        request, decided = find_dispatch(
            asked,
            facts,
            is_precise=call.is_precise,
            evidence=Evidence.ONCE,
            only_deterministic=False,  # a program that wants that has it in `facts`
        )
    table = decided.table.within(rows.least, rows.most)
    offer = DispatchOffer.of(decided, table)
    if usual is not None:
        offer = offer.without_aten(usual)
    doubtful = decided.doubtful_within(rows.least, rows.most)
    if not offer.table.bounds:
        return FoundByM(is_left_to_aten=not offer.table.has_kernels, doubtful=doubtful)
    others = [size.m for size in decided.sizes if size.m in rows and size.m != request.problem.m]
    sizes = [_operands_at(gemm, m) for m in _spread(others)]
    choice = DispatchedChoice(stock, offer, gemm.choice)
    by_m = ChoiceByM(choice=choice, sizes=[one for one in sizes if one is not None])
    return FoundByM(choice=by_m, doubtful=doubtful)


def _spread(sizes: Sequence[int]) -> list[int]:
    """At most `MOST_SIZES` of some rising sizes, the first and the last among them."""
    taken = min(MOST_SIZES, len(sizes))
    if taken < 2:
        return list(sizes[:taken])
    return [sizes[place * (len(sizes) - 1) // (taken - 1)] for place in range(taken)]


def _operands_at(gemm: AutotunedGemm, m: int) -> SizedOperands | None:
    """What makes operands with so many rows of A; None where the graph has none such."""
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
    """Random operands, and a result, of Inductor's layouts for some values of their symbols.

    Groups are of equal sizes, as far as m rows, or k, can be shared out, as where `tune` measures
    them.
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
        made: torch.Tensor = rand_strided(size, stride, dtype=layout.dtype, device=layout.device)
        return made

    return [make(layout, role) for role, layout in layouts.items()], make(result)
