"""Records grouped GEMMs from `nvgemm_runtime.moe` in graphs that Inductor compiles.

Inductor asks no choices for these custom operators. A pattern that never matches visits each.

The torch names used here are private and were run on torch 2.13.
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
from ..gemm.moe_operators import NAMESPACE, OPERATORS, PAIRED_OPERATORS, read_products
from ..gemm.operands import Operand
from .fusion.graph import PASS, hint
from .hook import record_gemm
from .reading import operand_of_tensor
from .report import raise_or_log

_SEEN = "nvgemm_aot_recorded"
"""Metadata key that marks a recorded node. A pass may visit a node several times."""


def install() -> None:
    """Registers the patterns for operators that are defined by now."""
    from torch._inductor.fx_passes.post_grad import pass_patterns

    try:
        for name in OPERATORS:
            overload = getattr(getattr(torch.ops, NAMESPACE), name).default
            arguments = (KeywordArg(argument.name) for argument in overload._schema.arguments)
            register_graph_pattern(
                CallFunction(overload, *arguments),
                _record,
                pass_dict=pass_patterns[PASS],
            )(_never)
    except Exception as error:
        raise_or_log(error)


def _record(match: Match) -> bool:
    """Records an operator's GEMMs and leaves the graph unchanged.

    Raises:
        RecordError: If they should be recorded and cannot be.
    """
    node = match.output_node()
    if not node.meta.get(_SEEN):
        node.meta[_SEEN] = True
        for index in range(_product_count(node)):
            record_gemm(functools.partial(_read, node, match.kwargs, index))
    return False


def _product_count(node: torch.fx.Node) -> int:
    return 2 if node.target.overloadpacket.__name__ in PAIRED_OPERATORS else 1


def _read(node: torch.fx.Node, arguments: dict[str, Any], index: int) -> AtenGemm:
    operands = {
        name: _operand(argument)
        for name, argument in arguments.items()
        if isinstance(argument, torch.fx.Node)
    }
    return read_products(node.target.overloadpacket.__name__, operands)[index]


def _operand(node: torch.fx.Node) -> Operand:
    return operand_of_tensor(node.meta["val"], hint)


def _never(match: Match, **_: Any) -> None:
    raise AssertionError("the pattern matches nothing")
