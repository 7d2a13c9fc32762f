"""Multiplications of one warp, whose matrices lie in registers (PTX ISA, "mma").

A result is the sum of its products and of what it adds to, rounded once, as `warp_group_multiply`
does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...machine.hierarchy import Warp
from ...machine.lanes import LANES, Mask
from ...machine.meanings import Step, going_on
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers, decodes
from .element_formats import ElementFormat, Values
from .warp_group_multiply import (
    ACCUMULATORS,
    FORMATS,
    PARTNERS,
    check_lanes,
    registers_of,
    rounded,
)

_ROWS, _COLUMNS = 16, 8
"""Rows of A and columns of B, in the only shapes that are known."""

_GROUP = 4
"""Threads that share a row of A and a column of B."""

Words = npt.NDArray[np.uint32]


@decodes("mma.sync")
def _multiply(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("sync")
    qualifiers.one_of("aligned")
    size = qualifiers.next()
    qualifiers.one_of("row")
    qualifiers.one_of("col")
    saturates = qualifiers.flag("satfinite")
    accumulator = qualifiers.one_of("f16", "f32", "s32")
    kind = qualifiers.one_of(*FORMATS)
    partner = qualifiers.one_of(*PARTNERS.get(kind, (kind,)))
    qualifiers.one_of(accumulator)
    qualifiers.end()
    if accumulator not in ACCUMULATORS[kind] or (saturates and accumulator != "s32"):
        raise instruction.unknown(f"D of .{accumulator} for A of .{kind}")
    registers = _registers_along_k(size, FORMATS[kind], instruction)
    if len(instruction.operands) != 4:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    sums = 2 if accumulator == "f16" else 4
    d, a, b, c = (
        [each.number for each in registers_of(operand, count, instruction, distinct=i == 0)]
        for i, (operand, count) in enumerate(
            zip(instruction.operands, (sums, 2 * registers, registers, sums))
        )
    )

    def step(warp: Warp, mask: Mask) -> None:
        check_lanes(mask)
        first = _rows(_words(warp, a).reshape(registers, 2, LANES), FORMATS[kind])
        second = _rows(_words(warp, b).reshape(registers, 1, LANES), FORMATS[partner])
        with np.errstate(invalid="ignore", over="ignore"):
            product = first @ second.T + _unpack(_words(warp, c), accumulator)
            result = rounded(product, accumulator, saturates=saturates)
        for number, words in zip(d, _pack(result)):
            warp.put(number, words, mask)

    return going_on(step)


def _registers_along_k(size: str, kind: ElementFormat, instruction: Instruction) -> int:
    """Returns a thread's registers along k: one or two (PTX ISA, "mma", "Matrix Shape")."""
    for registers in (1, 2):
        if size == f"m{_ROWS}n{_COLUMNS}k{registers * kind.chunk_elements}":
            return registers
    raise instruction.unknown(f"shape .{size} of .{kind.name}")


def _words(warp: Warp, numbers: list[int]) -> Words:
    return np.array([warp.registers[number] for number in numbers], np.uint32)


def _rows(words: Words, kind: ElementFormat) -> Values:
    """Returns A as ``(m, k)`` or B as ``(n, k)``.

    Words have the dimensions register along k, half of the rows, lane.
    """
    parts = words.reshape(*words.shape[:2], LANES // _GROUP, _GROUP)
    # Each row has its first registers' elements of all four threads, then the second ones'.
    chunks = np.ascontiguousarray(parts.transpose(1, 2, 0, 3)).view(np.uint8)
    return kind.decode(chunks.reshape(len(words[0]) * _COLUMNS, -1))


def _unpack(words: Words, accumulator: str) -> Values:
    """Returns accumulators of registers as a matrix ``(m, n)``."""
    if accumulator == "f16":
        pairs = words.view(np.float16).reshape(2, LANES // _GROUP, _COLUMNS)
    else:
        dtype = np.float32 if accumulator == "f32" else np.int32
        elements = words.view(dtype).reshape(2, 2, LANES // _GROUP, _GROUP)
        pairs = elements.transpose(0, 2, 3, 1)
    return pairs.reshape(_ROWS, _COLUMNS).astype(np.float64)


def _pack(result: npt.NDArray[np.generic]) -> Words:
    """Returns the words of a result's registers."""
    if result.dtype == np.float16:
        return np.ascontiguousarray(result).view(np.uint32).reshape(2, LANES)
    parts = result.reshape(2, LANES // _GROUP, _GROUP, 2).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(parts).view(np.uint32).reshape(4, LANES)
