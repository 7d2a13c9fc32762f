"""Which symbols a shared library exports, read from its file without loading it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_PREFIX = struct.Struct("<4sBB58x")
_E_SHOFF, _E_SHENTSIZE = 0x28, 0x3A
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_DYNSYM = 11
_STB_LOCAL = 0
_MAX_TABLE_BYTES = 16 << 20
"""Largest symbol or string table that is read; those of the runtime libraries have a few KiB."""


def exported_symbols(path: Path) -> frozenset[str]:
    """Names that a shared library defines for others, from its dynamic symbol table.

    The section headers, which say where the table is, lie at the end of the files that linkers
    write: a file that was cut off is noticed here, before a loader maps it.

    Args:
        path: A 64-bit little-endian ELF file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no such file, or cut off.
    """
    with path.open("rb") as file:
        prefix = _read(file, 0, _PREFIX.size)
        magic, bits, order = _PREFIX.unpack(prefix)
        if (magic, bits, order) != (b"\x7fELF", 2, 1):
            raise ValueError("no 64-bit little-endian ELF file")
        (start,) = struct.unpack_from("<Q", prefix, _E_SHOFF)
        entry_bytes, count = struct.unpack_from("<HH", prefix, _E_SHENTSIZE)
        if entry_bytes != _SECTION.size or not count:
            raise ValueError("it has no section headers")
        sections = list(_SECTION.iter_unpack(_read(file, start, count * entry_bytes)))
        for section in sections:
            if section[1] == _SHT_DYNSYM:
                _, _, _, _, offset, size, link, _, _, _ = section
                if link >= count:
                    raise ValueError(f"its symbols name section {link}, there are {count}")
                names = _read(file, sections[link][4], sections[link][5])
                table = _read(file, offset, size - size % _SYMBOL.size)
                return frozenset(_defined(table, names))
    raise ValueError("it has no dynamic symbols")


def _defined(table: bytes, names: bytes) -> list[str]:
    return [
        names[name : names.find(b"\0", name)].decode("ascii", "replace")
        for name, info, _, section, _, _ in _SYMBOL.iter_unpack(table)
        if section and info >> 4 != _STB_LOCAL
    ]


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(0, 2)
    length = file.tell()
    if offset + size > length:
        raise ValueError(f"it is cut off: {length} bytes, a table needs {offset + size}")
    if size > _MAX_TABLE_BYTES:
        raise ValueError(f"a table has {size} bytes, at most {_MAX_TABLE_BYTES} are read")
    file.seek(offset)
    return file.read(size)
