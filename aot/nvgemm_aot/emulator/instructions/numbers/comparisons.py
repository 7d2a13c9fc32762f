"""Comparisons and selection (PTX ISA, "Comparison and Selection Instructions")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...machine.lanes import chosen
from ...machine.meanings import Computation, Source
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Operand, Pair
from ..decoders import Qualifiers, decodes
from ..values import destination, source, storage_dtype
from .computing import computed
from .float_forms import PACKED, flushed, unpacked

_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}

_LOGIC: dict[str, Callable[..., Any]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}

_BITS = ("b16", "b32", "b64")
_INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
_FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")


def _comparison(qualifiers: Qualifiers, instruction: Instruction) -> tuple[str, str | None, bool]:
    """Reads the comparison, how it is joined with a predicate, and whether subnormals are zero."""
    name = qualifiers.one_of(*_COMPARE, *_UNSIGNED, *_UNORDERED, "num", "nan")
    joined = qualifiers.option(*_LOGIC)
    return name, joined, qualifiers.flag("ftz")


def _compares(
    name: str, kind: str, flushes: bool, instruction: Instruction
) -> Callable[[Any, Any], Any]:
    """Returns the function that compares lanes of a type.

    Raises:
        UnsupportedPtxError: If the type has no such comparison.
    """
    if kind in _FLOATS:
        if flushes and kind in ("f64", "bf16", "bf16x2"):
            raise instruction.unknown("qualifier .ftz")
        return _compares_floats(name, kind, flushes, instruction)
    allowed = (
        ("eq", "ne")
        if kind in _BITS
        else (*_COMPARE, *_UNSIGNED)
        if kind[0] == "u"
        else tuple(_COMPARE)
    )
    if name not in allowed or flushes:
        raise instruction.unknown(f"comparison .{'ftz' if flushes else name} of .{kind}")
    return _COMPARE[_UNSIGNED.get(name, name)]


def _compares_floats(
    name: str, kind: str, flushes: bool, instruction: Instruction
) -> Callable[[Any, Any], Any]:
    if name in _UNSIGNED:
        raise instruction.unknown(f"comparison .{name} of .{kind}")
    widen = unpacked(kind)

    def function(a: Any, b: Any) -> Any:
        a, b = widen(a), widen(b)
        if flushes:
            a, b = flushed(a, kind), flushed(b, kind)
        unordered = np.isnan(a) | np.isnan(b)
        if name == "nan":
            return unordered
        if name == "num":
            return ~unordered
        if name in _UNORDERED:
            return _COMPARE[_UNORDERED[name]](a, b) | unordered
        # Ordered "ne" is false for a NaN, unlike numpy's.
        return _COMPARE[name](a, b) & ~unordered if name == "ne" else _COMPARE[name](a, b)

    return function


@decodes("setp")
def _set_predicate(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    name, joined, flushes = _comparison(qualifiers, instruction)
    kind = qualifiers.one_of(*_BITS, *_INTEGERS, *_FLOATS)
    qualifiers.end()
    compare = _compares(name, kind, flushes, instruction)
    result, *operands = instruction.operands
    if len(operands) != (3 if joined else 2):
        raise instruction.unknown(f"a number of {len(operands) + 1} operands")
    sources = [source(operand, kind, instruction, program) for operand in operands[:2]]
    if joined:
        sources.append(source(operands[2], "pred", instruction, program))
    logic = _LOGIC[joined] if joined else None
    if kind in PACKED:
        return _halves(instruction, result, sources, compare, logic)
    if not isinstance(result, Pair):
        function = compare if logic is None else _joined(compare, logic)
        return Computation(
            function=function,
            sources=tuple(sources),
            results=(destination(result, instruction, "pred"),),
        )

    def both(a: Any, b: Any, c: Any = None) -> Any:
        holds = compare(a, b)
        return (holds, ~holds) if logic is None else (logic(holds, c), logic(~holds, c))

    return Computation(function=both, sources=tuple(sources), results=_pair(result, instruction))


def _joined(compare: Callable[..., Any], logic: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, c: logic(compare(a, b), c)


def _pair(result: Pair, instruction: Instruction) -> tuple[int | None, int | None]:
    return (
        destination(result.first, instruction, "pred"),
        destination(result.second, instruction, "pred"),
    )


def _halves(
    instruction: Instruction,
    result: Operand,
    sources: list[Source],
    compare: Callable[[Any, Any], Any],
    logic: Callable[..., Any] | None,
) -> Computation:
    """Compares two values a lane; each has a predicate of its own."""
    if not isinstance(result, Pair):
        raise instruction.unknown(f"result {result}")

    def function(a: Any, b: Any, c: Any = None) -> Any:
        holds = compare(a, b).reshape(-1, 2)
        found = [np.ascontiguousarray(holds[:, half]) for half in range(2)]
        return tuple(found if logic is None else [logic(each, c) for each in found])

    return Computation(
        function=function, sources=tuple(sources), results=_pair(result, instruction)
    )


@decodes("set")
def _set(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    name, joined, flushes = _comparison(qualifiers, instruction)
    result = qualifiers.one_of("u32", "s32", "f32", "u16", "f16", "bf16")
    kind = qualifiers.one_of(*_BITS, *_INTEGERS, "f16", "bf16", "f32", "f64")
    qualifiers.end()
    compare = _compares(name, kind, flushes, instruction)
    true = _TRUE.get(result)
    stored = storage_dtype(result)
    if true is None:
        true = (1 << (8 * np.dtype(stored).itemsize)) - 1
    values = np.array([0, true], stored)

    def function(a: Any, b: Any, c: Any = None) -> Any:
        holds = compare(a, b)
        return values[(holds if joined is None else _LOGIC[joined](holds, c)).astype(np.int64)]

    kinds = [kind, kind, *(["pred"] if joined else [])]
    return computed(instruction, program, function, result, *kinds, raw=True)


_TRUE = {"f32": 0x3F80_0000, "f16": 0x3C00, "bf16": 0x3F80}
"""Bits of 1 in floating-point results; integer results have all bits set."""


@decodes("selp")
def _select(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    kind = qualifiers.one_of(*_BITS, *_INTEGERS, "f32", "f64")
    qualifiers.end()
    if len(instruction.operands) != 4:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    result, first, second, condition = instruction.operands
    operands = (result, condition, first, second)
    return computed(instruction, program, chosen, kind, "pred", kind, kind, operands=operands)


@decodes("slct")
def _select_by_sign(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    flushes = qualifiers.flag("ftz")
    kind = qualifiers.one_of(*_BITS, *_INTEGERS, "f32", "f64")
    sign = qualifiers.one_of("f32") if flushes else qualifiers.one_of("s32", "f32")
    qualifiers.end()

    def function(a: Any, b: Any, c: Any) -> Any:
        if flushes:
            c = flushed(c, "f32")
        return np.where(c >= 0, a, b)

    return computed(instruction, program, function, kind, kind, kind, sign)


@decodes("testp")
def _test_float(instruction: Instruction, program: Program) -> Computation:
    qualifiers = Qualifiers(instruction)
    test = qualifiers.one_of("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    kind = qualifiers.one_of("f32", "f64")
    qualifiers.end()
    least = np.finfo(np.float32 if kind == "f32" else np.float64).tiny

    def function(a: Any) -> Any:
        small = np.abs(a) < least
        return {
            "finite": np.isfinite(a),
            "infinite": np.isinf(a),
            "number": ~np.isnan(a),
            "notanumber": np.isnan(a),
            "normal": np.isfinite(a) & ~small,
            "subnormal": small & (a != 0),
        }[test]

    return computed(instruction, program, function, "pred", kind)
