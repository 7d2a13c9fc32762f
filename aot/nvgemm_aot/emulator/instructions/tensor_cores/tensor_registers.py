"""Loads and stores of tensor memory (PTX ISA, "tcgen05.ld", "tcgen05.st", "Data Movement Shape").

A load's registers hold their values at once. The manual says that they are undefined before
``tcgen05.wait::ld``, but NVIDIA's compiler uses them earlier, or without it: GPUs wait for a
register that is used. Where a kernel has no ``wait::ld``, a load is over when it is issued.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Warp
from ...machine.lanes import FULL, LANE, Mask
from ...machine.ordering import Clock
from ...machine.scheduler import RETRY, Step
from ...ptx.program import Instruction, Program
from ...ptx.ptx_operands import Immediate, Operand, Register, Vector
from ..asynchronous.late_effects import check_running, later
from ..decoders import Qualifiers, decodes
from ..values import address, read
from .tensor_allocation import whole_warp

_COUNTS = tuple(f"x{1 << power}" for power in range(8))

_SHAPES = {
    "32x32b": (1, 128),
    "16x64b": (1, 128),
    "16x128b": (2, 64),
    "16x256b": (4, 32),
    "16x32bx2": (1, 128),
}
"""Registers of one repetition, and the most repetitions (PTX ISA, "tcgen05.ld")."""

_SUBPARTITION = 32
"""Lanes that a warp can access: those from 32 times its number modulo 4."""

Places = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


@functools.cache
def _places(shape: str, registers: int, split: int) -> Places:
    """Returns the lane and column of each register and thread, as ``(registers, 32)``."""
    number = np.arange(registers, dtype=np.int64)[:, None]
    thread = LANE.astype(np.int64)[None, :]
    if shape == "32x32b":
        lane, column = thread + 0 * number, number + 0 * thread
    elif shape == "16x64b":
        lane = thread % 2 * 8 + thread // 4 + 0 * number
        column = thread // 2 % 2 + 2 * number
    elif shape == "16x128b":
        lane = thread // 4 + number % 2 * 8
        column = thread % 4 + number // 2 * 4
    elif shape == "16x256b":
        lane = thread // 4 + number // 2 % 2 * 8
        column = thread % 4 * 2 + number % 2 + number // 4 * 8
    else:
        lane = thread % 16 + 0 * number
        column = number + thread // 16 * split
    return lane, column


@dataclass(kw_only=True)
class _Pending:
    """A load or store that the warp has not waited for."""

    is_done: bool = False
    clock: Clock = None


@dataclass(frozen=True, kw_only=True)
class _Access:
    """Decoded operands of a load or store."""

    shape: str
    registers: int
    split: int
    packed: bool
    place: Any

    def locate(self, warp: Warp) -> tuple[Places, range, range]:
        """Returns the cells' lanes and columns, and the ranges that they lie in.

        Raises:
            EmulationError: If the warp must not access them.
        """
        words = self.place(warp)
        word = int(words[0])
        if (words != words[0]).any():
            raise EmulationError("the lanes of a warp have different addresses of tensor memory")
        lane, column = word >> 16, word & 0xFFFF
        own = warp.index % 4 * _SUBPARTITION
        allowed = (own,) if self.shape == "32x32b" else (own, own + 16)
        if lane not in allowed:
            raise EmulationError(
                f"accesses lanes of tensor memory from {lane}, warp {warp.index} must access them "
                f"from {' or '.join(map(str, allowed))}"
            )
        split = self.split if self.shape == "16x32bx2" else 0
        lanes, columns = _places(self.shape, self.registers, split)
        scale = 2 if self.packed else 1
        lane_range = range(lane, lane + (32 if self.shape == "32x32b" else 16))
        last = (int(columns.max()) + 1) * scale
        column_range = range(column, column + last)
        return (lanes + lane, columns * scale + column), lane_range, column_range


def _decode(
    instruction: Instruction, program: Program, name: str, packing: str
) -> tuple[_Access, Vector]:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of(name)
    qualifiers.one_of("sync")
    qualifiers.one_of("aligned")
    shape = qualifiers.one_of(*_SHAPES)
    per, most = _SHAPES[shape]
    count = int(qualifiers.one_of(*_COUNTS)[1:])
    if count > most:
        raise instruction.unknown(f"qualifier .x{count}")
    packed = qualifiers.flag(packing)
    qualifiers.one_of("b32")
    qualifiers.end()
    operands = list(instruction.operands)
    values = operands.pop(0 if name == "ld" else -1)
    split: Operand | None = operands.pop(1) if shape == "16x32bx2" and len(operands) == 2 else None
    if len(operands) != 1 or (shape == "16x32bx2") != isinstance(split, Immediate):
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    if not isinstance(values, Vector):
        values = Vector((values,))
    if len(values.elements) != per * count:
        raise instruction.unknown(
            f"a number of {len(values.elements)} registers, not {per * count},"
        )
    access = _Access(
        shape=shape,
        registers=per * count,
        split=split.value if isinstance(split, Immediate) else 0,
        packed=packed,
        place=address(operands[0], "u32", instruction, program),
    )
    return access, values


@decodes("tcgen05.ld")
def _load(instruction: Instruction, program: Program) -> Step:
    access, values = _decode(instruction, program, "ld", "pack::16b")
    registers = [_register(each, instruction) for each in values.elements]
    waits = any(
        each.opcode == "tcgen05" and each.qualifiers[0] == "wait::ld"
        for each in program.instructions
    )

    def step(warp: Warp, mask: Mask) -> None:
        whole_warp(mask)
        (lanes, columns), lane_range, column_range = access.locate(warp)
        block, grid = warp.block, warp.block.cluster.grid
        block.tensor.check(lane_range, column_range, "reads")
        pending = _Pending()
        loads: list[_Pending] = warp.memory.setdefault("tensor loads", [])
        loads.append(pending)
        operation = grid.ordering.begin(warp)
        grid.ordering.tensor_read(
            operation,
            block,
            slice(lane_range.start, lane_range.stop),
            slice(column_range.start, column_range.stop),
        )
        cells = block.tensor.cells
        found = cells[lanes, columns]
        if access.packed:
            found = found & np.uint32(0xFFFF) | cells[lanes, columns + 1] << np.uint32(16)
        for register, value in zip(registers, found):
            warp.put(register, value, FULL)
        pending.clock = grid.ordering.finish(operation)
        pending.is_done = True
        grid.progress += 1
        if not waits:
            _complete(warp, loads)

    return step


def _register(operand: Operand, instruction: Instruction) -> int:
    if isinstance(operand, Register):
        return operand.number
    raise instruction.unknown(f"result {operand}")


@decodes("tcgen05.st")
def _store(instruction: Instruction, program: Program) -> Step:
    access, values = _decode(instruction, program, "st", "unpack::16b")
    sources = [read(each, "b32", instruction, program) for each in values.elements]

    def step(warp: Warp, mask: Mask) -> None:
        whole_warp(mask)
        (lanes, columns), lane_range, column_range = access.locate(warp)
        block, grid = warp.block, warp.block.cluster.grid
        block.tensor.check(lane_range, column_range, "writes")
        pending = _Pending()
        stores: list[_Pending] = warp.memory.setdefault("tensor stores", [])
        stores.append(pending)
        data = np.stack([source(warp) for source in sources]).astype(np.uint32, copy=False)
        operation = grid.ordering.begin(warp)

        def put() -> None:
            check_running(block, "writes tensor memory beside")
            grid.ordering.tensor_write(
                operation,
                block,
                slice(lane_range.start, lane_range.stop),
                slice(column_range.start, column_range.stop),
            )
            cells = block.tensor.cells
            if access.packed:
                cells[lanes, columns] = data & np.uint32(0xFFFF)
                cells[lanes, columns + 1] = data >> np.uint32(16)
            else:
                cells[lanes, columns] = data
            pending.clock = grid.ordering.finish(operation)
            pending.is_done = True
            grid.progress += 1

        later(warp, instruction, ("tensor stores", id(warp)), put)

    return step


@decodes("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(instruction: Instruction, program: Program) -> Step:
    if instruction.qualifiers[1:] != ("sync", "aligned") or instruction.operands:
        raise instruction.unknown("a qualifier or operand")
    key = "tensor loads" if instruction.qualifiers[0] == "wait::ld" else "tensor stores"

    def step(warp: Warp, mask: Mask) -> str | None:
        whole_warp(mask)
        accesses: list[_Pending] = warp.memory.get(key, [])
        if not all(each.is_done for each in accesses):
            warp.waiting = f"{len(accesses)} {key}"
            return RETRY
        warp.waiting = None
        _complete(warp, accesses)
        return None

    return step


def _complete(warp: Warp, accesses: list[_Pending]) -> None:
    """Orders accesses before what a warp does next."""
    for each in accesses:
        warp.block.cluster.grid.ordering.acquire(warp, each.clock)
    accesses.clear()
