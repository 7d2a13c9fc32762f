"""Records the grouped products of `nvgemm_runtime.moe` in the graphs that Inductor compiles.

They are operators of their own, for which Inductor asks no choices. A pattern that never matches
looks at each.

The names of torch that are used here are private, and were run on torch 2.13.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    Match,
    register_graph_pattern,
)

from ..gemm.aten import AtenGemm
from ..gemm.moe_operators import NAMESPACE, OF_TWO_WEIGHTS, OPERATORS, read_products
from ..gemm.operands import Operand
from . import epilogue_fusion
from .hook import record_gemm
from .reading import operand_of_tensor
from .report import survive

_SEEN = "nvgemm_aot_recorded"
"""Key of a node's metadata: a pass may look at a node several times."""


def install() -> None:
    """Register the patterns, of operators that are defined by now."""
    from torch._inductor.fx_passes.post_grad import pass_patterns

    try:
        for name in OPERATORS:
            overload = getattr(getattr(torch.ops, NAMESPACE), name).default
            given = (KeywordArg(argument.name) for argument in overload._schema.arguments)
            register_graph_pattern(
                CallFunction(overload, *given),
                _record,
                pass_dict=pass_patterns[epilogue_fusion.PASS],
            )(_never)
    except Exception as error:
        survive(error)


def _record(match: Match) -> bool:
    """Record the products of an operator, and leave the graph as it is.

    Raises:
        RecordError: If it is to be recorded and cannot be.
    """
    node = match.output_node()
    if not node.meta.get(_SEEN):
        node.meta[_SEEN] = True
        for place in range(_count(node)):
            record_gemm(functools.partial(_read, node, match.kwargs, place))
    return False


def _count(node: torch.fx.Node) -> int:
    return 2 if node.target.overloadpacket.__name__ in OF_TWO_WEIGHTS else 1


def _read(node: torch.fx.Node, given: dict[str, Any], place: int) -> AtenGemm:
    operands = {
        name: _operand(argument)
        for name, argument in given.items()
        if isinstance(argument, torch.fx.Node)
    }
    return read_products(node.target.overloadpacket.__name__, operands)[place]


def _operand(node: torch.fx.Node) -> Operand:
    return operand_of_tensor(node.meta["val"], epilogue_fusion.hint)


def _never(match: Match, **_: Any) -> None:
    raise AssertionError("the pattern matches nothing")
