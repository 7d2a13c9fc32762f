"""Boxes of tensors, between global and shared memory (PTX ISA, "Tensors", "Swizzling Modes")."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...emulation_errors import EmulationError
from ...machine.addresses import PARAMETER_WINDOW, SHARED_BASE
from ...machine.global_memory import Bytes, GlobalMemory
from ...machine.hierarchy import Block, Grid
from .tensor_map import MAP_ALIGNMENT, MAP_BYTES, Swizzle, TensorMap, decode_tensor_map

CHUNK_BYTES = 16
"""Bytes of shared memory that stay together in every swizzling mode."""

ROW_ALIGNMENT = 128
"""Alignment of a box in shared memory, in bytes."""

Chunks: TypeAlias = npt.NDArray[np.int64]
"""Byte offsets of chunks in shared memory, in the order of a box's bytes."""

_ADDRESS_SPACE = 1 << 57
"""Addresses in tensor maps have 57 bits: kernels' launchers cut what lies below 0 to these."""


def load_tensor_map(grid: Grid, address: int) -> TensorMap:
    """Returns the tensor map at a generic address, among the parameters or in global memory.

    Raises:
        EmulationError: If it is misaligned or not valid.
        MemoryAccessError: If no memory lies there.
    """
    if address % MAP_ALIGNMENT:
        raise EmulationError(
            f"a tensor map is at {address:#x}, must be at a multiple of {MAP_ALIGNMENT}"
        )
    parameters = grid.launch.parameters
    offset = address - PARAMETER_WINDOW
    if 0 <= offset <= len(parameters) - MAP_BYTES:
        return decode_tensor_map(parameters[offset : offset + MAP_BYTES])
    region = grid.memory.find(address, address + MAP_BYTES - 1)
    start = address - region.address
    return decode_tensor_map(region.data[start : start + MAP_BYTES].tobytes())


@functools.lru_cache(maxsize=4096)
def _swizzled(start: int, count: int, swizzle: Swizzle) -> Chunks:
    """Returns where chunks go, relative to an address of which the lowest bits are given."""
    chunks = np.arange(count, dtype=np.int64) * CHUNK_BYTES + start
    found = swizzle(chunks) - start
    found.flags.writeable = False
    return found


