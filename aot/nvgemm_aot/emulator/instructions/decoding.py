"""Decodes a program: gives each of its instructions a meaning."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from ..emulation_errors import UnsupportedPtxError
from ..machine.meanings import Meanings
from ..machine.scheduler import Plan
from ..ptx.program import Program
from . import atomics, control
from .asynchronous import (
    bulk_copies,
    bulk_groups,
    cluster_launches,
    memory_barriers,
    remote_stores,
    tensor_copies,
    thread_copies,
)
from .decoders import decode
from .numbers import arithmetic, bits, comparisons, conversions, elementary
from .plain import (
    block_sync,
    fences,
    hints,
    loads,
    matrix_moves,
    moves,
    warp_votes,
)
from .tensor_cores import (
    shared_to_tensor,
    tensor_allocation,
    tensor_commits,
    tensor_multiply,
    tensor_registers,
    warp_group_multiply,
    warp_multiply,
)

_FAMILIES = (
    bulk_copies,
    bulk_groups,
    cluster_launches,
    memory_barriers,
    remote_stores,
    tensor_copies,
    thread_copies,
    shared_to_tensor,
    tensor_allocation,
    tensor_commits,
    tensor_multiply,
    tensor_registers,
    warp_group_multiply,
    warp_multiply,
    arithmetic,
    atomics,
    bits,
    block_sync,
    comparisons,
    control,
    conversions,
    elementary,
    fences,
    hints,
    loads,
    matrix_moves,
    moves,
    warp_votes,
)
"""Modules that register decoders when they are imported."""

_PLANS: weakref.WeakKeyDictionary[Program, Plan] = weakref.WeakKeyDictionary()


def plan_of(program: Program) -> Plan:
    """Returns the decoded program, which is kept as long as the program.

    Raises:
        UnsupportedPtxError: If instructions are not known; names each kind.
    """
    if (plan := _PLANS.get(program)) is None:
        plan = _PLANS[program] = Plan(program, _decode_all(program))
    return plan


def _decode_all(program: Program) -> Meanings:
    assert _FAMILIES
    meanings = []
    unknown: dict[tuple[object, ...], list[UnsupportedPtxError]] = {}
    for instruction in program.instructions:
        try:
            meaning = decode(instruction, program)
        except UnsupportedPtxError as error:
            reason = str(error).replace(instruction.text, "").partition(": ")[2]
            alike = (instruction.opcode, instruction.qualifiers, reason)
            unknown.setdefault(alike, []).append(error)
            continue
        predicate = instruction.predicate
        meanings.append(
            (meaning, None if predicate is None else predicate.number, instruction.negated)
        )
    count = sum(map(len, unknown.values()))
    if count == 1:
        raise next(iter(unknown.values()))[0]
    if unknown:
        raise UnsupportedPtxError(f"{count} unknown instructions: {_listed(unknown.values())}")
    return meanings


def _listed(unknown: Iterable[Sequence[UnsupportedPtxError]]) -> str:
    """Lists the first of each kind, with the number of others."""
    return "; ".join(
        f"{alike[0]} ({len(alike) - 1} more alike)" if alike[1:] else str(alike[0])
        for alike in unknown
    )
