"""Reads operands: the values of a warp's 32 lanes, as the types that instructions name."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ..machine.addresses import PARAMETER_WINDOW
from ..machine.hierarchy import Warp
from ..machine.lanes import LANE, LANES, register_dtype
from ..machine.launch import Extent
from ..machine.meanings import Source, Value, lanes_of
from ..ptx.program import Instruction, Program
from ..ptx.ptx_operands import Address, Immediate, Negated, Operand, Register, Sink, Special, Symbol

BITS = {"pred": 1, "bf16": 16, "bf16x2": 32, "f16x2": 32, "f32x2": 64, "b128": 128, "tf32": 32} | {
    f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)
}
"""Width of types in bits."""

_NATURAL: dict[str, Any] = {
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (16, 32, 64)},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "tf32": np.float32,
}
"""numpy types by which values are computed, if not those of registers."""


def natural_dtype(kind: str) -> Any:
    """Returns the numpy type of a PTX type's values: signed or floating, or a register's type."""
    return _NATURAL.get(kind) or storage_dtype(kind)


def storage_dtype(kind: str) -> Any:
    """Returns the numpy type of registers that hold a PTX type; of ``b128``, of its halves."""
    if kind == "pred":
        return np.bool_
    return {8: np.uint16, 16: np.uint16, 32: np.uint32}.get(BITS[kind], np.uint64)


@functools.lru_cache(maxsize=4096)
def constant(value: int, dtype: Any) -> Any:
    """Returns 32 lanes of an integer, cut to a type."""
    bits = 8 * np.dtype(dtype).itemsize
    whole = value != 0 if dtype is np.bool_ else value & ((1 << bits) - 1)
    lanes = np.full(LANES, whole, dtype)
    lanes.flags.writeable = False
    return lanes


def source(
    operand: Operand,
    kind: str,
    instruction: Instruction,
    program: Program,
    *,
    wider: bool = False,
) -> Source:
    """Returns an operand as a type's values, such as int32 for ``s32``.

    Args:
        operand: The operand.
        kind: The type.
        instruction: The instruction that has it.
        program: The program that has that.
        wider: True if a register may be wider than the type, as with ``st`` and ``cvt``.

    Raises:
        UnsupportedPtxError: If it is no such operand.
    """
    dtype = natural_dtype(kind)
    view = None if dtype is storage_dtype(kind) else dtype
    if isinstance(operand, Register):
        if BITS[operand.type] == BITS[kind] or (BITS[kind] == 8 and operand.type.endswith("16")):
            return Source(register=operand.number, view=view)
        if wider and kind != "pred" and BITS[kind] < BITS[operand.type] <= 64:
            return Source(register=operand.number, view=view, narrow=storage_dtype(kind))
        raise instruction.unknown(f"register {operand.name} of type .{operand.type} as .{kind}")
    if isinstance(operand, Immediate) and kind != "b128":
        return Source(lanes=_literal(operand, kind, instruction))
    if isinstance(operand, Negated) and kind == "pred":
        number = operand.register.number
        return Source(value=lambda warp: ~warp.registers[number])
    if isinstance(operand, Symbol):
        return Source(value=_symbol(operand.name, kind, program))
    if isinstance(operand, Special):
        return _special(operand.name, kind, instruction)
    raise instruction.unknown(f"operand {operand}")


def read(operand: Operand, kind: str, instruction: Instruction, program: Program) -> Value:
    """Returns the reader of an operand, whose lanes have a register's type (unsigned, or bool).

    Raises:
        UnsupportedPtxError: If it is no such operand.
    """
    if isinstance(operand, Register):
        index = operand.number
        return lambda warp: warp.registers[index]
    dtype = storage_dtype(kind)
    found = source(operand, kind, instruction, program)
    if found.lanes is not None:
        lanes = found.lanes.view(dtype)
        return lambda warp: lanes
    return lanes_of(found)


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


def destination(operand: Operand, instruction: Instruction, kind: str | None = None) -> int | None:
    """Returns the index of the register that takes a result, or None for ``_``.

    Args:
        operand: The operand.
        instruction: The instruction that has it.
        kind: Type of the result, whose width the register must have; None checks nothing.

    Raises:
        UnsupportedPtxError: If the operand is no such register.
    """
    if isinstance(operand, Sink):
        return None
    if not isinstance(operand, Register):
        raise instruction.unknown(f"result {operand}")
    if kind is not None and BITS[operand.type] not in (
        BITS[kind],
        16 if BITS[kind] == 8 else BITS[kind],
    ):
        raise instruction.unknown(f"result {operand.name} of type .{operand.type} for .{kind}")
    return operand.number


def float_bits(operand: Immediate, kind: str, instruction: Instruction) -> int:
    """Returns the bits of a constant as a floating-point type.

    Raises:
        UnsupportedPtxError: If the constant is no float of this type.
    """
    if kind == "f64" and operand.float_bits == 64:
        return operand.value
    if kind in ("f32", "tf32") and operand.float_bits == 32:
        return operand.value
    if kind == "f32" and operand.float_bits == 64:
        (value,) = struct.unpack("<d", operand.value.to_bytes(8, "little"))
        return int(np.float32(value).view(np.uint32))
    raise instruction.unknown(f"constant {operand.value:#x} as .{kind}")


def _literal(operand: Immediate, kind: str, instruction: Instruction) -> Any:
    dtype = natural_dtype(kind)
    if kind in ("f32", "f64", "tf32"):
        bits = float_bits(operand, kind, instruction)
        return constant(bits, storage_dtype(kind)).view(dtype)
    if kind in ("f16", "bf16", "f16x2", "bf16x2", "f32x2") and operand.float_bits:
        raise instruction.unknown(f"constant {operand.value:#x} as .{kind}")
    if operand.float_bits and BITS[kind] != operand.float_bits:
        raise instruction.unknown(f"constant {operand.value:#x} as .{kind}")
    return constant(operand.value, storage_dtype(kind)).view(dtype)


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


def _dynamic_shared_bytes(warp: Warp) -> int:
    return warp.block.cluster.grid.launch.shared_bytes


_OF_WARP: dict[str, Callable[[Warp], int]] = {
    "%cluster_ctarank": lambda warp: warp.block.rank,
    "%cluster_nctarank": lambda warp: len(warp.block.cluster.blocks),
    "%warpid": lambda warp: warp.index,
    "%nwarpid": lambda warp: len(warp.block.warps),
    "%is_explicit_cluster": lambda warp: 1,
    "%dynamic_smem_size": _dynamic_shared_bytes,
    "%total_smem_size": lambda warp: len(warp.block.shared),
}

_MASKS_BY_LANE: dict[str, Callable[[int], int]] = {
    "%lanemask_eq": lambda lane: 1 << lane,
    "%lanemask_lt": lambda lane: (1 << lane) - 1,
    "%lanemask_le": lambda lane: (2 << lane) - 1,
    "%lanemask_gt": lambda lane: -(2 << lane),
    "%lanemask_ge": lambda lane: -(1 << lane),
}
_LANE_MASKS = {
    name: np.array([mask(lane) & 0xFFFF_FFFF for lane in range(LANES)], np.uint32)
    for name, mask in _MASKS_BY_LANE.items()
}


def _special(name: str, kind: str, instruction: Instruction) -> Source:
    if name == "%is_explicit_cluster" and kind == "pred":
        return Source(lanes=np.ones(LANES, bool))
    if BITS[kind] != 32:
        raise instruction.unknown(f"special register {name} as .{kind}")
    if name == "%laneid":
        return Source(lanes=LANE)
    if name in _LANE_MASKS:
        return Source(lanes=_LANE_MASKS[name])
    if name in _OF_WARP:
        of_warp = _OF_WARP[name]
        return Source(value=lambda warp: constant(of_warp(warp), np.uint32))
    base, _, axis = name.partition(".")
    if axis in ("x", "y", "z"):
        place = "xyz".index(axis)
        if base == "%tid":
            return Source(
                value=lambda warp: _threads(warp.index, warp.block.cluster.grid.launch.block, place)
            )
        if base in _OF_BLOCK:
            of_block = _OF_BLOCK[base]
            return Source(value=lambda warp: constant(of_block(warp)[place], np.uint32))
    raise instruction.unknown(f"special register {name}")


@functools.lru_cache(maxsize=4096)
def _threads(warp: int, block: Extent, axis: int) -> Any:
    """Returns the places of a warp's threads in a block along an axis."""
    x, y, _ = block
    number = LANE + np.uint32(warp * LANES)
    threads = (
        number % np.uint32(x),
        number // np.uint32(x) % np.uint32(y),
        number // np.uint32(x * y),
    )[axis]
    threads.flags.writeable = False
    return threads
