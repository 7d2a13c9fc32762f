"""Handwritten kernels for tests: the PTX around a body, and tensor maps."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from nvgemm_aot.emulator.machine.global_memory import GlobalMemory, Region
from nvgemm_aot.emulator.machine.launch import Launch, Schedule
from nvgemm_aot.emulator.machine.scheduler import Execution
from nvgemm_aot.emulator.ptx.parser import parse
from nvgemm_aot.emulator.run import execute

TYPES = {"u8": 0, "u32": 2, "s32": 3, "f16": 6, "f32": 7, "bf16": 10, "b4x16": 11, "b4x16_p64": 12}
_BITS = {
    "u8": 8,
    "u32": 32,
    "s32": 32,
    "f16": 16,
    "f32": 32,
    "bf16": 16,
    "b4x16": 4,
    "b4x16_p64": 4,
}
SWIZZLES = {0: (0, 0), 32: (1, 0), 64: (2, 0), 128: (3, 0), "atoms": (3, 1)}


def tensor_map(
    data: np.ndarray,
    kind: str,
    sizes: Sequence[int],
    box: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    swizzle: int | str = 0,
    nan: bool = False,
    interleave: int = 0,
    address: int | None = None,
) -> bytes:
    """Encodes the map of a tensor with packed dimensions, the contiguous one first.

    The tensor begins where the data do, or at another address, whose lowest 57 bits are kept.
    """
    if strides is None:
        packed = np.cumprod([_BITS[kind] / 8 * sizes[0], *sizes[1:-1]]).astype(int)
        strides = [int(each) for each in packed[: len(sizes) - 1]]
    mode, atom = SWIZZLES[swizzle]
    word = (len(sizes) - 1) << 4 | TYPES[kind] << 7 | interleave << 11 | mode << 13 | nan << 15
    word |= atom << 19
    low = [stride >> 4 & 0xFFFF_FFFF for stride in strides]
    low += [0] * (4 - len(low))
    extents = [size - 1 for size in sizes] + [0] * (5 - len(sizes))
    boxes = [size - 1 for size in box] + [0] * (5 - len(box))
    return struct.pack(
        "<QI4II5I4B4B",
        (data.ctypes.data if address is None else address) % (1 << 57),
        word,
        *low,
        0,
        *extents,
        0,
        0,
        0,
        boxes[0],
        *boxes[1:],
    ).ljust(128, b"\0")


def aligned(count: int, dtype: object = np.uint8, alignment: int = 128) -> np.ndarray:
    """Returns zeros at an aligned address."""
    size = count * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    begin = -raw.ctypes.data % alignment
    return raw[begin : begin + size].view(dtype)


def module(body: str, parameters: str = "", target: str = "sm_100a", shared: int = 65536) -> str:
    """Returns a kernel with 64 registers of each type and dynamic shared memory ``smem``."""
    return f"""
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({parameters})
{{
.reg .pred %p<64>;
.reg .b16 %h<64>;
.reg .b32 %r<300>;
.reg .b64 %d<64>;
.reg .b128 %q<8>;
{body}
ret;
}}
"""


def run(
    body: str,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    maps: Sequence[bytes] = (),
    pointers: Sequence[np.ndarray] = (),
    threads: int = 32,
    cluster: int = 1,
    clusters: int = 1,
    delay: int = 0,
    seed: int = 0,
    shared: int = 65536,
    readonly: Sequence[str] = (),
    workspaces: Sequence[str] = (),
    early: Sequence[str] = (),
    is_dependent: bool = False,
    ordering: object = None,
    target: str = "sm_100a",
) -> Execution:
    """Runs a body on tensors; its parameters are maps ``m0``, ... and pointers ``a0``, ..."""
    declared = [f".param .align 64 .b8 m{place}[128]" for place in range(len(maps))]
    declared += [f".param .u64 a{place}" for place in range(len(pointers))]
    program = parse(module(body, ", ".join(declared), target))
    regions = [
        Region(
            address=data.ctypes.data,
            data=data.reshape(-1).view(np.uint8),
            name=name,
            writable=name not in readonly,
            is_workspace=name in workspaces,
            is_early=name in early,
        )
        for name, data in (tensors or {}).items()
    ]
    launch = Launch(
        grid=(cluster * clusters, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        shared_bytes=shared,
        is_dependent=is_dependent,
        parameters=b"".join(maps)
        + b"".join(each.ctypes.data.to_bytes(8, "little") for each in pointers),
    )
    return execute(
        program, launch, GlobalMemory(regions), Schedule(seed=seed, delay=delay), ordering
    )
