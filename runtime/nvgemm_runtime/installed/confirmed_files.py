"""Finds and reads files with confirmations: this user's, named ones, and those in kernel wheels.

Finding imports no bundle code, as `digest` needs it in every compiling process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NvgemmError, SignatureError, StorageError
from ..settings import BUNDLES_VARIABLE, CONFIRMED_VARIABLE, POLICY_VARIABLE, printable_path
from .discover import (
    CONFIRMED_SUFFIX,
    BundleFile,
    files_at,
    named_paths,
    owned_file,
    user_directory,
)
from .regular_files import read_regular

if TYPE_CHECKING:
    from ..bundle.confirmations import Confirmations

_LARGEST_READ = (16 << 20) + 1
"""Bytes to read from a file: one more than `bundle.confirmations.MAX_BYTES`."""


def confirmed_directory() -> Path:
    """Returns ``$NVGEMM_AOT_CONFIRMED``, else ``nvgemm-aot`` in the user's configuration (XDG).

    Raises:
        StorageError: If the user has no home directory and no variable names another directory.
    """
    try:
        return user_directory(CONFIRMED_VARIABLE, "XDG_CONFIG_HOME", ".config")
    except RuntimeError as error:
        raise StorageError(
            f"no directory for confirmations: {error}; set {CONFIRMED_VARIABLE}, or name a file"
        ) from error


def confirmed_name(gpu: str, torch: str, cuda: str) -> str:
    """Returns the file name for a GPU product, a torch version and its CUDA version.

    Versions of torch that differ after the minor number share a name.
    """
    parts = (gpu, "torch", *re.findall(r"\d+", torch)[:2], "cuda", cuda)
    slug = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
    return f"{slug}{CONFIRMED_SUFFIX}"


def find_confirmed(bundles: Iterable[BundleFile]) -> tuple[BundleFile, ...]:
    """Finds the files with confirmations, each once, in order of preference.

    The order: this user's directory, NVGEMM_AOT_BUNDLES, the kernel wheels among ``bundles``. A
    file outside wheels that others can write has that as its problem, like a bundle: confirmations
    decide which code runs.
    """
    files_by_path: dict[str, BundleFile] = {}
    in_wheels = (
        BundleFile(path=path, origin=bundle.origin, problem=None)
        for bundle in bundles
        for path in bundle.confirmed_files
    )
    for file in (*_user_files(), *_named_files(), *in_wheels):
        files_by_path.setdefault(os.path.realpath(file.path), file)
    return tuple(files_by_path.values())


def _user_files() -> Iterator[BundleFile]:
    try:
        directory = confirmed_directory().absolute()
        files = files_at(directory, CONFIRMED_SUFFIX) if directory.is_dir() else []
    except (StorageError, OSError):
        return
    yield from (owned_file(file, "this user's confirmations") for file in files)


def _named_files() -> Iterator[BundleFile]:
    for path in named_paths():
        try:
            files = files_at(path, CONFIRMED_SUFFIX)
        except OSError:
            continue  # reported where bundles are looked for
        for file in files:
            if file.name.endswith(CONFIRMED_SUFFIX):
                yield owned_file(file, BUNDLES_VARIABLE)


@dataclass(frozen=True, kw_only=True)
class ConfirmedFile:
    """File with confirmations, read if usable.

    Attributes:
        path: File path.
        origin: Distribution and version that contain it, or the directory or variable that names
            it.
        data: Content; None if it cannot or must not be read.
        confirmations: Decoded content; None if it cannot be used.
        problem: Reason that it cannot be used, with the next step, or None.
    """

    path: Path
    origin: str
    data: bytes | None
    confirmations: Confirmations | None
    problem: str | None


def read_bytes(file: BundleFile) -> bytes | None:
    """Returns a file's content, or None if it cannot or must not be read."""
    return _read(file)[0]


def _read(file: BundleFile) -> tuple[bytes | None, str | None]:
    """Returns a file's content, or None and the reason."""
    if file.problem is not None:
        return None, file.problem
    try:
        data = read_regular(file.path, _LARGEST_READ)
    except (OSError, StorageError):
        name = printable_path(file.path)
        return None, f"{name}: cannot be read; remove it, or run: nvgemm-aot confirm"
    if os.environ.get(POLICY_VARIABLE):
        from .policy_checks import check_file  # not in processes without a policy

        try:
            check_file(file.path, data)
        except SignatureError as error:
            return None, str(error)
    return data, None


def read_confirmed(file: BundleFile) -> ConfirmedFile:
    """Reads a file; a fault becomes its problem."""
    from ..bundle.confirmations import decode_confirmations  # not in every compiling process

    data, problem = _read(file)
    confirmations = None
    if data is not None:
        try:
            confirmations = decode_confirmations(data, printable_path(file.path))
        except NvgemmError as error:
            problem = str(error)
    return ConfirmedFile(
        path=file.path, origin=file.origin, data=data, confirmations=confirmations, problem=problem
    )
