"""What is found out about the libraries that kernels are loaded beside."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from test_shared_library import without_sections

from nvgemm_runtime.bundle.imported_symbols import DEVICE_SYMBOLS, FFI_SYMBOLS
from nvgemm_runtime.matching import device
from nvgemm_runtime.matching.device import (
    RUNTIME_LIBRARY,
    RuntimeLibrary,
    find_ffi_exports,
    find_runtime_library,
    inspect_library,
)
from nvgemm_runtime.matching.refusals import reinstall_command
from synthetic_payload import shared_object


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the package nvidia_cutlass_dsl."""
    spec = ModuleSpec("nvidia_cutlass_dsl", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: spec)
    find_runtime_library.cache_clear()
    yield tmp_path
    find_runtime_library.cache_clear()


def found() -> RuntimeLibrary:
    library = find_runtime_library("cu13")
    assert library is not None
    return library


def put(package: Path, folder: str, *functions: str) -> Path:
    path = package / folder / RUNTIME_LIBRARY
    path.parent.mkdir(parents=True)
    source = "".join(f"int {name}(void) {{ return 0; }}" for name in functions)
    path.write_bytes(shared_object(package, source, libraries=frozenset()))
    return path


def test_the_installed_libraries_export_what_kernels_import() -> None:
    library = found()
    assert library.defect is None
    assert (library.exports or set()) >= DEVICE_SYMBOLS
    assert (find_ffi_exports() or set()) >= FFI_SYMBOLS


def test_nothing_is_found_in_a_package_without_the_library(package: Path) -> None:
    assert find_runtime_library("cu13") is None


@pytest.mark.parametrize("folder", ["lib", "cu13/lib"])
def test_the_library_is_found_where_any_release_puts_it(package: Path, folder: str) -> None:
    path = put(package, folder, "first", "second")
    assert (found().path, found().exports) == (path, {"first", "second"})


def test_the_folder_of_the_cuda_version_comes_first(package: Path) -> None:
    put(package, "lib", "old")
    put(package, "cu13/lib", "new")
    assert found().exports == {"new"}


def test_a_library_of_another_cuda_version_is_not_taken(package: Path) -> None:
    put(package, "cu12/lib", "other")
    assert find_runtime_library("cu13") is None


@pytest.mark.parametrize(("more_bytes", "refused"), [(0, False), (8, True)])
def test_a_library_that_the_other_cuda_version_s_package_replaced_is_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more_bytes: int, refused: bool
) -> None:
    """Release 4.5 has one path for both, which whatever is installed last writes."""
    path = put(tmp_path / "nvidia_cutlass_dsl", "lib", "first")
    size = path.stat().st_size
    info = tmp_path / "nvidia_cutlass_dsl_libs_cu13-4.5.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: nvidia-cutlass-dsl-libs-cu13\nVersion: 4.5.2\n")
    (info / "RECORD").write_text(f"nvidia_cutlass_dsl/lib/{RUNTIME_LIBRARY},,{size}\n")
    path.write_bytes(path.read_bytes() + bytes(more_bytes))
    monkeypatch.syspath_prepend(tmp_path)
    library = inspect_library(path, "cu13")
    assert library.version == "4.5.2"
    assert (library.defect is not None, library.exports is None) == (refused, refused)
    if refused:
        assert f"it has {size + 8} bytes, must have {size}" in str(library.defect)
        command = reinstall_command(library)
        assert command.endswith("--no-deps 'nvidia-cutlass-dsl-libs-cu13==4.5.2'")


def test_a_library_that_is_cut_off_is_found_with_its_defect(package: Path) -> None:
    path = put(package, "cu13/lib", "first")
    path.write_bytes(path.read_bytes()[:-100])
    assert found().exports is None
    assert "truncated" in str(found().defect)


def test_a_library_that_does_not_show_its_exports_counts_as_fitting(package: Path) -> None:
    without_sections(put(package, "cu13/lib", "first"))
    assert (found().exports, found().defect) == (None, None)


def test_what_is_no_library_is_found_with_its_defect(package: Path) -> None:
    put(package, "cu13/lib", "first").write_text("no library")
    assert found().defect == "not a 64-bit little-endian ELF file"
