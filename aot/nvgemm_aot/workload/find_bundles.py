"""Reads the headers of bundles that a user names, or that are installed. Loads no kernel."""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvgemm_runtime.bundle.format import MAGIC, MAX_HEADER_BYTES, PREFIX
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, StorageError
from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX
from nvgemm_runtime.installed.registry import INSTALLATION
from nvgemm_runtime.matching.index import BundleView

from ..storage.files import open_regular

_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OverflowError)
"""Errors that `zipfile` raises for a file that is no archive or is damaged."""


def read_bundles(paths: Sequence[Path]) -> list[BundleView]:
    """Read the headers of bundles, of directories of them, and of wheels of ``nvgemm-aot wheel``.

    Raises:
        BundleFormatError: If a bundle breaks a rule of the format.
        StorageError: If a path cannot be read or holds no bundle.
    """
    return [view for path in paths for view in _read_path(path)]


def installed_bundles() -> tuple[list[BundleView], list[str]]:
    """Bundles of wheels and of NVGEMM_AOT_BUNDLES, and why others of them cannot be used."""
    views, unusable = [], []
    for one in INSTALLATION.shipped_bundles():
        if one.bundle is None:
            unusable.append(f"{one.name}: {one.problem}")
        else:
            views.append(BundleView(name=one.name, header=one.bundle.header))
    return views, unusable


def _read_path(path: Path) -> Iterator[BundleView]:
    if path.is_dir():
        yield from _read_directory(path)
    elif path.suffix == ".whl":
        yield from _read_wheel(path)
    else:
        yield _read_header(path, str(path))


def _read_header(path: Path, name: str) -> BundleView:
    with Bundle(path) as bundle:
        return BundleView(name=name, header=bundle.header)


def _read_directory(path: Path) -> Iterator[BundleView]:
    try:
        files = sorted(file for file in path.iterdir() if file.suffix == BUNDLE_SUFFIX)
    except OSError as error:
        raise StorageError(f"{path}: cannot list it: {error.strerror}") from error
    if not files:
        raise _no_bundle(path)
    for file in files:
        yield _read_header(file, str(file))


def _read_wheel(path: Path) -> Iterator[BundleView]:
    try:
        with (
            open_regular(path) as archive,
            zipfile.ZipFile(archive) as wheel,
            tempfile.TemporaryDirectory() as directory,
        ):
            members = sorted(name for name in wheel.namelist() if name.endswith(BUNDLE_SUFFIX))
            if not members:
                raise _no_bundle(path)
            file = Path(directory) / "bundle"
            for member in members:
                _unpack_header(wheel, member, file)
                name = f"{path}/{member}"
                try:
                    yield _read_header(file, name)
                except BundleFormatError as error:
                    raise BundleFormatError(name, error.rule, error.message) from error
    except _DAMAGED as error:
        raise StorageError(f"{path}: not a whole wheel: {error}; build it again") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot unpack it: {error.strerror or error}") from error


def _unpack_header(wheel: zipfile.ZipFile, member: str, file: Path) -> None:
    """Unpack only the header of a bundle; the rest of the file becomes a hole of its size."""
    with wheel.open(member) as packed, file.open("wb") as unpacked:
        start = packed.read(PREFIX.size)
        unpacked.write(start)
        if len(start) == PREFIX.size and start.startswith(MAGIC):
            _, _, header_bytes, _ = PREFIX.unpack(start)
            if header_bytes <= MAX_HEADER_BYTES:
                unpacked.write(packed.read(header_bytes))
        unpacked.truncate(wheel.getinfo(member).file_size)


def _no_bundle(path: Path) -> StorageError:
    return StorageError(f"{path}: holds no {BUNDLE_SUFFIX} file; name a bundle, or build one")
