"""Reads a launcher's host code: the launch, and the processor it needs.

`launch_signature` reads the launcher's text about its operands, which is the same for all
processors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nvgemm_runtime.gemm.target import PLATFORMS

from . import launch_code_aarch64

# mov qword ptr [base (+ index) + displacement], imm32: the launcher's store to the 64-bit field
# dynamicSmemBytes of cudaLaunchConfig_t. Base registers rsp and r12 need an index byte.
_STORE_64 = re.compile(
    rb"[\x48\x49]\xc7(?:[\x40-\x43\x45-\x47].|\x44..|[\x80-\x83\x85-\x87].{4}|\x84.{5})(.{4})",
    re.DOTALL,
)

# movabs r64, imm64: the first two extents, 32 bits each, of a cluster dimension attribute
# (cudaLaunchAttributeValue.clusterDim.x and .y in driver_types.h).
_MOVE_64 = re.compile(rb"[\x48\x49][\xb8-\xbf](.{4})(.{4})", re.DOTALL)

MAX_CLUSTER_EXTENT = 16
"""Most thread blocks in a cluster, if a kernel opts in to more than 8 (CUDA C++ Programming Guide,
thread block clusters)."""

# A move of a vector register: EVEX prefix (any registers, map 1), then its opcode.
_AVX512 = re.compile(
    rb"\x62[\x01\x11\x21\x31\x41\x51\x61\x71\x81\x91\xa1\xb1\xc1\xd1\xe1\xf1]"
    rb"[\x7c-\x7e\xfc-\xfe][\x08\x28\x48][\x10\x11\x28\x29\x6f\x7f]"
)
_VZEROUPPER = b"\xc5\xf8\x77"
"""Instruction that compilers put before calls in code that uses 256-bit registers."""


@dataclass(frozen=True)
class LaunchCode:
    """Readers for the launchers on a host platform.

    Attributes:
        stored: Returns 64-bit constants that may be stored as a number of bytes.
        pairs: Returns 64-bit constants that may be two extents side by side.
        extension: See `vector_extension`.
    """

    stored: Callable[[bytes], Iterable[int]]
    pairs: Callable[[bytes], Iterable[int]]
    extension: Callable[[bytes], str | None]


def launch_shared_bytes(code: bytes, platform: str = PLATFORMS[0]) -> int | None:
    """Returns the launch's dynamic shared memory in bytes per thread block, or None.

    The number is a constant in the launcher's code. In 96 kernels' objects (cutlass-dsl 4.8.1, all
    operator families) exactly one constant from 1 KiB to 1 MiB is stored to a 64-bit field, and it
    is this one. If a tensor map loads pairs of rows, as for weights in halves, another constant is
    part of the map: box extents less one, side by side, whose lowest byte is 1. Shared memory comes
    in 16-byte multiples, which TMA aligns to.

    Returns:
        Number of bytes, or None if the code does not show exactly one such constant.
    """
    stored = {*LAUNCH_CODE[platform].stored(code)} if platform in LAUNCH_CODE else set()
    plausible = {value for value in stored if 1 << 10 <= value <= 1 << 20 and value % 16 == 0}
    return plausible.pop() if len(plausible) == 1 else None


def launch_clusters(code: bytes, platform: str = PLATFORMS[0]) -> frozenset[tuple[int, int]]:
    """Returns the launcher's cluster dimensions (m, n), in thread blocks.

    Every launch sets its cluster dimension, 1 x 1 too; kernels with a fallback set both. In 124
    kernels (cutlass-dsl 4.8.1, all operator families) the 64-bit constants with both halves from 1
    to `MAX_CLUSTER_EXTENT` are exactly these.
    """
    constants = LAUNCH_CODE[platform].pairs(code) if platform in LAUNCH_CODE else ()
    return frozenset(
        (m, n)
        for m, n in ((value & 0xFFFFFFFF, value >> 32) for value in constants)
        if 1 <= m <= MAX_CLUSTER_EXTENT and 1 <= n <= MAX_CLUSTER_EXTENT
    )


def vector_extension(code: bytes) -> str | None:
    """Returns a processor extension beyond baseline x86-64 that the launcher shows signs of.

    cutlass-dsl 4.8.1 compiles host code for the build machine's processor. Functions with the
    attributes ``target_cpu`` and ``target_features`` are compiled for those instead.

    A sign proves that the code needs such a processor. The absence of signs proves nothing: this
    looks for compilers' traces (EVEX-encoded register moves; VZEROUPPER after 256-bit code), not at
    each instruction, which needs a disassembler for the host. Code with only 128-bit VEX
    instructions, BMI, FMA or AMX passes unseen.

    Returns:
        ``AVX-512``, ``AVX``, or None if the code shows no sign of either.
    """
    if _AVX512.search(code):
        return "AVX-512"
    return "AVX" if code.count(_VZEROUPPER) > 1 else None


def _stored_64(code: bytes) -> set[int]:
    return {int.from_bytes(constant, "little", signed=True) for constant in _STORE_64.findall(code)}


def _moved_64(code: bytes) -> set[int]:
    return {int.from_bytes(low + high, "little") for low, high in _MOVE_64.findall(code)}


LAUNCH_CODE = {
    "linux_x86_64": LaunchCode(stored=_stored_64, pairs=_moved_64, extension=vector_extension),
    "linux_aarch64": LaunchCode(
        stored=launch_code_aarch64.stored_constants,
        pairs=launch_code_aarch64.stored_constants,
        extension=launch_code_aarch64.extension,
    ),
}
"""Readers by host platform."""
