"""Whether a library's file is whole: loading one that was cut off kills the process (SIGBUS)."""

from __future__ import annotations

import os
import struct
from pathlib import Path

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
"""Elf64_Ehdr and Elf64_Phdr of elf.h."""


def missing_part(path: Path) -> str | None:
    """What a shared object lacks of what its own headers say, or None where it is whole.

    A file of another kind lacks nothing: the loader refuses it by itself.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        head = file.read(_HEADER.size)
        if head[: len(_ELF64_LITTLE_ENDIAN)] != _ELF64_LITTLE_ENDIAN[: len(head)]:
            return None
        needed_bytes = _HEADER.size
        if len(head) == _HEADER.size:
            fields = _HEADER.unpack(head)
            programs_at, sections_at = fields[5], fields[6]
            program_bytes, programs, section_bytes, sections = fields[9:13]
            needed_bytes = max(
                programs_at + program_bytes * programs, sections_at + section_bytes * sections
            )
            if program_bytes == _PROGRAM_HEADER.size and needed_bytes <= size_bytes:
                file.seek(programs_at)
                table = file.read(program_bytes * programs)
                for segment in _PROGRAM_HEADER.iter_unpack(table):
                    needed_bytes = max(needed_bytes, segment[2] + segment[5])
    if needed_bytes <= size_bytes:
        return None
    return f"it is cut off: {size_bytes} bytes, its headers need {needed_bytes}"
