"""What the host code of a kernel says about its launch."""

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


def launch_shared_bytes(payload: bytes) -> int | None:
    """Dynamic shared memory that the launcher asks for, in bytes per thread block.

    The number is a constant in the launcher's code: in the objects of 96 kernels (cutlass-dsl
    4.8.1, all operator families) exactly one constant from 1 KiB to 1 MiB is stored to a 64-bit
    field, and it is this one.

    Returns:
        The number, or None where the code does not show exactly one such constant.
    """
    try:
        elf = open_elf(payload, sections=False)
        with reading("the host code"):
            code = [
                payload[part["p_offset"] : part["p_offset"] + part["p_filesz"]]
                for part in elf.iter_segments()
                if part["p_type"] == "PT_LOAD" and part["p_flags"] & _PF_X
            ]
    except MalformedElfError:
        return None
    stored = {
        int(struct.unpack("<i", constant)[0])
        for content in code
        for constant in _STORE_64.findall(content)
    }
    plausible = {value for value in stored if 1 << 10 <= value <= 1 << 20}
    return plausible.pop() if len(plausible) == 1 else None
