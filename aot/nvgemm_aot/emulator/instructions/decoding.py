"""Decodes a program: what each of its instructions does."""

from __future__ import annotations

from ..machine.scheduler import Steps
from ..ptx.program import Program
from . import control, integers
from .asynchronous import (
    bulk_copies,
    bulk_groups,
    cluster_launches,
    memory_barriers,
    tensor_copies,
)
from .registry import decode
from .tensor_cores import (
    shared_to_tensor,
    tensor_allocation,
    tensor_commits,
    tensor_multiply,
    tensor_registers,
)

_FAMILIES = (
    control,
    integers,
    bulk_copies,
    bulk_groups,
    cluster_launches,
    memory_barriers,
    tensor_copies,
    shared_to_tensor,
    tensor_allocation,
    tensor_commits,
    tensor_multiply,
    tensor_registers,
)
"""Modules that register decoders when they are imported."""


def decode_program(program: Program) -> Steps:
    """Returns what each instruction does, and the predicate that decides whether it does.

    Raises:
        UnsupportedPtxError: If an instruction is not known.
    """
    assert _FAMILIES
    return [
        (
            decode(instruction, program),
            None if instruction.predicate is None else instruction.predicate.number,
            instruction.negated,
        )
        for instruction in program.instructions
    ]
