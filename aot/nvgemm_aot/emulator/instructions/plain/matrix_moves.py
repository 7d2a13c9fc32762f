"""Matrices of 8x8 between shared memory and registers (PTX ISA, "ldmatrix", "stmatrix")."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...emulation_errors import MemoryAccessError
from ...machine.accesses import Space, load, store
from ...machine.addresses import SHARED_WINDOW
from ...machine.hierarchy import Warp
from ...machine.lanes import LANES, Mask
from ...machine.meanings import Step, Value, going_on
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Operand, Vector
from ..decoders import Qualifiers, decodes
from ..values import address, destination, read
from .block_sync import check_members

_EVERYONE = np.full(LANES, 0xFFFF_FFFF, np.uint32)

_ROW_BYTES = 16
"""Bytes of a row, whose address one lane gives."""


def _elements(operand: Operand, count: int, instruction: Instruction) -> tuple[Operand, ...]:
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != count:
        raise instruction.unknown(f"a vector of {len(elements)}")
    return elements


def _row_addresses(
    operand: Operand, rows: int, instruction: Instruction, program: Program, *, generic: bool
) -> Value:
    """Returns the reader of the shared addresses that the first lanes give, one for each row."""
    where = address(operand, "u64" if generic else "u32", instruction, program)
    if not generic:
        return lambda warp: where(warp)[:rows]

    def addresses(warp: Warp) -> Any:
        found = where(warp)[:rows]
        outside = found >> np.uint64(32) != np.uint64(SHARED_WINDOW >> 32)
        if outside.any():
            first = int(found[outside.argmax()])
            raise MemoryAccessError(f"generic address {first:#x} is not of shared memory")
        return found - np.uint64(SHARED_WINDOW)

    return addresses


def _head(qualifiers: Qualifiers) -> None:
    qualifiers.one_of("sync")
    qualifiers.one_of("aligned")


def _is_generic(qualifiers: Qualifiers) -> bool:
    return qualifiers.option("shared", "shared::cta") is None


@decodes("ldmatrix")
def _load_matrices(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    _head(qualifiers)
    shape = qualifiers.one_of("m8n8", "m16n16", "m8n16")
    count = int(qualifiers.one_of("x1", "x2", "x4")[1:])
    transposed = qualifiers.flag("trans")
    generic = _is_generic(qualifiers)
    kind = qualifiers.one_of("b16" if shape == "m8n8" else "b8")
    format = None if shape == "m8n8" else qualifiers.option("b8x16.b6x16_p32", "b8x16")
    if format is not None:
        raise instruction.unknown("qualifier .b8x16")
    qualifiers.end()
    if shape == "m8n16" or (shape == "m16n16" and (not transposed or count == 4)):
        raise instruction.unknown(f"shape .{shape}.x{count}")
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    registers = count if shape == "m8n8" else 2 * count
    result = instruction.operands[0]
    targets = [
        destination(each, instruction, "b32") for each in _elements(result, registers, instruction)
    ]
    rows = 8 * count if shape == "m8n8" else 16 * count
    where = _row_addresses(instruction.operands[1], rows, instruction, program, generic=generic)

    def step(warp: Warp, mask: Mask) -> None:
        check_members(warp, mask, _EVERYONE)
        data = load(warp, Space.SHARED, where(warp), 4, _ROW_BYTES // 4)
        matrices = data.view(np.uint16 if kind == "b16" else np.uint8)
        if shape == "m8n8":
            matrices = matrices.reshape(count, 8, 8)
            if transposed:
                matrices = np.ascontiguousarray(matrices.swapaxes(1, 2))
            words = matrices.view(np.uint32).reshape(count, LANES)
        else:
            # Rows of the transposed matrix 0 to 7 and 8 to 15 go to two registers.
            turned = np.ascontiguousarray(matrices.reshape(count, 16, 16).swapaxes(1, 2))
            words = _fragments_of_bytes(turned, count)
        for target, word in zip(targets, words):
            if target is not None:
                warp.put(target, word, mask)

    return going_on(step)


def _fragments_of_bytes(matrices: Any, count: int) -> Any:
    """Returns registers of 16x16 matrices of bytes: lane 4r + c has row r's bytes 4c to 4c + 3."""
    return matrices.view(np.uint32).reshape(count * 2, LANES)


@decodes("stmatrix")
def _store_matrices(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    _head(qualifiers)
    shape = qualifiers.one_of("m8n8", "m16n8")
    count = int(qualifiers.one_of("x1", "x2", "x4")[1:])
    transposed = qualifiers.flag("trans")
    generic = _is_generic(qualifiers)
    kind = qualifiers.one_of("b16" if shape == "m8n8" else "b8")
    qualifiers.end()
    if shape == "m16n8" and not transposed:
        raise instruction.unknown(f"shape .{shape} without .trans")
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    where = _row_addresses(
        instruction.operands[0], 8 * count, instruction, program, generic=generic
    )
    values = [
        read(each, "b32", instruction, program)
        for each in _elements(instruction.operands[1], count, instruction)
    ]

    def step(warp: Warp, mask: Mask) -> None:
        check_members(warp, mask, _EVERYONE)
        words = np.stack([value(warp) for value in values])
        if kind == "b16":
            matrices = words.view(np.uint16).reshape(count, 8, 8)
            if transposed:
                matrices = matrices.swapaxes(1, 2)
        else:
            # Lane 4c + q has bytes of column c at rows 2q, 2q + 1, 2q + 8, 2q + 9.
            fragments = words.view(np.uint8).reshape(count, 8, 4, 2, 2)
            matrices = fragments.transpose(0, 1, 3, 2, 4).reshape(count, 8, 16)
        rows = np.ascontiguousarray(matrices).reshape(count * 8, -1).view(np.uint32)
        store(warp, Space.SHARED, where(warp), rows)

    return going_on(step)


@decodes("movmatrix")
def _transpose_matrix(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    _head(qualifiers)
    for name in ("m8n8", "trans", "b16"):
        qualifiers.one_of(name)
    qualifiers.end()
    result, value = instruction.operands
    to = destination(result, instruction, "b32")
    values = read(value, "b32", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        check_members(warp, mask, _EVERYONE)
        matrix = values(warp).view(np.uint16).reshape(8, 8)
        if to is not None:
            turned = np.ascontiguousarray(matrix.T).view(np.uint32).reshape(LANES)
            warp.put(to, turned, mask)

    return going_on(step)
