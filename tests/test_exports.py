"""Exported symbols, read from a file that nobody loads."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from nvgemm_runtime.exports import exported_symbols
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


def test_reads_what_is_defined_and_visible(library: Path) -> None:
    assert exported_symbols(library) == {"entry", "weak", "value"}


def test_a_library_that_is_cut_off_anywhere_is_refused(library: Path) -> None:
    whole = library.read_bytes()
    for size in range(0, len(whole), 61):
        library.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut off"):
            exported_symbols(library)


def test_what_is_no_elf_file_is_refused(library: Path) -> None:
    library.write_bytes(b"#!/bin/sh\n".ljust(500))
    with pytest.raises(ValueError, match="no 64-bit little-endian ELF"):
        exported_symbols(library)


def test_changed_bytes_never_crash(library: Path) -> None:
    whole = library.read_bytes()
    for place in [*range(64), *range(len(whole) - 2000, len(whole), 3)]:
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        library.write_bytes(changed)
        with contextlib.suppress(ValueError):
            assert isinstance(exported_symbols(library), frozenset)
