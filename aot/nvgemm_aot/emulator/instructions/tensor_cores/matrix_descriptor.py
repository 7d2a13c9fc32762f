"""Matrices in shared memory, by 64-bit descriptors (PTX ISA, "Shared memory descriptor")."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...emulation_errors import EmulationError
from ...machine.addresses import SHARED_BASE
from ...machine.global_memory import Bytes
from ...machine.hierarchy import Block
from ..asynchronous.tensor_boxes import CHUNK_BYTES, read_chunks
from ..asynchronous.tensor_map import Swizzle

_SWIZZLES = {
    0: Swizzle.NONE,
    1: Swizzle.ROWS_128_ATOMS_32,
    2: Swizzle.ROWS_128,
    4: Swizzle.ROWS_64,
    6: Swizzle.ROWS_32,
}

_FIXED = 1 << 46
_FIXED_BITS = 7 << 46 | 0xFF << 53
"""Constant fields: version 1 in bits 46 to 48, and 0 in bits 53 to 60."""

_PERIOD = 1024
"""Bytes after which every swizzling pattern repeats."""


@dataclass(frozen=True)
class MatrixDescriptor:
    """A matrix in shared memory.

    Attributes:
        start: Address of its first byte in the shared window.
        leading: Leading dimension byte offset.
        stride: Stride dimension byte offset.
        base: Number of 128-byte rows by which the swizzling pattern begins before ``start``.
        swizzle: Swizzling pattern.
    """

    start: int
    leading: int
    stride: int
    base: int
    swizzle: Swizzle


@functools.lru_cache(maxsize=4096)
def decode_matrix_descriptor(word: int) -> MatrixDescriptor:
    """Decodes a descriptor.

    Raises:
        EmulationError: If a field has a value that it must not have, or that is not supported.
    """
    if word & _FIXED_BITS != _FIXED:
        raise EmulationError(
            f"the matrix descriptor {word:#x} has constant fields of "
            f"{word & _FIXED_BITS:#x}, must have {_FIXED:#x}"
        )
    if word >> 52 & 1:
        raise EmulationError(
            f"the matrix descriptor {word:#x} has an absolute leading offset, which is not "
            "supported"
        )
    if (mode := word >> 61) not in _SWIZZLES:
        raise EmulationError(
            f"the matrix descriptor {word:#x} has swizzling mode {mode}, must be one of "
            f"{[*_SWIZZLES]}"
        )
    return MatrixDescriptor(
        start=(word & 0x3FFF) << 4,
        leading=(word >> 16 & 0x3FFF) << 4,
        stride=(word >> 32 & 0x3FFF) << 4,
        base=word >> 49 & 7,
        swizzle=_SWIZZLES[mode],
    )


@functools.lru_cache(maxsize=4096)
def _chunks(
    phase: int,
    matrix: tuple[int, int, int, Swizzle],
    outer: int,
    inner: int,
    transposed: bool,
) -> npt.NDArray[np.int64]:
    """Returns the chunks of a matrix relative to its start, ``inner`` of them side by side.

    Without ``transposed``, ``outer`` counts rows of m or n, and chunks go along k; with it,
    ``outer`` counts k, and chunks go along m or n.
    """
    leading, stride, base, swizzle = matrix
    row = np.arange(outer, dtype=np.int64)[:, None]
    chunk = np.arange(inner, dtype=np.int64)[None, :]
    width = swizzle.row_bytes
    group = 4 if swizzle is Swizzle.ROWS_128_ATOMS_32 and transposed else 8
    if not width:
        along, across = (stride, leading) if transposed else (leading, stride)
        offsets = row // 8 * across + row % 8 * CHUNK_BYTES + chunk * along
    elif transposed:
        per_row = width // CHUNK_BYTES
        offsets = (
            row // group * stride
            + row % group * width
            + chunk // per_row * leading
            + chunk % per_row * CHUNK_BYTES
        )
    else:
        offsets = row // group * stride + row % group * width + chunk * CHUNK_BYTES
    begin = phase - 128 * base
    found = swizzle(offsets + begin) - begin
    found.flags.writeable = False
    return found


def chunks_of_matrix(
    block: Block, matrix: MatrixDescriptor, outer: int, inner: int, *, transposed: bool
) -> npt.NDArray[np.int64]:
    """Returns the byte offsets of a matrix's 16-byte chunks, as ``(outer, inner)``.

    Raises:
        MemoryAccessError: If some lie outside shared memory.
    """
    layout = (matrix.leading, matrix.stride, matrix.base, matrix.swizzle)
    relative = _chunks(matrix.start % _PERIOD, layout, outer, inner, transposed)
    chunks = relative + (matrix.start - SHARED_BASE)
    block.check_shared(int(chunks.min()), CHUNK_BYTES, "reads a matrix at")
    block.check_shared(int(chunks.max()), CHUNK_BYTES, "reads a matrix at")
    return chunks


def read_matrix(block: Block, chunks: npt.NDArray[np.int64]) -> Bytes:
    """Returns the bytes of chunks ``(outer, inner)`` as ``(outer, 16 * inner)``."""
    return read_chunks(block, chunks.reshape(-1)).reshape(len(chunks), -1)
