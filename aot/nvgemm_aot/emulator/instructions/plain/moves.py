"""Moves, packing of vectors, and addresses (PTX ISA, "mov", "cvta", "mapa", "isspacep")."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...machine.addresses import (
    OFFSET_MASK,
    PARAMETER_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    WINDOW_SHIFT,
)
from ...machine.lanes import LANES, same
from ...machine.meanings import Computation, Source
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Vector
from ..decoders import Qualifiers, decodes
from ..numbers.computing import computed
from ..values import BITS, destination, source, storage_dtype

_KINDS = (
    "pred",
    *(f"{kind}{bits}" for bits in (16, 32, 64) for kind in "bus"),
    "f32",
    "f64",
    "f16",
    "bf16",
    "b128",
)


@decodes("mov")
def _move(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of(*_KINDS)
    qualifiers.end()
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    result, operand = instruction.operands
    if isinstance(operand, Vector):
        return _pack(instruction, program, kind, operand)
    if isinstance(result, Vector):
        return _unpack(instruction, program, kind, result)
    bits = kind if kind == "pred" or kind == "b128" else f"b{BITS[kind]}"
    if kind == "b128":
        return Computation(
            function=same,
            sources=(source(operand, kind, instruction, program),),
            results=(destination(result, instruction, kind),),
            pairs=True,
        )
    if kind in ("f32", "f64"):
        return computed(instruction, program, _same_bits, kind, kind, raw=True)
    return computed(instruction, program, same, bits, bits, raw=True)


def _same_bits(value: Any) -> Any:
    return value.view(np.dtype(f"u{value.itemsize}").type)


def _part(instruction: Instruction, kind: str, vector: Vector) -> str:
    """Returns the type of a vector's elements.

    Raises:
        UnsupportedPtxError: If the type cannot be cut so.
    """
    bits = BITS[kind] // len(vector.elements)
    if kind[0] != "b" or BITS[kind] % len(vector.elements) or bits not in (8, 16, 32, 64):
        raise instruction.unknown(f"a vector of {len(vector.elements)} as .{kind}")
    if bits == 8 and BITS[kind] != 32:
        raise instruction.unknown(f"a vector of {len(vector.elements)} as .{kind}")
    return f"b{bits}"


def _pack(instruction: Instruction, program: Program, kind: str, vector: Vector) -> Computation:
    part = _part(instruction, kind, vector)
    sources = tuple(source(each, part, instruction, program) for each in vector.elements)
    count, bits = len(sources), BITS[part]
    register = destination(instruction.operands[0], instruction, kind)
    if kind == "b128":
        narrow = np.dtype(f"u{bits // 8}").type

        def into_pairs(*values: Any) -> Any:
            return np.stack(values, 1).astype(narrow, copy=False).view(np.uint64)

        return Computation(function=into_pairs, sources=sources, results=(register,), pairs=True)
    dtype = storage_dtype(kind)
    if count == 2 and bits > 8:
        half = np.dtype(f"u{bits // 8}").type

        def two(low: Any, high: Any) -> Any:
            pairs = np.empty((LANES, 2), half)
            pairs[:, 0], pairs[:, 1] = low, high
            return pairs.view(dtype)[:, 0]

        return Computation(function=two, sources=sources, results=(register,))

    def several(*values: Any) -> Any:
        found = np.zeros(32, dtype)
        for place, value in enumerate(values):
            low = value.astype(dtype) & dtype((1 << bits) - 1)
            found = found | low << dtype(bits * place)
        return found

    return Computation(function=several, sources=sources, results=(register,))


def _unpack(instruction: Instruction, program: Program, kind: str, vector: Vector) -> Computation:
    part = _part(instruction, kind, vector)
    bits = BITS[part]
    results = tuple(destination(each, instruction, part) for each in vector.elements)
    stored = storage_dtype(part)
    cut = np.dtype(f"u{bits // 8}").type
    whole = source(instruction.operands[1], kind, instruction, program)

    count = len(results)

    def unpacked(value: Any) -> Any:
        parts = value.view(cut).reshape(-1)
        return [
            None if register is None else parts[place::count].astype(stored)
            for place, register in enumerate(results)
        ]

    if len(results) == 1:
        raise instruction.unknown("a vector of 1")
    return Computation(function=unpacked, sources=(whole,), results=results)


@decodes("cvta")
def _convert_address(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    specific = qualifiers.flag("to")
    space = qualifiers.one_of(
        "global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const"
    )
    kind = qualifiers.one_of("u64")
    qualifiers.end()
    if not space.startswith("shared"):
        # Global and parameter addresses are the same in generic space.
        return computed(instruction, program, same, kind, kind)
    window = np.uint64(SHARED_WINDOW)
    if specific:
        return computed(instruction, program, lambda value: value - window, kind, kind)
    return computed(instruction, program, lambda value: value + window, kind, kind)


@decodes("isspacep")
def _in_space(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    space = qualifiers.one_of(
        "global",
        "shared",
        "shared::cta",
        "shared::cluster",
        "param",
        "param::entry",
        "local",
        "const",
    )
    qualifiers.end()
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")

    def function(value: Any, rank: int) -> Any:
        window = value >> np.uint64(WINDOW_SHIFT)
        shared = window == np.uint64(SHARED_WINDOW >> WINDOW_SHIFT)
        parameter = window == np.uint64(PARAMETER_WINDOW >> WINDOW_SHIFT)
        if space == "shared::cluster":
            return shared
        if space.startswith("shared"):
            offset = value & np.uint64(0xFFFF_FFFF)
            return shared & (offset >> np.uint64(RANK_SHIFT) == np.uint64(rank))
        if space.startswith("param"):
            return parameter
        if space == "global":
            return ~(shared | parameter)
        return np.zeros(len(value), bool)

    result, operand = instruction.operands
    return Computation(
        function=function,
        sources=(
            source(operand, "u64", instruction, program),
            Source(value=lambda warp: warp.block.rank),
        ),
        results=(destination(result, instruction, "pred"),),
    )


@decodes("mapa", "getctarank")
def _map_address(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    space = qualifiers.option("shared::cluster")
    kind = qualifiers.one_of("u32", "u64")
    qualifiers.end()
    window = 0 if space else SHARED_WINDOW
    if not space and kind == "u32":
        raise instruction.unknown("generic address in 32 bits")
    maps = instruction.opcode == "mapa"
    if len(instruction.operands) != (3 if maps else 2):
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    dtype = storage_dtype(kind)
    result, *operands = instruction.operands

    def rank_of(address: Any) -> Any:
        return ((address - dtype(window)) >> dtype(RANK_SHIFT)).astype(np.uint32)

    def mapped(address: Any, rank: Any) -> Any:
        # Lanes may give ranks that no block has, as long as they do not use such an address.
        offset = (address - dtype(window)) & dtype(OFFSET_MASK)
        return (offset | rank.astype(dtype) << dtype(RANK_SHIFT)) + dtype(window)

    first = source(operands[0], kind, instruction, program)
    if not maps:
        return Computation(
            function=rank_of,
            sources=(first,),
            results=(destination(result, instruction, "u32"),),
        )
    return Computation(
        function=mapped,
        sources=(
            first,
            source(operands[1], "u32", instruction, program),
        ),
        results=(destination(result, instruction, kind),),
    )
