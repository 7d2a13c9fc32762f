"""Atomic operations on global and shared memory (PTX ISA, "atom", "red").

The lanes of a warp follow each other in an order that the schedule draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..emulation_errors import MemoryAccessError
from ..machine.addresses import SHARED_WINDOW, WINDOW_SHIFT
from ..machine.global_memory import Bytes
from ..machine.hierarchy import Block, Warp
from ..machine.lanes import Mask
from ..machine.meanings import Step, Value, going_on
from ..ptx.program import Instruction, Program
from ..ptx.ptx_operands import Address, Operand, Register, Sink, Vector
from .asynchronous.reductions import reduce
from .decoders import Qualifiers, decodes
from .shared_addresses import Locator, active_lanes, locate, locate_own
from .values import BITS, address, read

_SCOPES = ("cta", "cluster", "gpu", "sys")
_SHARED = ("shared", "shared::cta", "shared::cluster")

_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16", "f16x2", "bf16x2"),
    "inc": ("u32",),
    "and": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "cas": ("b16", "b32", "b64"),
}
_TYPES |= {"max": _TYPES["min"], "dec": _TYPES["inc"], "or": _TYPES["and"], "xor": _TYPES["and"]}

_VECTORS: dict[str, tuple[str, ...]] = {
    "f32": ("v2", "v4"),
    "f16": ("v2", "v4", "v8"),
    "bf16": ("v2", "v4", "v8"),
    "f16x2": ("v2", "v4"),
    "bf16x2": ("v2", "v4"),
}
"""Vectors in global memory by type of their elements."""


@dataclass(frozen=True, kw_only=True)
class _Atomic:
    """The qualifiers of an atomic operation."""

    acquires: bool
    releases: bool
    space: str | None
    operation: str
    type: str
    count: int
    has_policy: bool

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return BITS[self.type] // 8

    @property
    def bytes(self) -> int:
        """Bytes that a lane accesses."""
        return self.count * self.element_bytes


def _decode(instruction: Instruction, *, returns: bool) -> _Atomic:
    qualifiers = Qualifiers(instruction)
    orders = ("relaxed", "acquire", "release", "acq_rel") if returns else ("relaxed", "release")
    order = qualifiers.option(*orders)
    qualifiers.option(*_SCOPES)
    space = qualifiers.option("global", *_SHARED)
    names = [name for name in _TYPES if returns or name not in ("exch", "cas")]
    operation = qualifiers.one_of(*names)
    flushes_nothing = qualifiers.flag("noftz")
    has_policy = qualifiers.flag("L2::cache_hint")
    vector = qualifiers.option("v2", "v4", "v8")
    kind = qualifiers.one_of(*_TYPES[operation])
    qualifiers.end()
    is_half = kind.removesuffix("x2") in ("f16", "bf16")
    if flushes_nothing != is_half:
        raise instruction.unknown(f".{kind} {'with' if flushes_nothing else 'without'} .noftz")
    if operation in ("min", "max") and is_half and vector is None:
        raise instruction.unknown(f".{operation}.{kind} without a vector")
    if vector and (vector not in _VECTORS.get(kind, ()) or space in _SHARED):
        raise instruction.unknown(f"vector .{vector}.{kind}")
    return _Atomic(
        acquires=order in ("acquire", "acq_rel"),
        releases=order in ("release", "acq_rel"),
        space=space,
        operation=operation,
        type=kind,
        count=int(vector[1:]) if vector else 1,
        has_policy=has_policy,
    )


@decodes("atom")
def _atomic(instruction: Instruction, program: Program) -> Step:
    return _step(instruction, program, returns=True)


@decodes("red")
def _reduction(instruction: Instruction, program: Program) -> Step:
    return _step(instruction, program, returns=False)


def _step(instruction: Instruction, program: Program, *, returns: bool) -> Step:
    atomic = _decode(instruction, returns=returns)
    operands = list(instruction.operands)
    results = _registers(operands.pop(0), atomic, instruction) if returns and operands else []
    count = 2 + (atomic.operation == "cas") + atomic.has_policy
    if len(operands) != count:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    where = _address(operands[0], atomic, instruction, program)
    values = _values(operands[1], atomic, instruction, program)
    other = None
    if atomic.operation == "cas":
        other = _values(operands[2], atomic, instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        grid = warp.block.cluster.grid
        addresses = where(warp)
        given = _lane_bytes(warp, values, atomic)
        swapped = given if other is None else _lane_bytes(warp, other, atomic)
        lanes = active_lanes(mask)
        grid.release_at(warp, addresses[mask], relaxed=not atomic.releases)
        if grid.schedule.delay:
            grid.random.shuffle(lanes)
        old = np.zeros((32, atomic.bytes), np.uint8)
        for lane in lanes:
            place, is_shared = _place(warp, int(addresses[lane]), atomic)
            old[lane] = place
            found = _combined(atomic, old[lane], given[lane], swapped[lane], is_shared=is_shared)
            place[:] = found
        grid.acquire_from(warp, addresses[mask], relaxed=not atomic.acquires)
        for number, register in enumerate(results):
            if register is not None:
                warp.put(register, _lanes_of(old, number, atomic), mask)
        grid.progress += 1

    return going_on(step)


def _combined(
    atomic: _Atomic, old: Bytes, given: Bytes, swapped: Bytes, *, is_shared: bool
) -> Bytes:
    if atomic.operation == "exch":
        return given
    if atomic.operation == "cas":
        return swapped if (old == given).all() else old
    kind = atomic.type.removesuffix("x2")
    # Sums of f32 keep subnormals in shared memory alone (PTX ISA, "atom").
    return reduce(
        atomic.operation, "f32.ftz" if kind == "f32" and not is_shared else kind, old, given
    )


def _address(
    operand: Operand, atomic: _Atomic, instruction: Instruction, program: Program
) -> Value:
    base = operand.base if isinstance(operand, Address) else None
    wide = isinstance(base, Register) and BITS[base.type] == 64
    if not wide and atomic.space not in _SHARED:
        raise instruction.unknown(f"address {operand}")
    return address(operand, "u64" if wide else "u32", instruction, program)


def _elements(operand: Operand, atomic: _Atomic, instruction: Instruction) -> tuple[Operand, ...]:
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != atomic.count or isinstance(operand, Vector) != (atomic.count > 1):
        raise instruction.unknown(f"a vector of {len(elements)}")
    return elements


def _values(
    operand: Operand, atomic: _Atomic, instruction: Instruction, program: Program
) -> list[Value]:
    found = _elements(operand, atomic, instruction)
    for each in found:
        if isinstance(each, Register) and BITS[each.type] != BITS[atomic.type]:
            raise instruction.unknown(f"register {each.name} of type .{each.type}")
    return [read(each, atomic.type, instruction, program) for each in found]


def _registers(operand: Operand, atomic: _Atomic, instruction: Instruction) -> list[int | None]:
    found: list[int | None] = []
    for each in _elements(operand, atomic, instruction):
        if isinstance(each, Sink):
            found.append(None)
        elif isinstance(each, Register) and BITS[each.type] == BITS[atomic.type]:
            found.append(each.number)
        else:
            raise instruction.unknown(f"result {each}")
    return found


def _lane_bytes(warp: Warp, values: list[Value], atomic: _Atomic) -> Bytes:
    """Returns the bytes of each lane's elements, ``(32, bytes)``."""
    dtype = np.dtype(f"u{atomic.element_bytes}")
    words = np.stack([value(warp).astype(dtype) for value in values], 1)
    return np.ascontiguousarray(words).view(np.uint8)


