"""Checks a shared library file without loading it: completeness and exported symbols.

Loading a truncated file kills the process (SIGBUS).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
"""Elf64_Ehdr, Elf64_Phdr, Elf64_Shdr and Elf64_Sym from elf.h."""

_SHT_DYNSYM = 11
_STB_LOCAL = 0

_MAX_TABLE_BYTES = 16 << 20
"""Largest symbol or string table that is read; runtime libraries have a few KiB."""


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Table in a file, with entries of equal length.

    Attributes:
        offset: Offset in the file, in bytes.
        entry_bytes: Entry length.
        count: Number of entries.
    """

    offset: int
    entry_bytes: int
    count: int

    @property
    def size_bytes(self) -> int:
        """Table length."""
        return self.entry_bytes * self.count

    @property
    def end(self) -> int:
        """Offset of the first byte after the table."""
        return self.offset + self.size_bytes


def missing_part(path: Path) -> str | None:
    """Describes how a shared object is truncated, by its own headers; None if it is complete.

    Returns None for other file types, which the loader itself refuses.

    Raises:
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        head = file.read(_HEADER.size)
        if head[: len(_ELF64_LITTLE_ENDIAN)] != _ELF64_LITTLE_ENDIAN[: len(head)]:
            return None
        needed_bytes = _HEADER.size
        if len(head) == _HEADER.size:
            programs, sections = _tables(head)
            needed_bytes = max(programs.end, sections.end)
            if programs.entry_bytes == _PROGRAM_HEADER.size and needed_bytes <= size_bytes:
                file.seek(programs.offset)
                table = file.read(programs.size_bytes)
                for segment in _PROGRAM_HEADER.iter_unpack(table):
                    needed_bytes = max(needed_bytes, segment[2] + segment[5])
    if needed_bytes <= size_bytes:
        return None
    return f"it is truncated: {size_bytes} bytes, its headers need {needed_bytes}"


def exported_symbols(path: Path) -> frozenset[str] | None:
    """Returns the symbols that a shared library exports, from its dynamic symbol table.

    Returns:
        Symbol names; None if section headers do not lead to the table. Loaders do not need them.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a 64-bit little-endian ELF file.
    """
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_ELF64_LITTLE_ENDIAN):
            raise ValueError("not a 64-bit little-endian ELF file")
        _, table = _tables(head)
        if table.entry_bytes != _SECTION_HEADER.size:
            return None
        sections = list(_SECTION_HEADER.iter_unpack(_read(file, table.offset, table.size_bytes)))
        for section in sections:
            kind, offset, size_bytes, link = section[1], section[4], section[5], section[6]
            if kind == _SHT_DYNSYM and link < len(sections):
                names = _read(file, sections[link][4], sections[link][5])
                symbols = _read(file, offset, size_bytes - size_bytes % _SYMBOL.size)
                return frozenset(_defined(symbols, names)) if names and symbols else None
    return None


def _tables(head: bytes) -> tuple[_Table, _Table]:
    """Returns the program header and section header tables."""
    fields = _HEADER.unpack(head)
    return (
        _Table(offset=fields[5], entry_bytes=fields[9], count=fields[10]),
        _Table(offset=fields[6], entry_bytes=fields[11], count=fields[12]),
    )


def _defined(symbols: bytes, names: bytes) -> Iterator[str]:
    for name, info, _, section, _, _ in _SYMBOL.iter_unpack(symbols):
        if section and info >> 4 != _STB_LOCAL:
            yield names[name : names.find(b"\0", name)].decode("ascii", "replace")


def _read(file: BinaryIO, offset: int, size_bytes: int) -> bytes:
    """Returns part of a file; empty if the file is too short or the part too large."""
    if size_bytes > _MAX_TABLE_BYTES or offset + size_bytes > os.fstat(file.fileno()).st_size:
        return b""
    file.seek(offset)
    return file.read(size_bytes)
