"""One multiplication of tensor cores: what it reads, computes and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Block
from ...machine.ordering import Operation
from ..asynchronous.tensor_map import Swizzle
from .element_formats import E4M3, TF32, UE8M0, ElementFormat, Values
from .instruction_descriptor import Accumulator, InstructionDescriptor
from .matrix_descriptor import MatrixDescriptor, chunks_of_matrix, read_matrix

_LANE_SHIFT, _COLUMN_MASK = 16, 0xFFFF
_SCALE_LANES = 32
"""Lanes of tensor memory that hold scales; the other three quarters hold copies of them."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Scales of both matrices: addresses in tensor memory, and elements along k that share one."""

    a: int
    b: int
    block: int


class _Part(NamedTuple):
    """Rows and columns of a block's share of the result, and the first lane that holds them."""

    rows: slice
    columns: slice
    lane: int


@dataclass(frozen=True, kw_only=True)
class Multiplication:
    """D = A B, or D = A B + D / 2**shift.

    Attributes:
        shape: Shape and types.
        d: Address of D in tensor memory.
        a: Matrix A in shared memory, or its address in tensor memory.
        b: Matrix B in shared memory.
        scales: Scales, or None.
        accumulates: True if D is added to.
        shift: Exponent by which D is divided first.
        disabled: Masks of lanes that are not written, 32 lanes each, or none.
    """

    shape: InstructionDescriptor
    d: int
    a: MatrixDescriptor | int
    b: MatrixDescriptor
    scales: Scales | None
    accumulates: bool
    shift: int
    disabled: tuple[int, ...]

    def check(self, blocks: list[Block]) -> None:
        """Checks its addresses in tensor memory.

        Raises:
            EmulationError: If one is wrong.
            MemoryAccessError: If it lies outside what was allocated.
        """
        shape = self.shape
        lane, column = self.d >> _LANE_SHIFT, self.d & _COLUMN_MASK
        allowed = (0, 16) if len(blocks) == 1 and shape.m == 64 else (0,)
        if lane not in allowed:
            raise EmulationError(
                f"D begins at lane {lane} of tensor memory, must begin at "
                f"{' or '.join(map(str, allowed))}"
            )
        width = max(part.columns.stop - part.columns.start for part in self._parts(len(blocks)))
        for block in blocks:
            block.tensor.check(range(lane, lane + 112), range(column, column + width), "multiplies")
            if isinstance(self.a, int):
                columns = self._a_columns(self.a)
                block.tensor.check(range(128), range(columns.start, columns.stop), "multiplies")
        self._check_transposed("B", self.b, shape.b, shape.b_is_transposed)
        if self.scales is not None and self.scales.block == 32 and not shape.scales_are_powers:
            raise EmulationError("scales of blocks of 32 are ue4m3, must be ue8m0")
        if not isinstance(self.a, int):
            self._check_transposed("A", self.a, shape.a, shape.a_is_transposed)
        else:
            if self.a >> _LANE_SHIFT != lane:
                raise EmulationError(
                    f"A begins at lane {self.a >> _LANE_SHIFT} of tensor memory, must begin at "
                    f"{lane}, as D does"
                )
            if shape.a.is_padded or shape.a_is_transposed:
                raise EmulationError(f"A of {shape.a.name} in tensor memory is not supported")
            if len(blocks) == 2 and shape.m == 128:
                raise EmulationError("A in tensor memory with M of 128 in pairs is not supported")

    @staticmethod
    def _check_transposed(
        name: str, matrix: MatrixDescriptor, kind: ElementFormat, transposed: bool
    ) -> None:
        """Checks that a matrix may be transposed in its swizzling mode.

        Raises:
            EmulationError: If it must not (PTX ISA, "Valid Combinations of Type-Size, Major-ness
                and Swizzling").
        """
        atoms = matrix.swizzle is Swizzle.ROWS_128_ATOMS_32
        if transposed and atoms != (kind is TF32):
            raise EmulationError(
                f"{name} of {kind.name} is transposed with swizzling mode {matrix.swizzle.name}, "
                f"must have {'' if kind is TF32 else 'another than '}"
                f"{Swizzle.ROWS_128_ATOMS_32.name}"
            )

    def run(self, blocks: list[Block], operation: Operation) -> None:
        """Multiplies."""
        ordering = blocks[0].cluster.grid.ordering
        shape, count = self.shape, len(blocks)
        b = np.concatenate(
            [
                self._from_shared(
                    block, operation, self.b, shape.b, shape.n // count, shape.b_is_transposed
                )
                for block in blocks
            ]
        )
        if shape.negates_b:
            b = -b
        for number, block in enumerate(blocks):
            a = self._a(block, operation, shape.m // count)
            scaled = b
            if shape.negates_a:
                a = -a
            if self.scales is not None:
                a = a * self._scales(block, operation, self.scales.a, shape.a_scale, len(a))
                scaled = b * self._scales(block, operation, self.scales.b, shape.b_scale, len(b))
            products = a @ scaled.T
            column = self.d & _COLUMN_MASK
            for part in self._parts(count):
                values = products[part.rows, part.columns]
                lanes = slice(part.lane, part.lane + len(values))
                columns = slice(column, column + values.shape[1])
                if self.accumulates:
                    ordering.tensor_read(operation, block, lanes, columns)
                self._add(block, lanes, columns, values, number)
                ordering.tensor_write(operation, block, lanes, columns)

    def _parts(self, count: int) -> Iterator[_Part]:
        """Yields where a block's rows of D go (PTX ISA, "Data path layout organization")."""
        n, lane = self.shape.n, self.d >> _LANE_SHIFT
        rows = self.shape.m // count
        if rows == 128:
            yield _Part(slice(0, 128), slice(0, n), 0)
        elif count == 1:
            for quarter in range(4):
                first = 16 * quarter
                yield _Part(slice(first, first + 16), slice(0, n), 32 * quarter + lane)
        else:
            yield _Part(slice(0, 64), slice(0, n // 2), 0)
            yield _Part(slice(0, 64), slice(n // 2, n), 64)

    def _from_shared(
        self,
        block: Block,
        operation: Operation,
        matrix: MatrixDescriptor,
        kind: ElementFormat,
        rows: int,
        transposed: bool,
    ) -> Values:
        """Returns a block's part of a matrix as ``(rows, k)``."""
        outer, inner = (self.shape.k, rows) if transposed else (rows, self.shape.k)
        chunks = chunks_of_matrix(
            block, matrix, outer, -(-inner // kind.chunk_elements), transposed=transposed
        )
        ordering = block.cluster.grid.ordering
        ordering.operation_read(operation, block, chunks.reshape(-1), 16)
        values = kind.decode(read_matrix(block, chunks))[:, :inner]
        return values.T if transposed else values

    def _a(self, block: Block, operation: Operation, rows: int) -> Values:
        shape = self.shape
        if not isinstance(self.a, int):
            return self._from_shared(block, operation, self.a, shape.a, rows, shape.a_is_transposed)
        columns = self._a_columns(self.a)
        block.cluster.grid.ordering.tensor_read(operation, block, slice(0, 128), columns)
        first = self.a >> _LANE_SHIFT
        row = np.arange(rows)
        lanes = row if rows == 128 else row // 16 * 32 + row % 16 + first
        cells = np.ascontiguousarray(block.tensor.cells[lanes, columns])
        return shape.a.decode(cells.view(np.uint8))[:, : shape.k]

    def _a_columns(self, address: int) -> slice:
        column = address & _COLUMN_MASK
        return slice(column, column + -(-self.shape.k // self.shape.a.chunk_elements) * 4)

    def _scales(
        self, block: Block, operation: Operation, address: int, first: int, rows: int
    ) -> Values:
        """Returns the scale of each element of a matrix, as ``(rows, k)``.

        Raises:
            EmulationError: If the quarters of tensor memory hold different scales.
        """
        assert self.scales is not None
        count = self.shape.k // self.scales.block
        column = address & _COLUMN_MASK
        columns = slice(column, column + -(-rows // _SCALE_LANES))
        if first + count > 4 or (count == 2 and first % 2):
            raise EmulationError(
                f"reads {count} scales from byte {first} of a cell's 4 bytes, must be whole halves "
                "or quarters of it"
            )
        block.tensor.check(range(128), range(columns.start, columns.stop), "reads scales of")
        block.cluster.grid.ordering.tensor_read(operation, block, slice(0, 128), columns)
        quarters = block.tensor.cells[:, columns].reshape(4, _SCALE_LANES, -1)
        if (quarters != quarters[0]).any():
            raise EmulationError(
                f"columns {columns.start} to {columns.stop - 1} of tensor memory hold different "
                "scales in each quarter of the lanes; copy them with .warpx4"
            )
        cells = np.ascontiguousarray(quarters[0].T).reshape(-1)[:rows]
        codes = cells.view(np.uint8).reshape(-1, 4)[:, first : first + count]
        values = UE8M0[codes] if self.shape.scales_are_powers else E4M3[codes & 0x7F]
        return np.repeat(values, self.scales.block, axis=1)

    def _add(self, block: Block, lanes: slice, columns: slice, values: Values, number: int) -> None:
        """Writes a part of the result, added to what is there."""
        cells = block.tensor.cells[lanes, columns]
        if self.accumulates:
            before = self._accumulated(cells)
            values = values + (np.ldexp(before, -self.shift) if self.shift else before)
        found = self._encode(values)
        if self.disabled:
            masks = self.disabled[4 * number : 4 * number + 4]
            lane = np.arange(lanes.start, lanes.stop)
            words = np.array(masks, np.int64)[lane // 32]
            kept = (words >> lane % 32 & 1).astype(bool)
            found = np.where(kept[:, None], cells, found)
        cells[...] = found

    def _accumulated(self, cells: npt.NDArray[np.uint32]) -> Values:
        kind = self.shape.accumulator
        if kind is Accumulator.F32:
            return cells.view(np.float32).astype(np.float64)
        if kind is Accumulator.S32:
            return cells.view(np.int32).astype(np.float64)
        halves = (cells & np.uint32(0xFFFF)).astype(np.uint16)
        values: Values = halves.view(np.float16).astype(np.float64)
        return values

    def _encode(self, values: Values) -> npt.NDArray[np.uint32]:
        kind = self.shape.accumulator
        if kind is Accumulator.F32:
            return np.ascontiguousarray(values, np.float32).view(np.uint32)
        if kind is Accumulator.F16:
            return np.ascontiguousarray(values, np.float16).view(np.uint16).astype(np.uint32)
        if self.shape.saturates:
            values = np.clip(values, -(2.0**31), 2.0**31 - 1)
        return np.ascontiguousarray(values).astype(np.int64).astype(np.uint32)
