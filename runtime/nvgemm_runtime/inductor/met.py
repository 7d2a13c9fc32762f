"""Which GEMM Inductor asks choices for, read off the choices: for recordings."""

from __future__ import annotations

from typing import Any

from ..declarable import declarable
from ..facts import device_facts
from ..problem import Problem
from ..recorder import chosen_target
from .reading import find_operator, is_alternative, operand, operand_of

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
    if is_alternative():
        return None
    found = find_operator(choices)
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
