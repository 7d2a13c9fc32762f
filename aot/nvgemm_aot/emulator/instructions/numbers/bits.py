"""Bits: logic, shifts and fields (PTX ISA, "Logic and Shift Instructions")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...machine.lanes import LANES
from ...machine.meanings import Computation, Source
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Immediate
from ..decoders import Qualifiers, decodes
from ..values import BITS, destination, natural_dtype, source, storage_dtype
from .computing import computed

_LOGIC: dict[str, Callable[..., Any]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@decodes(*_LOGIC)
def _logic(instruction: Instruction, program: Program) -> Computation:
    kind = _kind(instruction, "pred", "b16", "b32", "b64")
    return computed(instruction, program, _LOGIC[instruction.opcode], kind, kind, kind)


@decodes("not")
def _not(instruction: Instruction, program: Program) -> Computation:
    kind = _kind(instruction, "pred", "b16", "b32", "b64")
    return computed(instruction, program, np.invert, kind, kind)


@decodes("cnot")
def _zero_to_one(instruction: Instruction, program: Program) -> Computation:
    kind = _kind(instruction, "b16", "b32", "b64")
    dtype = storage_dtype(kind)
    return computed(instruction, program, lambda a: (a == 0).astype(dtype), kind, kind)


@decodes("shl", "shr")
def _shift(instruction: Instruction, program: Program) -> Computation:
    left = instruction.opcode == "shl"
    kinds = ("b16", "b32", "b64") if left else ("b16", "b32", "b64", *_INTEGERS)
    kind = _kind(instruction, *kinds)
    dtype, bits = natural_dtype(kind), BITS[kind]
    shifted = np.left_shift if left else np.right_shift
    signed = kind[0] == "s"
    result, value, by = instruction.operands
    if isinstance(by, Immediate) and 0 <= by.value < bits:
        return Computation(
            function=shifted,
            sources=(
                source(value, kind, instruction, program),
                Source(lanes=np.full(LANES, by.value, dtype)),
            ),
            results=(destination(result, instruction, kind),),
            view=None if dtype is storage_dtype(kind) else storage_dtype(kind),
        )

    def function(a: Any, amount: Any) -> Any:
        found = shifted(a, np.minimum(amount, bits - 1).astype(dtype))
        return found if signed else np.where(amount < bits, found, dtype(0))

    return computed(instruction, program, function, kind, kind, "u32")


_INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")


def _kind(instruction: Instruction, *kinds: str) -> str:
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of(*kinds)
    qualifiers.end()
    return kind


@decodes("shf")
def _funnel_shift(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    left = qualifiers.one_of("l", "r") == "l"
    wraps = qualifiers.one_of("clamp", "wrap") == "wrap"
    kind = qualifiers.one_of("b32")
    qualifiers.end()

    def function(low: Any, high: Any, amount: Any) -> Any:
        both = low.astype(np.uint64) | high.astype(np.uint64) << 32
        by = (amount & 31 if wraps else np.minimum(amount, 32)).astype(np.uint64)
        return ((both << by) >> 32 if left else both >> by).astype(np.uint32)

    return computed(instruction, program, function, kind, kind, kind, "u32")


@decodes("lop3")
def _any_logic(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of("b32")
    qualifiers.end()
    if len(instruction.operands) != 5:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    *operands, table = instruction.operands
    if not isinstance(table, Immediate) or not 0 <= table.value <= 0xFF:
        raise instruction.unknown(f"table {table}")
    terms = [place for place in range(8) if table.value >> place & 1]

    def function(a: Any, b: Any, c: Any) -> Any:
        found = np.zeros_like(a)
        for term in terms:
            found = found | (
                (a if term & 4 else ~a) & (b if term & 2 else ~b) & (c if term & 1 else ~c)
            )
        return found

    return computed(instruction, program, function, kind, kind, kind, kind, operands=operands)


@decodes("prmt")
def _permute_bytes(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of("b32")
    mode = qualifiers.option(*_PERMUTATIONS)
    qualifiers.end()

    def function(a: Any, b: Any, selector: Any) -> Any:
        pool = np.stack([a, b], 1).view(np.uint8)
        if mode is None:
            nibbles = (selector[:, None] >> _NIBBLES) & 15
        else:
            nibbles = _PERMUTATIONS[mode][selector & 3]
        chosen = np.take_along_axis(pool, (nibbles & 7).astype(np.int64), 1)
        signs = np.where(chosen & 0x80, np.uint8(0xFF), np.uint8(0))
        return np.where(nibbles & 8, signs, chosen).astype(np.uint8).view(np.uint32)[:, 0]

    return computed(instruction, program, function, kind, kind, kind, kind)


_NIBBLES = np.array([0, 4, 8, 12], np.uint32)

_PERMUTATIONS = {
    "f4e": np.array([[n + i for i in range(4)] for n in range(4)]),
    "b4e": np.array([[(n - i) % 8 for i in range(4)] for n in range(4)]),
    "rc8": np.array([[n] * 4 for n in range(4)]),
    "ecl": np.array([[max(n, i) for i in range(4)] for n in range(4)]),
    "ecr": np.array([[min(n, i) for i in range(4)] for n in range(4)]),
    "rc16": np.array([[0, 1, 0, 1], [2, 3, 2, 3]] * 2),
}
"""Bytes that the modes choose, by the selector's low bits (PTX ISA, "prmt")."""


