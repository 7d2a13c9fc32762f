"""Multiplications of a warp group (PTX ISA, "wgmma.mma_async").

A result is the sum of its products and of what it adds to, rounded once. Tensor cores may round
differently where that sum is not exact.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Block, Warp
from ...machine.lanes import LANES, Mask
from ...machine.meanings import RETRY, Step, Value, going_on
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Immediate, Operand, Register, Vector
from ..asynchronous.late_effects import check_running, later
from ..asynchronous.tensor_map import Swizzle
from ..decoders import Qualifiers, decodes
from ..values import BITS, read
from .element_formats import BF16, F16, FLOAT8, INTEGER8, TF32, ElementFormat, Values
from .matrix_descriptor import MatrixDescriptor, chunks_of_matrix, read_matrix
from .warp_group import WARPS, Multiplication, Sums, group_of

TARGET = "sm_90a"
"""The only architecture with warp groups (PTX ISA, "wgmma.mma_async", "Target ISA Notes")."""

ROWS = 64
_FRAGMENT = 4
"""Registers of a thread that hold A."""

FORMATS: dict[str, ElementFormat] = {
    "f16": F16,
    "bf16": BF16,
    "tf32": TF32,
    "e4m3": FLOAT8[0],
    "e5m2": FLOAT8[1],
    "u8": INTEGER8[0],
    "s8": INTEGER8[1],
}

ACCUMULATORS = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f16", "f32"),
    "e5m2": ("f16", "f32"),
    "u8": ("s32",),
    "s8": ("s32",),
}
"""Types of D by that of A."""

PARTNERS = {"e4m3": ("e4m3", "e5m2"), "e5m2": ("e4m3", "e5m2"), "u8": ("u8", "s8")}
PARTNERS["s8"] = PARTNERS["u8"]
"""Types of B by that of A, if it may be another one."""

_SWIZZLES = (Swizzle.NONE, Swizzle.ROWS_128, Swizzle.ROWS_64, Swizzle.ROWS_32)
"""By bits 62 and 63 of a descriptor (PTX ISA, "Matrix Descriptor Format")."""


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """Types and sizes, and how operands are read."""

    n: int
    k: int
    a: ElementFormat
    b: ElementFormat
    accumulator: str
    saturates: bool
    signs: tuple[int, int]
    transposes: tuple[bool, bool]
    a_in_registers: bool

    @property
    def registers(self) -> int:
        """Accumulators of a thread."""
        return self.n // (4 if self.accumulator == "f16" else 2)


@functools.lru_cache(maxsize=4096)
def _descriptor(word: int) -> MatrixDescriptor:
    return MatrixDescriptor(
        start=(word & 0x3FFF) << 4,
        leading=(word >> 16 & 0x3FFF) << 4,
        stride=(word >> 32 & 0x3FFF) << 4,
        base=word >> 49 & 7,
        swizzle=_SWIZZLES[word >> 62],
    )


@decodes("wgmma.mma_async")
def _multiply(instruction: Instruction, program: Program) -> Step:
    _check_target(instruction, program)
    shape, registers, fragment, words = _decode(instruction, program)
    numbers = tuple(each.number for each in registers)
    fragment_numbers = tuple(each.number for each in fragment)
    names = [each.name for each in (*registers, *fragment)]

    def step(warp: Warp, mask: Mask) -> None:
        check_lanes(mask)
        operands = tuple(_uniform(word(warp)) for word in words)
        group = group_of(warp)
        last = group.issue(warp, instruction, operands, numbers, fragment_numbers, names)
        warp.block.cluster.grid.progress += 1
        if last is not None:
            later(warp, instruction, group, lambda: _run(last, shape, group.block))

    return step


def _decode(
    instruction: Instruction, program: Program
) -> tuple[_Shape, list[Register], list[Register], list[Value]]:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("mma_async")
    if qualifiers.flag("sp"):
        raise instruction.unknown("a sparse matrix (.sp)")
    qualifiers.one_of("sync")
    qualifiers.one_of("aligned")
    size = qualifiers.next()
    saturates = qualifiers.flag("satfinite")
    accumulator = qualifiers.one_of("f16", "f32", "s32")
    kind = qualifiers.one_of(*FORMATS)
    partner = qualifiers.one_of(*PARTNERS.get(kind, (kind,)))
    qualifiers.end()
    if accumulator not in ACCUMULATORS[kind] or (saturates and accumulator != "s32"):
        raise instruction.unknown(f"D of .{accumulator} for A of .{kind}")
    k = 2 * FORMATS[kind].chunk_elements
    n = _columns(size, k, accumulator, instruction)
    d, a, b, accumulates, *constants = instruction.operands
    in_registers = isinstance(a, Vector)
    signs, transposes = _constants(
        constants, accumulator, kind, instruction, in_registers=in_registers
    )
    shape = _Shape(
        n=n,
        k=k,
        a=FORMATS[kind],
        b=FORMATS[partner],
        accumulator=accumulator,
        saturates=saturates,
        a_in_registers=in_registers,
        signs=signs,
        transposes=transposes,
    )
    registers = registers_of(d, shape.registers, instruction)
    fragment = registers_of(a, _FRAGMENT, instruction) if in_registers else []
    words = [
        read(each, kind_of, instruction, program)
        for each, kind_of in ((a, "b64"), (b, "b64"), (accumulates, "pred"))
        if each is not a or not in_registers
    ]
    return shape, registers, fragment, words


def _columns(size: str, k: int, accumulator: str, instruction: Instruction) -> int:
    """Returns n (PTX ISA, "wgmma.mma_async", "Shape")."""
    rows, _, rest = size.removeprefix("m").partition("n")
    columns, _, depth = rest.partition("k")
    if rows != str(ROWS) or depth != str(k) or not columns.isdecimal():
        raise instruction.unknown(f"shape .{size}")
    n = int(columns)
    step = 16 if accumulator == "s32" and n > 32 else 8
    if n % step or not 8 <= n <= 256:
        raise instruction.unknown(f"shape .{size}")
    return n


def _constants(
    constants: list[Operand],
    accumulator: str,
    kind: str,
    instruction: Instruction,
    *,
    in_registers: bool,
) -> tuple[tuple[int, int], tuple[bool, bool]]:
    """Returns the signs of A and B, and whether they are transposed."""
    values = [each.value for each in constants if isinstance(each, Immediate)]
    count = 0 if accumulator == "s32" else 2
    transposed = (1 if in_registers else 2) if kind in ("f16", "bf16") else 0
    if len(values) != len(constants) or len(values) != count + transposed:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    signs, turns = values[:count] or [1, 1], values[count:]
    if any(sign not in (1, -1) for sign in signs) or any(turn not in (0, 1) for turn in turns):
        raise instruction.unknown(f"a constant in {values}")
    turns = [0] * (2 - len(turns)) + turns
    return (signs[0], signs[1]), (bool(turns[0]), bool(turns[1]))


def registers_of(
    operand: Operand, count: int, instruction: Instruction, *, distinct: bool = True
) -> list[Register]:
    """Returns the 32-bit registers of a vector, of which none may stand in it twice if distinct.

    Raises:
        UnsupportedPtxError: If it has another number or type of elements.
    """
    elements = operand.elements if isinstance(operand, Vector) else ()
    found = [each for each in elements if isinstance(each, Register) and BITS[each.type] == 32]
    if len(found) != count or len(elements) != count:
        raise instruction.unknown(f"a vector of {len(elements)}, must have {count} registers,")
    if distinct and len({each.number for each in found}) != count:
        raise instruction.unknown("a register that stands twice in a vector")
    return found


def _check_target(instruction: Instruction, program: Program) -> None:
    if program.target != TARGET:
        raise instruction.unknown(f"wgmma on {program.target}, which only {TARGET} has,")


def check_lanes(mask: Mask) -> None:
    """Checks that all lanes of a warp run an instruction.

    Raises:
        EmulationError: If some do not.
    """
    if not mask.all():
        raise EmulationError(f"runs in {int(mask.sum())} lanes of a warp, must run in all {LANES}")


def _uniform(lanes: npt.NDArray[np.generic]) -> int:
    first = lanes[0]
    if (lanes != first).any():
        raise EmulationError(f"has lanes with other operands than lane 0, which has {first}")
    return int(first)


def _run(multiplication: Multiplication, shape: _Shape, block: Block) -> None:
    check_running(block, "multiplies matrices in")
    *descriptors, accumulates = multiplication.operands
    b = _from_shared(multiplication, block, descriptors[-1], shape, of_a=False)
    if shape.a_in_registers:
        a = _from_registers(multiplication, shape)
    else:
        a = _from_shared(multiplication, block, descriptors[0], shape, of_a=True)
    sums = multiplication.sums
    with np.errstate(invalid="ignore", over="ignore"):
        result = a @ b.T
        if shape.signs[0] != shape.signs[1]:
            result = -result
        if accumulates:
            if sums.matrix is None:
                sums.matrix = _pack(sums.words(), shape)
            result = result + sums.matrix
        sums.matrix = rounded(result, shape.accumulator, saturates=shape.saturates)
    grid = block.cluster.grid
    for rank, operation in enumerate(multiplication.operations):
        multiplication.clocks[rank] = grid.ordering.finish(operation)
    multiplication.is_done = True
    grid.progress += 1


def _from_shared(
    multiplication: Multiplication, block: Block, word: int, shape: _Shape, *, of_a: bool
) -> Values:
    """Returns A as ``(m, k)``, or B as ``(n, k)``."""
    kind, rows = (shape.a, ROWS) if of_a else (shape.b, shape.n)
    transposed = shape.transposes[0 if of_a else 1]
    outer, inner = (shape.k, rows) if transposed else (rows, shape.k)
    chunks = chunks_of_matrix(
        block, _descriptor(word), outer, inner // kind.chunk_elements, transposed=transposed
    )
    ordering = block.cluster.grid.ordering
    for rank, operation in enumerate(multiplication.operations):
        read = chunks
        if of_a:  # a warp reads its 16 rows
            share = np.array_split(chunks, WARPS, axis=1 if transposed else 0)
            read = share[rank]
        ordering.operation_read(operation, block, read.reshape(-1), 16)
    values = kind.decode(read_matrix(block, chunks))
    return values.T if transposed else values


def _from_registers(multiplication: Multiplication, shape: _Shape) -> Values:
    """Returns A as ``(m, k)`` (PTX ISA, "Register Fragments")."""
    words = np.array([values for _, values in multiplication.fragments], np.uint32)
    # Warp, register and lane become warp, lane and register, whose bytes are elements.
    chunks = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8)
    values = shape.a.decode(chunks)
    each = values.shape[-1] // _FRAGMENT
    # Warp, row of 8, column of 4, half of k, half of rows, element.
    parts = values.reshape(WARPS, 8, 4, 2, 2, each)
    matrix: Values = parts.transpose(0, 4, 1, 3, 2, 5).reshape(ROWS, shape.k)
    return matrix


def _pack(words: npt.NDArray[np.uint32], shape: _Shape) -> Values:
    """Returns accumulators of registers as a matrix ``(m, n)``."""
    if shape.accumulator == "f16":
        halves = np.stack([words & 0xFFFF, words >> 16], 2).astype(np.uint16)
        elements = halves.reshape(WARPS, -1, LANES).view(np.float16)
    else:
        elements = words.view(np.float32 if shape.accumulator == "f32" else np.int32)
    parts = elements.reshape(WARPS, shape.n // 8, 2, 2, 8, 4)
    matrix: Values = parts.transpose(0, 2, 4, 1, 5, 3).reshape(ROWS, shape.n).astype(np.float64)
    return matrix


def _unpack(sums: Sums) -> npt.NDArray[np.uint32]:
    """Returns the words of accumulators' registers, as ``(warps, registers, lanes)``."""
    assert sums.matrix is not None
    if sums.unpacked is None or sums.unpacked[0] is not sums.matrix:
        # Warp, half of rows, row of 8, column of 8, pair, element.
        parts = sums.matrix.reshape(WARPS, 2, 8, -1, 4, 2).transpose(0, 3, 1, 5, 2, 4)
        elements = np.ascontiguousarray(parts).reshape(WARPS, -1, LANES)
        if sums.matrix.dtype == np.float16:
            halves = elements.view(np.uint16).astype(np.uint32)
            words = halves[:, ::2] | halves[:, 1::2] << np.uint32(16)
        else:
            words = elements.view(np.uint32)
        sums.unpacked = (sums.matrix, words)
    return sums.unpacked[1]


