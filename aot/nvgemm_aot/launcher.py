"""What the host code of a kernel, its launcher, shows: the launch, and the processor it needs."""

from __future__ import annotations

import re
import struct

from .elf_reading import MalformedElfError, open_elf, reading

_PF_X = 0x1

# mov qword ptr [base (+ index) + displacement], imm32: how the launcher stores the 64-bit field
# dynamicSmemBytes of cudaLaunchConfig_t. Base registers rsp and r12 need an index byte.
_STORE_64 = re.compile(
    rb"[\x48\x49]\xc7(?:[\x40-\x43\x45-\x47].|\x44..|[\x80-\x83\x85-\x87].{4}|\x84.{5})(.{4})",
    re.DOTALL,
)


# A move of a vector register: EVEX prefix (any registers, map 1), then its opcode.
_AVX512 = re.compile(
    rb"\x62[\x01\x11\x21\x31\x41\x51\x61\x71\x81\x91\xa1\xb1\xc1\xd1\xe1\xf1]"
    rb"[\x7c-\x7e\xfc-\xfe][\x08\x28\x48][\x10\x11\x28\x29\x6f\x7f]"
)
_VZEROUPPER = b"\xc5\xf8\x77"
"""What compilers write before a call from code that uses 256-bit registers."""


def launch_shared_bytes(payload: bytes) -> int | None:
    """Dynamic shared memory that the launcher asks for, in bytes per thread block.

    The number is a constant in the launcher's code: in the objects of 96 kernels (cutlass-dsl
    4.8.1, all operator families) exactly one constant from 1 KiB to 1 MiB is stored to a 64-bit
    field, and it is this one.

    Returns:
        The number, or None where the code does not show exactly one such constant.
    """
    stored = {
        int(struct.unpack("<i", constant)[0]) for constant in _STORE_64.findall(_code(payload))
    }
    plausible = {value for value in stored if 1 << 10 <= value <= 1 << 20}
    return plausible.pop() if len(plausible) == 1 else None


def vector_extension(payload: bytes) -> str | None:
    """Extension beyond what every x86-64 processor has that the launcher uses.

    cutlass-dsl 4.8.1 compiles host code for the processor of the build machine. Functions that
    carry the attributes ``target_cpu`` and ``target_features`` are compiled for those instead.

    Returns:
        ``AVX-512``, ``AVX``, or None where the code shows no sign of either.
    """
    code = _code(payload)
    if _AVX512.search(code):
        return "AVX-512"
    return "AVX" if code.count(_VZEROUPPER) > 1 else None


def _code(payload: bytes) -> bytes:
    """All executable segments, or nothing where the payload cannot be read."""
    try:
        elf = open_elf(payload, sections=False)
        with reading("the host code"):
            return b"".join(
                payload[part["p_offset"] : part["p_offset"] + part["p_filesz"]]
                for part in elf.iter_segments()
                if part["p_type"] == "PT_LOAD" and part["p_flags"] & _PF_X
            )
    except MalformedElfError:
        return b""