@decodes("bfe")
def _extract_field(instruction: Instruction, program: Program) -> Computation:
    kind = _kind(instruction, "u32", "u64", "s32", "s64")
    bits, signed = BITS[kind], kind[0] == "s"

    def function(a: Any, position: Any, length: Any) -> Any:
        found = []
        for value, begin, size in _rows(a, position & 255, length & 255):
            # A field past the end repeats the sign, or zeros.
            sign = value >> min(begin + size - 1, bits - 1) & 1 if signed and size else 0
            whole = (value & ((1 << bits) - 1)) | (-sign << bits)
            field = whole >> begin & ((1 << size) - 1)
            found.append(field - (sign << size) if sign else field)
        return _lanes(found, kind)

    return computed(instruction, program, function, kind, kind, "u32", "u32")


@decodes("bfi")
def _insert_field(instruction: Instruction, program: Program) -> Computation:
    kind = _kind(instruction, "b32", "b64")
    bits = BITS[kind]

    def function(a: Any, b: Any, position: Any, length: Any) -> Any:
        found = []
        for field, into, begin, size in _rows(a, b, position & 255, length & 255):
            mask = ((1 << size) - 1 << begin) & ((1 << bits) - 1)
            found.append(into & ~mask | field << begin & mask)
        return _lanes(found, kind)

    return computed(instruction, program, function, kind, kind, kind, "u32", "u32")


def _rows(*values: Any) -> Any:
    return zip(*(value.tolist() for value in values))


def _lanes(values: list[int], kind: str) -> Any:
    """Makes lanes of integers, cut to the type's bits."""
    mask = (1 << BITS[kind]) - 1
    return np.array([value & mask for value in values], storage_dtype(kind)).view(
        natural_dtype(kind)
    )


@decodes("bfind")
def _find_high_bit(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    distance = qualifiers.flag("shiftamt")
    kind = qualifiers.one_of("u32", "u64", "s32", "s64")
    qualifiers.end()
    bits = BITS[kind]

    def function(a: Any) -> Any:
        found = []
        for value in a.tolist():
            length = (value if value >= 0 else ~value).bit_length()
            found.append(-1 if not length else bits - length if distance else length - 1)
        return _lanes(found, "u32")

    return computed(instruction, program, function, "u32", kind)


@decodes("popc", "clz")
def _count_bits(instruction: Instruction, program: Program) -> Computation:
    kind = _kind(instruction, "b32", "b64")
    bits = BITS[kind]
    count: Callable[[int], int] = (
        int.bit_count if instruction.opcode == "popc" else lambda value: bits - value.bit_length()
    )

    def function(a: Any) -> Any:
        return np.array([count(value) for value in a.tolist()], np.uint32)

    return computed(instruction, program, function, "u32", kind)


@decodes("brev")
def _reverse_bits(instruction: Instruction, program: Program) -> Computation:
    kind = _kind(instruction, "b32", "b64")
    size = BITS[kind] // 8

    def function(a: Any) -> Any:
        backwards = _REVERSED[a.view(np.uint8).reshape(-1, size)[:, ::-1]]
        return np.ascontiguousarray(backwards).view(a.dtype)[:, 0]

    return computed(instruction, program, function, kind, kind)


_REVERSED = np.array([int(f"{value:08b}"[::-1], 2) for value in range(256)], np.uint8)


@decodes("bmsk")
def _bit_mask(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    wraps = qualifiers.one_of("clamp", "wrap") == "wrap"
    kind = qualifiers.one_of("b32")
    qualifiers.end()

    def function(begin: Any, size: Any) -> Any:
        found = []
        for first, length in _rows(begin, size):
            if wraps:
                first, length = first & 31, length & 31
            found.append(((1 << min(length, 32)) - 1) << first if first < 32 else 0)
        return _lanes(found, "u32")

    return computed(instruction, program, function, kind, "u32", "u32")


@decodes("szext")
def _extend(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    wraps = qualifiers.one_of("clamp", "wrap") == "wrap"
    kind = qualifiers.one_of("u32", "s32")
    qualifiers.end()
    signed = kind == "s32"

    def function(a: Any, size: Any) -> Any:
        found = []
        for value, length in _rows(a.view(np.uint32), size):
            length = length & 31 if wraps else min(length, 32)
            cut = value & ((1 << length) - 1)
            sign = signed and length and cut >> (length - 1) & 1
            found.append(cut - (1 << length) if sign else cut)
        return _lanes(found, kind)

    return computed(instruction, program, function, kind, kind, "u32")


@decodes("sad")
def _sum_of_difference(instruction: Instruction, program: Program) -> Computation:
    kind = _kind(instruction, *_INTEGERS)
    result = kind.replace("s", "u")

    def function(a: Any, b: Any, c: Any) -> Any:
        return (np.maximum(a, b) - np.minimum(a, b)).view(c.dtype) + c

    return computed(instruction, program, function, result, kind, kind, result)


@decodes("dp4a")
def _dot_product(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    types = (qualifiers.one_of("u32", "s32"), qualifiers.one_of("u32", "s32"))
    qualifiers.end()
    parts = [np.int8 if kind == "s32" else np.uint8 for kind in types]
    result = "u32" if types == ("u32", "u32") else "s32"

    def function(a: Any, b: Any, c: Any) -> Any:
        left, right = (
            value.view(part).reshape(-1, 4).astype(np.int64) for value, part in zip((a, b), parts)
        )
        return (c + (left * right).sum(1)).astype(np.uint32).view(c.dtype)

    return computed(instruction, program, function, result, "b32", "b32", result)
