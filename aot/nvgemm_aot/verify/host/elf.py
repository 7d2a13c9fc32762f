"""Opens ELF images; every read error becomes a `MalformedElfError`."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator
from typing import Any

from elftools.elf.elffile import ELFFile

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
"""Elf64_Ehdr in the System V ABI, little-endian: 64 bytes."""

MAGIC = b"\x7fELF\x02\x01\x01"
"""First bytes in every 64-bit little-endian ELF file, current version."""


def cubin_bytes(header: tuple[Any, ...]) -> int:
    """Returns a cubin's size in bytes, from its `HEADER`.

    The tables follow all contents: ptxas writes sections, then both tables.
    """
    return int(max(header[5] + header[9] * header[10], header[6] + header[11] * header[12]))


class MalformedElfError(Exception):
    """Invalid ELF image; the message says where."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns every error in reading ``what`` into `MalformedElfError`."""
    try:
        yield
    except MalformedElfError:
        raise
    except Exception as error:  # pyelftools raises whatever its parsing raises
        raise MalformedElfError(
            f"{what} cannot be read as ELF: {type(error).__name__}: {error}"
        ) from error


def open_elf(data: bytes) -> Any:
    """Opens a 64-bit little-endian ELF image as a pyelftools ``ELFFile``; use it inside `reading`.

    Raises:
        MalformedElfError: If the image is no such file.
    """
    if not data.startswith(MAGIC):
        raise MalformedElfError(
            f"the image starts with {data[: len(MAGIC)]!r}, a 64-bit little-endian ELF file with "
            f"{MAGIC!r}"
        )
    with reading("the image"):
        return ELFFile(io.BytesIO(data))
