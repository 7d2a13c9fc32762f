"""A digest of the bundles that this process uses, for the keys of compile caches.

Neither bundles nor Inductor are imported: every process that compiles asks for it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable

from ..settings import BUNDLES_VARIABLE
from .discover import BundleFile, find_bundles

_PREFIX_BYTES = 48
"""Size of `nvgemm_runtime.bundle.format.PREFIX`, which has the digest of all that follows."""

_UNUSABLE = b"unusable"
"""What a bundle adds that cannot be opened, whatever the reason, which may have paths in it."""

_opened: str | None = None
_seen: tuple[list[tuple[str, int]], tuple[BundleFile, ...], str] | None = None


def installed_digest() -> str:
    """Digest over the first bytes of every installed or named bundle.

    Until this process opens its bundles, it changes as soon as one is installed, removed or
    replaced. From then on it describes those that were opened.
    """
    global _seen
    if _opened is not None:
        return _opened
    if _seen is None or _seen[0] != _changes(_seen[1]):
        files = find_bundles()
        _seen = _changes(files), files, _digest(files)
    return _seen[2]


def has_bundles() -> bool:
    """Whether any bundle is installed or named, usable or not."""
    return installed_digest() != _NONE


def keep(files: Iterable[BundleFile]) -> None:
    """Describe these bundles from now on, because this process opens them and no others."""
    global _opened
    _opened = _digest(files)


def forget() -> None:
    """Look again, as a process that has just started."""
    global _opened, _seen
    _opened = _seen = None


def _digest(files: Iterable[BundleFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(b"bundle ")  # a file may be empty
        digest.update(_UNUSABLE if file.problem is not None else _identity(file.path))
    return digest.hexdigest()


_NONE = _digest(())


def _identity(path: os.PathLike[str]) -> bytes:
    """A bundle's first bytes."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(_PREFIX_BYTES)
    except OSError:
        return _UNUSABLE


def _changes(files: Iterable[BundleFile]) -> list[tuple[str, int]]:
    """When bundles, and the places where others may appear, last changed: nanoseconds, by path."""
    named = filter(None, os.environ.get(BUNDLES_VARIABLE, "").split(os.pathsep))
    paths = [*named, *sys.path, *(str(file.path) for file in files)]
    return [(path, _changed(path)) for path in paths]


def _changed(path: str) -> int:
    try:
        return os.stat(path or os.curdir).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0
