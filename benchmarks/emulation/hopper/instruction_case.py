"""One kernel in PTX whose result on a GPU confirms what the emulator makes of an instruction."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Random = np.random.Generator

NANS = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "bf16": np.uint16}
"""Types of results in which all NaN count as one, as their payloads are not specified."""


@dataclass(frozen=True, kw_only=True)
class TensorMapSpec:
    """A tensor map of the input or the output buffer.

    Attributes:
        buffer: ``input`` or ``output``.
        type: Value of `CUtensorMapDataType`; ``swizzle``, that of `CUtensorMapSwizzle`.
        sizes: Elements along each dimension, the contiguous one first.
        strides: Bytes along each dimension but the first.
        box: Elements of a copy.
        offset: Bytes from the buffer's begin.
        fills_nan: Whether NaN fills what lies outside.
    """

    buffer: str
    type: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    offset: int = 0
    fills_nan: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel with an input and an output buffer.

    Its body finds the input's address in ``%d0``, the output's in ``%d1``, the thread's number in
    its block in ``%r0`` and in the grid in ``%r3``, the block's in ``%r1``, and the address of
    dynamic shared memory in ``%r4``, and those of tensor maps in ``%d40``, ...

    Attributes:
        make: Makes the input from a seeded generator.
        output_bytes: Size of the output, which is filled with 0xAA first.
        result: Type of results for comparison: ``bits``, or a floating-point type.
        ulps: Units in the last place by which results may differ; None if that is only reported.
        threads: Threads of a block.
        blocks: Blocks of the grid; ``cluster``, of a cluster.
        shared: Bytes of dynamic shared memory.
    """

    name: str
    body: str
    make: Callable[[Random], npt.NDArray[Any]]
    output_bytes: int
    result: str = "bits"
    ulps: int | None = 0
    threads: int = 128
    blocks: int = 1
    cluster: int = 1
    shared: int = 65536
    maps: tuple[TensorMapSpec, ...] = ()

    def input(self) -> Bytes:
        """Returns the input's bytes, the same on every machine."""
        made = self.make(np.random.default_rng(zlib.crc32(self.name.encode())))
        return np.ascontiguousarray(made).reshape(-1).view(np.uint8)

    def ptx(self) -> str:
        """Returns the module's text."""
        declared = [f".param .align 64 .b8 m{place}[128]" for place in range(len(self.maps))]
        declared += [".param .u64 input", ".param .u64 output"]
        maps = "\n".join(
            f"mov.b64 %d{40 + place}, m{place}; cvta.param.u64 %d{40 + place}, %d{40 + place};"
            for place in range(len(self.maps))
        )
        return f"""
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({", ".join(declared)})
{{
.reg .pred %p<32>;
.reg .b16 %h<32>;
.reg .b32 %r<600>;
.reg .b64 %d<64>;
ld.param.b64 %d0, [input];
ld.param.b64 %d1, [output];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %ntid.x;
mad.lo.s32 %r3, %r1, %r2, %r0;
mov.b32 %r4, smem;
{maps}
{self.body}
ret;
}}
"""

    def fingerprint(self) -> str:
        """Returns a digest of the kernel and its input."""
        return hashlib.sha256(self.ptx().encode() + self.input().tobytes()).hexdigest()


def comparable(output: Bytes, result: str) -> npt.NDArray[Any]:
    """Returns a result as unsigned integers, with one NaN in place of all."""
    if result == "bits":
        return output
    bits = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16, "f64": np.uint64}[result]
    values: npt.NDArray[Any] = output.view(bits).copy()
    values[is_nan(values, result)] = np.iinfo(bits).max
    return values


def is_nan(bits: npt.NDArray[Any], result: str) -> npt.NDArray[np.bool_]:
    """Returns where bits of a floating-point type are NaN."""
    if result == "bf16":
        return (bits & 0x7FFF) > 0x7F80
    found: npt.NDArray[np.bool_] = np.isnan(bits.view(NANS[result]))
    return found


def ulps_between(first: npt.NDArray[Any], second: npt.NDArray[Any], result: str) -> int:
    """Returns the greatest distance of two results, in units in the last place."""
    a, b = (comparable(each, result) for each in (first, second))
    if result == "bits":
        return int((a != b).any())
    top = np.int64(1) << np.int64(8 * a.itemsize - 1)

    def ordered(bits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Returns integers in the order of the values, both zeros as 0."""
        wide = bits.astype(np.int64)
        return np.where(bits >> np.array(8 * bits.itemsize - 1, bits.dtype), top - wide, wide)

    return int(np.abs(ordered(a) - ordered(b)).max())
