"""Tensor maps: the 128 bytes that tell a bulk copy where a tensor lies and how to read it.

`cuTensorMapEncodeTiled` documents the fields and their limits. Their places are those that ptxas
writes to for `tensormap.replace` (PTX ISA, "tensormap.replace", "Tensors").
"""

from __future__ import annotations

import enum
import functools
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...emulation_errors import EmulationError

MAP_BYTES = 128
MAP_ALIGNMENT = 64
"""Alignment of a tensor map in bytes (`CUtensorMap`)."""


@dataclass(frozen=True, kw_only=True)
class ElementType:
    """A type of elements.

    Attributes:
        name: Name in PTX.
        memory_bits: Bits of an element in global memory.
        shared_bits: Bits of an element in shared memory.
        floating: True if NaN can fill what lies outside the tensor.
    """

    name: str
    memory_bits: int
    shared_bits: int
    floating: bool = False


_TYPES = {
    code: ElementType(name=name, memory_bits=memory, shared_bits=shared, floating=floating)
    for code, name, memory, shared, floating in (
        (0, "u8", 8, 8, False),
        (1, "u16", 16, 16, False),
        (2, "u32", 32, 32, False),
        (3, "s32", 32, 32, False),
        (4, "u64", 64, 64, False),
        (5, "s64", 64, 64, False),
        (6, "f16", 16, 16, True),
        (7, "f32", 32, 32, True),
        (8, "f32.ftz", 32, 32, True),
        (9, "f64", 64, 64, True),
        (10, "bf16", 16, 16, True),
        (11, "b4x16", 4, 4, False),
        (12, "b4x16_p64", 4, 8, False),
        (13, "b6x16_p32", 6, 8, False),
    )
}

_NAN = b"\xf7\x7f"
"""Bytes that an H100 repeats for NaN."""

_PADDED_BOX = 128
"""Elements along the first dimension of a box whose elements are padded to bytes."""


class Swizzle(enum.Enum):
    """Patterns in which a copy exchanges chunks of 16 or 32 bytes within rows of shared memory.

    Each value is the row's bytes, the chunk's bytes, and how far the address bits that are added
    lie above the chunk's number.
    """

    NONE = (0, 16, 0)
    ROWS_32 = (32, 16, 3)
    ROWS_64 = (64, 16, 3)
    ROWS_128 = (128, 16, 3)
    ROWS_128_ATOMS_32 = (128, 32, 2)
    ROWS_128_ATOMS_64 = (128, 64, 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, or 0."""
        return self.value[0]

    def __call__(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the addresses that chunks at these addresses get."""
        row, chunk, distance = self.value
        if not row:
            return addresses
        return addresses ^ ((addresses >> distance) & (row - chunk))


_SWIZZLES = {
    (0, 0): Swizzle.NONE,
    (1, 0): Swizzle.ROWS_32,
    (2, 0): Swizzle.ROWS_64,
    (3, 0): Swizzle.ROWS_128,
    (3, 1): Swizzle.ROWS_128_ATOMS_32,
    (3, 3): Swizzle.ROWS_128_ATOMS_64,
}


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A tensor map in tiled mode.

    Attributes:
        address: Address of the tensor's first element.
        type: Type of elements.
        sizes: Elements along each dimension, the contiguous one first.
        strides: Bytes from one element to the next, along each dimension but the first.
        box: Elements of a copy along each dimension.
        swizzle: Pattern in shared memory.
        fills_nan: True if NaN fills what lies outside, not 0.
    """

    address: int
    type: ElementType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle
    fills_nan: bool

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def row_bytes(self) -> int:
        """Bytes in shared memory of a box's row."""
        return self.box[0] * self.type.shared_bits // 8

    @property
    def fill(self) -> bytes:
        """An element of shared memory that lies outside the tensor: 0 or a NaN, as on an H100."""
        size = max(1, self.type.shared_bits // 8)
        return (_NAN * 4)[:size] if self.fills_nan else bytes(size)


@functools.lru_cache(maxsize=1024)
def decode_tensor_map(data: bytes) -> TensorMap:
    """Decodes a tensor map and checks it.

    Raises:
        EmulationError: If a field has a value that it must not have, or that is not supported.
    """
    address, kind = struct.unpack_from("<QI", data)
    low = struct.unpack_from("<4I", data, 0x0C)
    high = struct.unpack_from("<I", data, 0x1C)[0]
    sizes = struct.unpack_from("<5I", data, 0x20)
    steps, *outer_box = struct.unpack_from("<I4B", data, 0x34)
    rank = (kind >> 4 & 7) + 1
    if rank > 5:
        raise _wrong("rank", rank, "1 to 5")
    if (code := kind >> 7 & 15) not in _TYPES:
        raise _wrong("element type", code, "0 to 13")
    if kind >> 11 & 3:
        raise _wrong("interleave layout", kind >> 11 & 3, "0; others are not supported")
    swizzle = _SWIZZLES.get((kind >> 13 & 3, kind >> 19 & 3))
    if swizzle is None:
        raise _wrong("swizzle mode and atom", (kind >> 13 & 3, kind >> 19 & 3), "a known pair")
    found = TensorMap(
        address=address,
        type=_TYPES[code],
        sizes=tuple(size + 1 for size in sizes[:rank]),
        strides=tuple(
            (low[place] | (high >> 4 * place & 15) << 32) << 4 for place in range(rank - 1)
        ),
        box=tuple(extent + 1 for extent in (steps >> 24, *outer_box)[:rank]),
        swizzle=swizzle,
        fills_nan=bool(kind >> 15 & 1),
    )
    for dimension in range(rank):
        if steps >> 3 * dimension & 7 not in (0, 1):
            raise _wrong(f"traversal stride {dimension}", steps >> 3 * dimension & 7, "1")
    _check(found)
    return found


def _check(found: TensorMap) -> None:
    padded = found.type.shared_bits != found.type.memory_bits
    alignment = 32 if padded else 16
    if found.address % alignment:
        raise _wrong("address", hex(found.address), f"a multiple of {alignment}")
    for dimension, stride in enumerate(found.strides, 1):
        if stride % alignment:
            raise _wrong(f"stride {dimension}", stride, f"a multiple of {alignment}")
    if padded and found.box[0] != _PADDED_BOX:
        raise _wrong("box size 0", found.box[0], f"{_PADDED_BOX} of padded elements")
    if padded and found.sizes[0] % _PADDED_BOX:
        raise _wrong("size 0", found.sizes[0], f"a multiple of {_PADDED_BOX}")
    if found.type.memory_bits < 8 and not padded and found.sizes[0] % 2:
        raise _wrong("size 0", found.sizes[0], "even")
    bits = found.box[0] * found.type.shared_bits
    if bits % 128:
        raise _wrong("row of a box", f"{bits} bits", "a multiple of 16 bytes")
    if found.swizzle.row_bytes and found.row_bytes > found.swizzle.row_bytes:
        raise _wrong("row of a box", found.row_bytes, f"at most {found.swizzle.row_bytes} bytes")
    if found.fills_nan and not found.type.floating:
        raise _wrong("fill mode", "NaN", f"0 for {found.type.name}")


def _wrong(field: str, value: object, allowed: str) -> EmulationError:
    return EmulationError(f"the tensor map's {field} is {value}, must be {allowed}")
