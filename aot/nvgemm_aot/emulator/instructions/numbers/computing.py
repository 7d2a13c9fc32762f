"""Builds computations from a function and the types of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...machine.meanings import Computation, Source
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Operand
from ..values import destination, natural_dtype, source, storage_dtype


def computed(
    instruction: Instruction,
    program: Program,
    function: Callable[..., Any],
    result_kind: str,
    *kinds: str,
    operands: Sequence[Operand] | None = None,
    raw: bool = False,
    signless: bool = False,
) -> Computation:
    """Returns a computation of the first operand from the others.

    Args:
        instruction: The instruction.
        program: The program that has it.
        function: Takes the operands' lanes by their natural types, such as int32 for ``s32``, and
            returns the result's by its natural type.
        result_kind: Type of the result.
        kinds: Types of the other operands, of which there must be as many.
        operands: Operands instead of the instruction's.
        raw: True if the function returns the result as registers hold it.
        signless: True if the function takes operands as registers hold them, too, since their
            signs do not change the result's bits.

    Raises:
        UnsupportedPtxError: If an operand does not fit.
    """
    result, *inputs = instruction.operands if operands is None else operands
    if len(inputs) != len(kinds):
        raise instruction.unknown(f"a number of {len(inputs) + 1} operands")
    stored = storage_dtype(result_kind)
    sources = [source(operand, kind, instruction, program) for operand, kind in zip(inputs, kinds)]
    if signless:
        sources = [_as_registers(each, kind) for each, kind in zip(sources, kinds)]
    return Computation(
        function=function,
        sources=tuple(sources),
        results=(destination(result, instruction, result_kind),),
        view=None if raw or signless or natural_dtype(result_kind) is stored else stored,
    )


def _as_registers(read: Source, kind: str) -> Source:
    """Returns a source whose lanes have the type of registers."""
    lanes = None if read.lanes is None else read.lanes.view(storage_dtype(kind))
    return replace(read, lanes=lanes, view=None)
