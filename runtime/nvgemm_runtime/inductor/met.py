"""Which GEMM Inductor asks choices for, read off the choices: for recordings."""

from __future__ import annotations

from typing import Any

from ..gemm.aten import OPERATORS, UNSERVED, AtenGemm
from ..gemm.problem import Problem
from ..matching.device import device_facts
from ..recording.declarable import declarable_for
from ..recording.recorder import chosen_target
from .alternatives import is_alternative
from .reading import find_operator, operand, operand_of, read_choice


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
    if op in OPERATORS:
        gemm = read_choice(op, choice)
    else:
        nodes = choice.input_nodes[1:] if UNSERVED[op].adds_first else choice.input_nodes
        a, b = map(operand, nodes[:2])
        gemm = AtenGemm(op=op, a=a, b=b, out=operand_of(choice.layout, 0))
    return declared_as(gemm)


def declared_as(gemm: AtenGemm) -> tuple[Problem | str, str]:
    """A GEMM as recordings have it; see `what_was_met`."""
    device = gemm.a.device
    target = chosen_target(device_facts(device.type, device.index or 0).capability)
    return declarable_for(gemm, target), target
