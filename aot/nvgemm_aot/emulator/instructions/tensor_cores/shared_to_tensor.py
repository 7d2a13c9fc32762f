"""Copies from shared to tensor memory (PTX ISA, "tcgen05.cp")."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Block, Warp
from ...machine.lanes import Mask
from ...machine.ordering import Operation
from ...machine.scheduler import Step
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers, decodes
from ..shared_addresses import active_lanes
from ..values import address, read
from .matrix_descriptor import (
    MatrixDescriptor,
    chunks_of_matrix,
    decode_matrix_descriptor,
    read_matrix,
)
from .tensor_allocation import CTA_GROUPS
from .work_queue import blocks_of_group, issue

_Parts: TypeAlias = tuple[tuple[int, range], ...]
"""First lanes, and the rows that go to them and to those behind."""

_SHAPES: dict[str, tuple[int, int, dict[str | None, _Parts]]] = {
    "128x256b": (128, 2, {None: ((0, range(128)),)}),
    "128x128b": (128, 1, {None: ((0, range(128)),)}),
    "64x128b": (
        64,
        1,
        {
            "warpx2::02_13": (
                (0, range(64)),
                (64, range(64)),
            ),
            "warpx2::01_23": (
                (0, range(32)),
                (32, range(32)),
                (64, range(32, 64)),
                (96, range(32, 64)),
            ),
        },
    ),
    "32x128b": (
        32,
        1,
        {"warpx4": tuple((lane, range(32)) for lane in (0, 32, 64, 96))},
    ),
}
"""Rows and 16-byte chunks of a shape, and by its multicast which rows go to which lanes."""


@decodes("tcgen05.cp")
def _copy(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("cp")
    paired = qualifiers.one_of(*CTA_GROUPS) == "cta_group::2"
    rows, width, multicasts = _SHAPES[qualifiers.one_of(*_SHAPES)]
    named = [name for name in multicasts if name is not None]
    parts = multicasts[qualifiers.one_of(*named) if named else None]
    qualifiers.end()
    if len(instruction.operands) != 2:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    target = address(instruction.operands[0], "u32", instruction, program)
    source = read(instruction.operands[1], "u64", instruction, program)

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            word = int(target(warp)[lane])
            matrix = decode_matrix_descriptor(int(source(warp)[lane]))
            if word >> 16:
                raise EmulationError(
                    f"copies to lane {word >> 16} of tensor memory, must copy to lane 0"
                )
            blocks = blocks_of_group(warp, paired=paired)
            columns = slice(word, word + 4 * width)
            for block in blocks:
                block.tensor.check(range(128), range(columns.start, columns.stop), "copies to")
            copy = _Copy(matrix=matrix, rows=rows, width=width, parts=parts, columns=columns)
            issue(warp, instruction, blocks, functools.partial(_run, copy, blocks))

    return step


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A copy: its source, its size in rows and chunks, and which rows go to which lanes."""

    matrix: MatrixDescriptor
    rows: int
    width: int
    parts: _Parts
    columns: slice


def _run(copy: _Copy, blocks: list[Block], operation: Operation) -> None:
    ordering = blocks[0].cluster.grid.ordering
    for block in blocks:
        chunks = chunks_of_matrix(block, copy.matrix, copy.rows, copy.width, transposed=False)
        ordering.operation_read(operation, block, chunks.reshape(-1), 16)
        cells = read_matrix(block, chunks).view(np.uint32)
        for first, chosen in copy.parts:
            lanes = slice(first, first + len(chosen))
            block.tensor.cells[lanes, copy.columns] = cells[chosen.start : chosen.stop]
        ordering.tensor_write(operation, block, slice(0, 128), copy.columns)