def chunks_of(block: Block, offset: int, size: int, swizzle: Swizzle) -> Chunks:
    """Returns the chunks of shared memory that bytes of a box take.

    Raises:
        EmulationError: If the box is misaligned.
        MemoryAccessError: If it lies outside shared memory.
    """
    if (SHARED_BASE + offset) % ROW_ALIGNMENT:
        raise EmulationError(
            f"a box is at offset {offset} of shared memory, must be at a multiple of "
            f"{ROW_ALIGNMENT}"
        )
    relative = _swizzled((SHARED_BASE + offset) % 1024, size // CHUNK_BYTES, swizzle)
    chunks = relative + offset
    block.check_shared(int(chunks.min()), CHUNK_BYTES, "copies a box at")
    block.check_shared(int(chunks.max()), CHUNK_BYTES, "copies a box at")
    return chunks


def read_chunks(block: Block, chunks: Chunks) -> Bytes:
    """Returns the bytes of chunks of shared memory."""
    return _as_chunks(block)[chunks // CHUNK_BYTES].view(np.uint8)


def write_chunks(block: Block, chunks: Chunks, data: Bytes) -> None:
    """Writes chunks of shared memory."""
    _as_chunks(block)[chunks // CHUNK_BYTES] = data.view(np.complex128)


def _as_chunks(block: Block) -> npt.NDArray[np.complex128]:
    # Complex numbers are the only 16 bytes that numpy moves as fast as integers.
    whole = len(block.shared) // CHUNK_BYTES * CHUNK_BYTES
    return block.shared[:whole].view(np.complex128)


class Box:
    """A box of a tensor, at the coordinates of its first element, the contiguous one first.

    Attributes:
        shared_bytes: Bytes that it takes in shared memory.
        counted_bytes: Bytes that a memory barrier counts, which include what lies outside the
            tensor.
    """

    def __init__(self, tensor: TensorMap, coordinates: Sequence[int]) -> None:
        self.tensor = tensor
        kind = tensor.type
        self._begin = [max(0, -place) for place in coordinates]
        self._end = [
            min(extent, size - place)
            for extent, size, place in zip(tensor.box, tensor.sizes, coordinates)
        ]
        self._coordinates = coordinates
        self._check_first(coordinates[0])
        self.is_outside = any(end <= begin for begin, end in zip(self._begin, self._end))
        self._shape = (*reversed(tensor.box[1:]), tensor.row_bytes)
        self.shared_bytes = math.prod(self._shape)
        self.counted_bytes = math.prod(tensor.box) * kind.memory_bits // 8

    def _check_first(self, first: int) -> None:
        kind = self.tensor.type
        unit = 128 if kind.shared_bits != kind.memory_bits else 2 if kind.memory_bits < 8 else 1
        if first % unit:
            raise EmulationError(
                f"the first coordinate of {kind.name} is {first}, must be a multiple of {unit}"
            )

    def check_store(self) -> None:
        """Checks that the box may be stored.

        The PTX ISA names no such rule, but an H100 reports an illegal instruction for stores at
        negative coordinates, which it loads.

        Raises:
            EmulationError: If a coordinate is negative.
        """
        if min(self._coordinates) < 0:
            raise EmulationError(
                f"stores a box at coordinates {tuple(self._coordinates)}; a store's must not be "
                "negative: an H100 reports an illegal instruction"
            )

    def read(self, memory: GlobalMemory) -> Bytes:
        """Returns the bytes that shared memory gets, before they are swizzled.

        Raises:
            MemoryAccessError: If the tensor map is larger than the tensor.
        """
        fill = np.frombuffer(self.tensor.fill, np.uint8)
        tile = np.resize(fill, self._shape) if fill.any() else np.zeros(self._shape, np.uint8)
        if not self.is_outside:
            end = self._end[0]
            self._inside(tile, end)[...] = self._widen(self._view(memory, end, writes=False))
        return tile.reshape(-1)

    def write(self, memory: GlobalMemory, data: Bytes, *, reduces: bool = False) -> None:
        """Writes the bytes of shared memory that lie inside the tensor.

        A row that ends within a chunk of 16 bytes is written to the chunk's end, as an H100 does,
        if it is not reduced.

        Raises:
            MemoryAccessError: If the tensor map is larger than the tensor.
        """
        if self.is_outside:
            return
        if self.tensor.type.shared_bits != self.tensor.type.memory_bits:
            raise EmulationError(f"stores {self.tensor.type.name}, which can only be loaded")
        per_chunk = CHUNK_BYTES * 8 // self.tensor.type.memory_bits
        end = self._end[0]
        whole = -(-(end + self._coordinates[0]) // per_chunk) * per_chunk - self._coordinates[0]
        if not reduces:
            end = min(whole, self.tensor.box[0])
        self._view(memory, end, writes=True)[...] = self._inside(data.reshape(self._shape), end)

    def _inside(self, tile: Bytes, end: int) -> Bytes:
        """Returns the part of the box that lies inside the tensor, whose rows end at ``end``."""
        bits = self.tensor.type.shared_bits
        outer = tuple(slice(begin, end) for begin, end in zip(self._begin[:0:-1], self._end[:0:-1]))
        row = slice(self._begin[0] * bits // 8, end * bits // 8)
        index = (*outer, row)
        return tile[index]

    def _view(self, memory: GlobalMemory, end: int, *, writes: bool) -> Bytes:
        """Returns the part of the tensor that the box holds, as bytes of global memory."""
        tensor = self.tensor
        bits = tensor.type.memory_bits
        first = tensor.address + (self._coordinates[0] + self._begin[0]) * bits // 8
        extents, reach = [], 0
        for dimension in range(1, tensor.rank):
            begin, stride = self._begin[dimension], tensor.strides[dimension - 1]
            extents.append(self._end[dimension] - begin)
            first += (self._coordinates[dimension] + begin) * stride
            reach += (extents[-1] - 1) * stride
        # Maps for ragged tensors begin below address 0, and come round.
        first %= _ADDRESS_SPACE
        row = (end - self._begin[0]) * bits // 8
        region = memory.find(first, first + reach + row - 1, writes=writes)
        return np.lib.stride_tricks.as_strided(
            region.data[first - region.address :],
            (*reversed(extents), row),
            (*reversed(tensor.strides), 1),
            writeable=writes,
        )

    def _widen(self, rows: Bytes) -> Bytes:
        """Pads each 16 elements of 4 or 6 bits to 16 bytes, if the type asks for that."""
        kind = self.tensor.type
        if kind.shared_bits == kind.memory_bits:
            return rows
        packed = rows.reshape(*rows.shape[:-1], -1, 2 * kind.memory_bits)
        padded = np.zeros((*packed.shape[:-1], CHUNK_BYTES), np.uint8)
        padded[..., : packed.shape[-1]] = packed
        return padded.reshape(*rows.shape[:-1], -1)
