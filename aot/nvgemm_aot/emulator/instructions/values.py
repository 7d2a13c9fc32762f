"""Reads operands: functions from a warp to the values of its 32 lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ..machine.addresses import PARAMETER_WINDOW
from ..machine.hierarchy import Warp
from ..machine.lanes import LANE, LANES, register_dtype
from ..ptx.operands import Address, Immediate, Operand, Register, Sink, Special, Symbol
from ..ptx.program import Instruction, Program

Value: TypeAlias = Callable[[Warp], Any]


def constant(value: int, dtype: Any) -> Any:
    """Returns 32 lanes of an integer, cut to a type."""
    bits = 8 * np.dtype(dtype).itemsize
    if dtype is np.bool_:
        return np.full(LANES, value != 0)
    lanes = np.full(LANES, value & ((1 << bits) - 1), dtype)
    lanes.flags.writeable = False
    return lanes


def read(operand: Operand, kind: str, instruction: Instruction, program: Program) -> Value:
    """Returns the reader of an operand as a type, such as ``s32``.

    Raises:
        UnsupportedPtxError: If it is no such operand.
    """
    if isinstance(operand, Register):
        index = operand.number
        return lambda warp: warp.registers[index]
    if isinstance(operand, Immediate):
        lanes = constant(operand.value, register_dtype(kind))
        return lambda warp: lanes
    if isinstance(operand, Symbol):
        return _symbol(operand.name, kind, program)
    if isinstance(operand, Special):
        return _special(operand.name, instruction)
    raise instruction.unknown(f"operand {operand}")


def address(operand: Operand, kind: str, instruction: Instruction, program: Program) -> Value:
    """Returns the reader of an address, in 32 or 64 bits by ``kind``.

    Raises:
        UnsupportedPtxError: If the operand is no address.
    """
    if not isinstance(operand, Address):
        raise instruction.unknown(f"operand {operand}")
    base = read(operand.base, kind, instruction, program)
    if operand.offset == 0:
        return base
    dtype = register_dtype(kind)
    offset = dtype(operand.offset & ((1 << (8 * np.dtype(dtype).itemsize)) - 1))
    return lambda warp: base(warp) + offset


def destination(operand: Operand, instruction: Instruction) -> int | None:
    """Returns the index of the register that takes a result, or None for ``_``.

    Raises:
        UnsupportedPtxError: If the operand is no register.
    """
    if isinstance(operand, Sink):
        return None
    if not isinstance(operand, Register):
        raise instruction.unknown(f"result {operand}")
    return operand.number


def _symbol(name: str, kind: str, program: Program) -> Value:
    dtype = register_dtype(kind)
    if (parameter := program.parameter(name)) is not None:
        lanes = constant(PARAMETER_WINDOW + parameter.offset, dtype)
        return lambda warp: lanes
    offset = program.shared_symbols[name]
    return lambda warp: constant(warp.block.shared_base + offset, dtype)


_OF_BLOCK: dict[str, Callable[[Warp], tuple[int, int, int]]] = {
    "%ctaid": lambda warp: warp.block.index,
    "%nctaid": lambda warp: warp.block.cluster.grid.launch.grid,
    "%ntid": lambda warp: warp.block.cluster.grid.launch.block,
    "%cluster_ctaid": lambda warp: warp.block.place,
    "%cluster_nctaid": lambda warp: warp.block.cluster.grid.launch.cluster,
    "%clusterid": lambda warp: _ratio(warp.block.index, warp.block.cluster.grid.launch.cluster),
    "%nclusterid": lambda warp: _ratio(
        warp.block.cluster.grid.launch.grid, warp.block.cluster.grid.launch.cluster
    ),
}


def _ratio(of: tuple[int, int, int], by: tuple[int, int, int]) -> tuple[int, int, int]:
    return of[0] // by[0], of[1] // by[1], of[2] // by[2]


_OF_WARP: dict[str, Callable[[Warp], int]] = {
    "%cluster_ctarank": lambda warp: warp.block.rank,
    "%cluster_nctarank": lambda warp: len(warp.block.cluster.blocks),
    "%warpid": lambda warp: warp.index,
}


def _special(name: str, instruction: Instruction) -> Value:
    if name == "%laneid":
        return lambda warp: LANE
    if name in _OF_WARP:
        of_warp = _OF_WARP[name]
        return lambda warp: constant(of_warp(warp), np.uint32)
    base, _, axis = name.partition(".")
    if axis in ("x", "y", "z"):
        place = "xyz".index(axis)
        if base == "%tid":
            return lambda warp: _thread(warp, place)
        if base in _OF_BLOCK:
            of_block = _OF_BLOCK[base]
            return lambda warp: constant(of_block(warp)[place], np.uint32)
    raise instruction.unknown(f"special register {name}")


def _thread(warp: Warp, axis: int) -> Any:
    x, y, _ = warp.block.cluster.grid.launch.block
    number = LANE + np.uint32(warp.index * LANES)
    return (
        number % np.uint32(x),
        number // np.uint32(x) % np.uint32(y),
        number // np.uint32(x * y),
    )[axis]
