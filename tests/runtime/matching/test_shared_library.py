"""What a library's file shows without being loaded: that it is whole, and what it exports."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from pathlib import Path

import pytest

from nvgemm_runtime.matching.shared_library import exported_symbols, missing_part
from synthetic_payload import shared_object

SOURCE = """
int foreign(void);
static int hidden(void) { return foreign(); }
int weak(void) __attribute__((weak));
int weak(void) { return hidden(); }
int value = 3;
__attribute__((visibility("hidden"))) int internal(void) { return value; }
int entry(void) { return weak() + internal(); }
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "library.so"
    path.write_bytes(shared_object(tmp_path, SOURCE, libraries=frozenset()))
    return path


def without_sections(library: Path) -> None:
    """Cut the section headers off, as ``llvm-strip --strip-sections`` does."""
    image = bytearray(library.read_bytes())
    (start,) = struct.unpack_from("<Q", image, 0x28)
    struct.pack_into("<Q", image, 0x28, 0)  # e_shoff
    struct.pack_into("<HHH", image, 0x3A, 0, 0, 0)  # e_shentsize, e_shnum, e_shstrndx
    library.write_bytes(image[:start])


def test_reads_what_is_defined_and_visible(library: Path) -> None:
    assert exported_symbols(library) == {"entry", "weak", "value"}


def test_a_library_that_is_cut_off_anywhere_lacks_something(library: Path) -> None:
    whole = library.read_bytes()
    assert missing_part(library) is None
    for size in range(0, len(whole), 61):
        library.write_bytes(whole[:size])
        assert "truncated" in str(missing_part(library))


def test_a_library_without_section_headers_is_whole_and_does_not_show_its_exports(
    tmp_path: Path,
) -> None:
    library = tmp_path / "library.so"
    source = "int entry(void) { return 7; }"
    library.write_bytes(shared_object(tmp_path, source, libraries=frozenset()))
    without_sections(library)
    assert missing_part(library) is None
    assert exported_symbols(library) is None
    assert ctypes.CDLL(str(library)).entry() == 7


def test_what_is_no_elf_file_is_refused(library: Path) -> None:
    library.write_bytes(b"#!/bin/sh\n".ljust(500))
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF"):
        exported_symbols(library)


def test_changed_bytes_never_crash(library: Path) -> None:
    whole = library.read_bytes()
    for place in [*range(64), *range(len(whole) - 2000, len(whole), 3)]:
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        library.write_bytes(changed)
        missing_part(library)
        with contextlib.suppress(ValueError):
            assert isinstance(exported_symbols(library), frozenset | None)
