"""Opening ELF images that may be damaged or hostile: every failure is one kind of error."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator
from typing import Any

from elftools.common.exceptions import DWARFError, ELFError
from elftools.construct.core import ConstructError
from elftools.elf.elffile import ELFFile

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
"""Elf64_Ehdr of the System V ABI, little-endian: 64 bytes."""

MAGIC = b"\x7fELF\x02\x01\x01"
"""First bytes of every 64-bit little-endian ELF file of the current version."""

PROGRAM_HEADER_BYTES = 56
SECTION_HEADER_BYTES = 64

MAX_IMAGE_BYTES = 16 << 20
"""Largest image that is looked at. Kernels seen are 40 to 110 KB; a bound keeps work bounded."""

MAX_PROGRAM_HEADERS = 64
MAX_SECTIONS = 1024
MAX_SYMBOLS = 4096
"""Bounds on tables. Kernels seen have 9 program headers, 26 sections and 17 symbols."""

_READING_ERRORS = (
    ELFError,
    DWARFError,
    ConstructError,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What pyelftools was seen, or is written, to let through on malformed input."""


class MalformedElfError(Exception):
    """An image is not the ELF file it should be; the message says where."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn every error of reading ``what`` into `MalformedElfError`."""
    try:
        yield
    except MalformedElfError:
        raise
    except _READING_ERRORS as error:
        raise MalformedElfError(
            f"{what} cannot be read as ELF: {type(error).__name__}: {error}"
        ) from error


def open_elf(data: bytes) -> Any:
    """Open a 64-bit little-endian ELF image whose tables lie inside it.

    Args:
        data: The image.

    Returns:
        A pyelftools ``ELFFile``; use it inside `reading`.

    Raises:
        MalformedElfError: If the image is no such file, or a table is too long or outside it.
    """
    with reading("the image"):
        header = HEADER.unpack_from(data)
        ident, program_offset, section_offset = header[0], header[5], header[6]
        program_bytes, program_count, section_bytes, section_count = header[9:13]
        if ident[:7] != MAGIC:
            raise MalformedElfError(
                f"the image starts with {ident[:7]!r}, a 64-bit little-endian ELF file with "
                f"{MAGIC!r}"
            )
        if len(data) > MAX_IMAGE_BYTES:
            raise MalformedElfError(f"the image has {len(data)} bytes, at most {MAX_IMAGE_BYTES}")
        _check_table(
            "program header",
            program_count,
            MAX_PROGRAM_HEADERS,
            program_bytes,
            PROGRAM_HEADER_BYTES,
            program_offset,
            len(data),
        )
        _check_table(
            "section header",
            section_count,
            MAX_SECTIONS,
            section_bytes,
            SECTION_HEADER_BYTES,
            section_offset,
            len(data),
        )
        return ELFFile(io.BytesIO(data))


def _check_table(
    name: str, count: int, most: int, bytes_each: int, right: int, offset: int, limit: int
) -> None:
    if not 1 <= count <= most:
        raise MalformedElfError(f"the image has {count} {name}s, allowed are 1 to {most}")
    if bytes_each != right:
        raise MalformedElfError(f"a {name} has {bytes_each} bytes, must have {right}")
    if offset + count * bytes_each > limit:
        raise MalformedElfError(
            f"the {name}s end at byte {offset + count * bytes_each}, the image at {limit}"
        )
