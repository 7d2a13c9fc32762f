"""Finds named or installed bundles and reads headers. Loads no kernel."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.bundle.format import MAGIC, MAX_HEADER_BYTES, PAGED_VERSION, PREFIX
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, NvgemmError, StorageError
from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX
from nvgemm_runtime.installed.policy_checks import check_bundle
from nvgemm_runtime.installed.registry import INSTALLATION
from nvgemm_runtime.installed.signatures import (
    MAX_FILE_BYTES,
    SIGNATURE_SUFFIX,
    signature_path,
)
from nvgemm_runtime.matching.matches import BundleView

from ..storage.files import open_regular

_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OverflowError)
"""Errors from `zipfile` for a file that is no archive or is damaged."""


@dataclass(frozen=True, kw_only=True)
class NamedBundle:
    """Bundle found under a path.

    Attributes:
        name: Name in messages: its path, or its wheel's path followed by the member's.
        file: File with the bundle's bytes; its signature file is beside it, if it has one.
    """

    name: str
    file: Path

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Puts the bundle's name in place of the file's in format errors."""
        try:
            yield
        except BundleFormatError as error:
            raise BundleFormatError(self.name, error.rule, error.message) from error


def read_bundles(paths: Sequence[Path]) -> list[BundleView]:
    """Reads headers from bundles, kernel wheels, and directories of either.

    Raises:
        BundleFormatError: If a bundle breaks a format rule.
        SignatureError: If the policy refuses a bundle.
        StorageError: If a path cannot be read or holds no bundle.
    """
    return [
        _read_header(bundle) for path in without_runtime(paths) for bundle in find_bundles(path)
    ]


def without_runtime(paths: Sequence[Path]) -> Sequence[Path]:
    """Drops runtime wheels, which ``dist/*.whl`` matches, unless nothing else remains."""
    return [path for path in paths if not _is_runtime(path)] or paths


def _is_runtime(path: Path) -> bool:
    return path.suffix == ".whl" and path.name.startswith("nvgemm_aot-")


def find_bundles(path: Path, *, headers_only: bool = True) -> Iterator[NamedBundle]:
    """Yields the bundles in a file, directory or wheel; each file lasts until the next one.

    Args:
        path: Bundle, kernel wheel, or a directory with either.
        headers_only: Unpack only headers from wheels; a hole of the same size replaces the rest.

    Raises:
        StorageError: If the path cannot be read or holds no bundle.
    """
    if path.is_dir():
        yield from _find_in_directory(path, headers_only)
    elif path.suffix == ".whl":
        yield from _find_in_wheel(path, headers_only)
    else:
        yield NamedBundle(name=str(path), file=path)


def installed_bundles() -> tuple[list[BundleView], list[str]]:
    """Returns bundles from wheels and NVGEMM_AOT_BUNDLES, and reasons for unusable ones."""
    views, unusable = [], []
    for shipped in INSTALLATION.shipped_bundles():
        if shipped.bundle is None:
            unusable.append(f"{shipped.name}: {shipped.problem}")
        else:
            try:
                views.append(BundleView(name=shipped.name, header=shipped.bundle.header))
            except NvgemmError as error:  # damaged pages
                unusable.append(f"{shipped.name}: {error}")
    return views, unusable


def _read_header(named: NamedBundle) -> BundleView:
    with named.named_in_errors(), Bundle(named.file) as bundle:
        check_bundle(named.file, bundle.prefix, name=named.name)
        return BundleView(name=named.name, header=bundle.header)


def _find_in_directory(path: Path, headers_only: bool) -> Iterator[NamedBundle]:
    """Yields a directory's bundles or, without any, those in its kernel wheels."""
    try:
        files = sorted(path.iterdir())
    except OSError as error:
        raise StorageError(f"{path}: cannot list it: {error.strerror}") from error
    bundles = [file for file in files if file.suffix == BUNDLE_SUFFIX]
    wheels = [file for file in files if file.suffix == ".whl" and not _is_runtime(file)]
    if not (bundles or wheels):
        raise _no_bundle(path)
    for file in bundles or wheels:
        yield from find_bundles(file, headers_only=headers_only)


def _find_in_wheel(path: Path, headers_only: bool) -> Iterator[NamedBundle]:
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
                if headers_only:
                    _unpack_header(wheel, member, file)
                else:
                    with wheel.open(member) as packed, file.open("wb") as unpacked:
                        shutil.copyfileobj(packed, unpacked)
                _unpack_signatures(wheel, member, file)
                yield NamedBundle(name=f"{path}/{member}", file=file)
    except _DAMAGED as error:
        raise StorageError(f"{path}: incomplete wheel: {error}; build it again") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot unpack it: {error.strerror or error}") from error


def _unpack_header(wheel: zipfile.ZipFile, member: str, file: Path) -> None:
    """Unpacks only a bundle's header; the rest of the file becomes a hole of its size.

    A header in pages is unpacked with the rest, as only its root says where it ends.
    """
    with wheel.open(member) as packed, file.open("wb") as unpacked:
        start = packed.read(PREFIX.size)
        unpacked.write(start)
        if len(start) == PREFIX.size and start.startswith(MAGIC):
            _, version, header_bytes, _ = PREFIX.unpack(start)
            if version == PAGED_VERSION:
                shutil.copyfileobj(packed, unpacked)
            elif header_bytes <= MAX_HEADER_BYTES:
                unpacked.write(packed.read(header_bytes))
        unpacked.truncate(wheel.getinfo(member).file_size)


def _unpack_signatures(wheel: zipfile.ZipFile, member: str, file: Path) -> None:
    """Unpacks a bundle's signature file, cut where it is too long, beside the bundle."""
    beside = signature_path(file)
    beside.unlink(missing_ok=True)
    name = f"{member}{SIGNATURE_SUFFIX}"
    if name in wheel.NameToInfo:
        with wheel.open(name) as packed:
            beside.write_bytes(packed.read(MAX_FILE_BYTES + 1))


def _no_bundle(path: Path) -> StorageError:
    return StorageError(f"{path}: holds no {BUNDLE_SUFFIX} file; name a bundle or a wheel with one")