def rounded(values: Values, accumulator: str, *, saturates: bool) -> npt.NDArray[Any]:
    """Returns sums in an accumulator's type; integers wrap if they do not saturate."""
    if accumulator == "s32":
        if saturates:
            values = np.clip(values, -(2.0**31), 2.0**31 - 1)
        return values.astype(np.int64).astype(np.uint32).view(np.int32)
    return values.astype(np.float16 if accumulator == "f16" else np.float32)


@decodes("wgmma.fence")
def _fence(instruction: Instruction, program: Program) -> Step:
    _check_plain(instruction, program, "fence")

    def step(warp: Warp, mask: Mask) -> None:
        check_lanes(mask)
        group_of(warp).fence(warp)

    return going_on(step)


@decodes("wgmma.commit_group")
def _commit_group(instruction: Instruction, program: Program) -> Step:
    _check_plain(instruction, program, "commit_group")

    def step(warp: Warp, mask: Mask) -> None:
        check_lanes(mask)
        group_of(warp).commit(warp)

    return going_on(step)


@decodes("wgmma.wait_group")
def _wait_group(instruction: Instruction, program: Program) -> Step:
    _check_plain(instruction, program, "wait_group", operands=1)
    (operand,) = instruction.operands
    if not isinstance(operand, Immediate):
        raise instruction.unknown("an operand that is no constant")
    allowed = operand.value

    def step(warp: Warp, mask: Mask) -> str | None:
        check_lanes(mask)
        warp.waiting = group_of(warp).wait(warp, allowed, _unpack)
        return None if warp.waiting is None else RETRY

    return step


def _check_plain(
    instruction: Instruction, program: Program, name: str, *, operands: int = 0
) -> None:
    _check_target(instruction, program)
    qualifiers = Qualifiers(instruction)
    for each in (name, "sync", "aligned"):
        qualifiers.one_of(each)
    qualifiers.end()
    if len(instruction.operands) != operands:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
