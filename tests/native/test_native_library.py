"""The file of the native launcher: what it needs and what it shows."""

from __future__ import annotations

import importlib.resources
import io
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from forked_scripts import ForkedScripts
from nvgemm_aot.pipeline.linker import c_compiler
from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.launch.loading.native import ABI
from nvgemm_runtime.matching.shared_library import missing_part


def _library() -> ELFFile:
    resource = importlib.resources.files("nvgemm_runtime").joinpath("_native.so")
    return ELFFile(io.BytesIO(resource.read_bytes()))


def test_the_library_needs_only_what_every_process_has() -> None:
    tags = list(_library().get_section_by_name(".dynamic").iter_tags())
    needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    assert needed <= {
        "libtorch_cpu.so",
        "libtvm_ffi.so",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "libpthread.so.0",
        "ld-linux-x86-64.so.2",  # named in wheels that zig built
    }
    assert {"libtorch_cpu.so", "libtvm_ffi.so"} <= needed
    assert not {tag.entry.d_tag for tag in tags} & {"DT_RPATH", "DT_RUNPATH"}


def test_the_library_exports_only_what_is_looked_up() -> None:
    symbols = _library().get_section_by_name(".dynsym").iter_symbols()
    exported = {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"}
    exported.remove("nvgemm_aot_operators_abi")  # by generated code
    assert exported
    assert all(name.startswith("__tvm_ffi_") for name in exported)


def test_the_library_loads_with_old_systems() -> None:
    """Of manylinux_2_28: glibc 2.28, and the C++ library of GCC 8."""
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
    section = _library().get_section_by_name(".gnu.version_r")
    for _, versions in section.iter_versions():
        for version in versions:
            family, _, number = version.name.partition("_")
            wanted = tuple(int(part) for part in number.split("."))
            assert wanted <= newest.get(family, wanted), version.name


def test_importing_the_module_loads_nothing() -> None:
    script = "import nvgemm_runtime.launch.loading.native, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def _load_from(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda package: directory)
    native._load()


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolchainError, match=r"_native.so is missing.*pip install"):
        _load_from(tmp_path, monkeypatch)


def test_a_damaged_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_native.so").write_bytes(b"not a library")
    with pytest.raises(ToolchainError, match=r"_native.so does not load with torch .*2\.11 to"):
        _load_from(tmp_path, monkeypatch)


CUT_ANYWHERE = """
import importlib.resources, pathlib, sys
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.errors import ToolchainError
directory = pathlib.Path(sys.argv[1])
library = directory / "_native.so"
whole = importlib.resources.files("nvgemm_runtime").joinpath("_native.so").read_bytes()
importlib.resources.files = lambda package: directory
for percent in range(0, 100, 5):
    library.write_bytes(whole[: len(whole) * percent // 100])
    try:
        native._load()
    except ToolchainError as error:
        print(percent, error, flush=True)
library.write_bytes(whole[:-1])
try:
    native._load()
except ToolchainError as error:
    print(100, error)
library.write_bytes(whole)
native._load()
"""


def test_a_library_that_is_cut_off_anywhere_is_named_and_kills_no_process(
    scripts: ForkedScripts, tmp_path: Path
) -> None:
    done = scripts.run(CUT_ANYWHERE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(0, 101, 5))
    for line in lines:
        assert "_native.so cannot be loaded: it is truncated: " in line
        assert "run: pip install --force-reinstall --no-deps . in nvgemm-aot's checkout" in line


@pytest.mark.parametrize("field", ["programs", "sections", "segment"])
def test_offsets_behind_the_end_are_no_reason_to_read_there(tmp_path: Path, field: str) -> None:
    resource = importlib.resources.files("nvgemm_runtime").joinpath("_native.so")
    image = bytearray(resource.read_bytes())
    (table,) = struct.unpack_from("<Q", image, 32)  # e_phoff
    place = {"programs": 32, "sections": 40, "segment": table + 8}[field]
    struct.pack_into("<Q", image, place, 2**64 - 8)
    (tmp_path / "library.so").write_bytes(image)
    assert "headers need 18446744073" in str(missing_part(tmp_path / "library.so"))


def test_whole_libraries_lack_nothing_nor_do_files_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"not a library")
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = [Path(path) for path in mapped if ".so" in path and Path(path).is_file()]
    assert libraries
    assert [missing_part(path) for path in [tmp_path / "text", *libraries]] == [
        None for _ in [tmp_path / "text", *libraries]
    ]


def test_a_library_of_another_version_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "old.c"
    source.write_text(
        "int __tvm_ffi_abi(void *self, void *arguments, int count, int *result)"
        "{ result[0] = 1; result[2] = 99; result[3] = 0; return 0; }"
    )
    command = [*c_compiler(), "-shared", "-fPIC", "-o", tmp_path / "_native.so", source]
    subprocess.run(command, check=True)
    with pytest.raises(ToolchainError, match=f"operators of version 99, this package needs {ABI}"):
        _load_from(tmp_path, monkeypatch)


ZEROS = """
import importlib.resources, pathlib, sys
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.errors import ToolchainError
installed = importlib.resources.files("nvgemm_runtime")
directory = pathlib.Path(sys.argv[1])
digest = installed.joinpath("_native.so.sha256").read_text()
(directory / "_native.so.sha256").write_text(digest)
whole = installed.joinpath("_native.so").read_bytes()
importlib.resources.files = lambda package: directory
for percent in range(5, 100, 15):
    start = len(whole) * percent // 100
    damaged = whole[:start] + bytes(4096) + whole[start + 4096 :]
    (directory / "_native.so").write_bytes(damaged[: len(whole)])
    try:
        native._load()
    except ToolchainError as error:
        print(percent, error, flush=True)
(directory / "_native.so").write_bytes(whole)
native._load()
"""


def test_a_library_with_zeros_inside_is_named_and_kills_no_process(
    scripts: ForkedScripts, tmp_path: Path
) -> None:
    done = scripts.run(ZEROS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(5, 100, 15))
    for line in lines:
        assert "_native.so cannot be loaded: it is damaged or from another version: " in line
        assert "pip install --force-reinstall --no-deps ." in line