def _lanes_of(data: Bytes, number: int, atomic: _Atomic) -> Any:
    return data.view(np.dtype(f"u{atomic.element_bytes}"))[:, number].copy()


def _place(warp: Warp, where: int, atomic: _Atomic) -> tuple[Bytes, bool]:
    """Returns the bytes at a lane's address, and whether they are of shared memory.

    Raises:
        MemoryAccessError: If they are not aligned, or not of memory that may be written.
    """
    size = atomic.bytes
    if where % size:
        raise MemoryAccessError(f"address {where:#x} must be a multiple of {size}")
    if atomic.space is None and where >> WINDOW_SHIFT == SHARED_WINDOW >> WINDOW_SHIFT:
        return _shared_place(warp, where - SHARED_WINDOW, size, locate), True
    if atomic.space == "shared::cluster":
        return _shared_place(warp, where, size, locate), True
    if atomic.space in _SHARED:
        return _shared_place(warp, where, size, locate_own), True
    grid = warp.block.cluster.grid
    region = grid.memory.find(where, where + size - 1, writes=True)
    if not region.is_early:
        grid.ordering.use_global(warp)
    if region.is_workspace:
        offsets = np.array([where - region.address], np.int64)
        grid.ordering.global_read(warp, region, offsets, size)
        grid.ordering.global_write(warp, region, offsets, size)
    return region.data[where - region.address :][:size], False


def _shared_place(warp: Warp, where: int, size: int, located: Locator) -> Bytes:
    block, offset = located(warp, where)
    return atomic_bytes(warp, block, offset, size)


def atomic_bytes(warp: Warp, block: Block, offset: int, size: int) -> Bytes:
    """Returns bytes of shared memory that a warp changes atomically.

    Raises:
        MemoryAccessError: If they lie outside.
    """
    block.check_shared(offset, size, "changes")
    ordering = warp.block.cluster.grid.ordering
    offsets = np.array([offset], np.int64)
    ordering.read(warp, block, offsets, size)
    ordering.write(warp, block, offsets, size)
    return block.shared[offset : offset + size]
