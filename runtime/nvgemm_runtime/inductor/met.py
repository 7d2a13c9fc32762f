"""Which GEMM Inductor asks choices for, read off the choices: for recordings."""

from __future__ import annotations

from typing import Any

from torch._inductor.virtualized import V

from ..declarable import UNSERVED, declarable
from ..facts import device_facts
from ..problem import Op, Problem
from ..recorder import chosen_target
from .reading import is_alternative, name_in_aten, operand, operand_of

_GEMMS = {*(op.value for op in Op), *UNSERVED}

_OPERATORS = {
    "mm_dtype": "mm",
    "bmm_dtype": "bmm",
    "bias_addmm": "addmm",
    "_mm_plus_mm": "mm_plus_mm",
}
"""By name of Inductor's choice, where it is another one: ATen's of the operator."""

_WITH_ADDEND = ("addmm", "baddbmm")
"""Operators whose first operand is not multiplied."""


def what_was_met(choices: list[Any]) -> tuple[Problem | str, str] | None:
    """The GEMM that choices are for.

    Returns:
        Its problem, or what it is and why no manifest declares it; and what to build for. None
        where it is no GEMM, or another way to compute one.

    Raises:
        RecordError: If the user wants what nothing can be built for.
    """
    if not choices or is_alternative():
        return None
    found = _find_operator(choices)
    if found is None:
        return None
    op, choice = found
    nodes = choice.input_nodes[1:] if op in _WITH_ADDEND else choice.input_nodes
    a, b = map(operand, nodes[:2])
    device = a.device
    return (
        declarable(op, a, b, operand_of(choice.layout, 0)),
        chosen_target(device_facts(device.type, device.index or 0).capability),
    )


def _find_operator(choices: list[Any]) -> tuple[str, Any] | None:
    """ATen's name of the operator, and a choice that takes its operands; None if it is no GEMM."""
    packet = getattr(V.graph.current_node.target, "overloadpacket", None)
    named = [(name_in_aten(choice), choice) for choice in choices]
    for name, choice in (*named, (getattr(packet, "__name__", None), choices[0])):
        operator = _OPERATORS.get(name or "", name)
        if operator in _GEMMS:
            return operator, choice
    return None
