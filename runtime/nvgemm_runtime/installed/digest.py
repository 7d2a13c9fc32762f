"""Digest of this process's bundles and confirmations, for compile cache keys.

Imports neither bundles nor Inductor: every compiling process needs it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable

from ..errors import StorageError
from ..settings import BUNDLES_VARIABLE, POLICY_VARIABLE
from .confirmed_files import confirmed_directory, find_confirmed, read_bytes
from .discover import PREFIX_BYTES, BundleFile, find_bundles

_UNUSABLE = b"unusable"
"""Digest input for a bundle that cannot be opened. It omits the reason, which may contain paths."""

_opened: str | None = None
_seen: tuple[list[tuple[str, int]], tuple[BundleFile, ...], str] | None = None


def installed_digest() -> str:
    """Returns a digest over the first bytes of every bundle, and over all confirmations.

    Until this process opens its bundles, the digest changes as soon as a bundle or confirmations
    are installed, removed or replaced. From then on it describes the opened ones. Confirmations
    without bundles change nothing.
    """
    global _seen
    if _opened is not None:
        return _opened
    if _seen is None or _seen[0] != _modification_times(_seen[1]):
        bundles = find_bundles()
        confirmed = find_confirmed(bundles) if bundles else ()
        files = (*bundles, *confirmed)
        _seen = _modification_times(files), files, _digest(bundles, map(read_bytes, confirmed))
    return _seen[2]


def has_bundles() -> bool:
    """Returns True if any bundle is installed or named, usable or not."""
    return installed_digest() != _EMPTY_DIGEST


def keep(bundles: Iterable[BundleFile], confirmed: Iterable[bytes | None] = ()) -> None:
    """Fixes the digest to these bundles and confirmations, because this process opens no others.

    Args:
        bundles: Bundles.
        confirmed: Content of files with confirmations; None for unusable ones.
    """
    global _opened
    _opened = _digest(bundles, confirmed)


def forget() -> None:
    """Resets the digest, as in a process that has just started."""
    global _opened, _seen
    _opened = _seen = None


def _digest(bundles: Iterable[BundleFile], confirmed: Iterable[bytes | None] = ()) -> str:
    digest = hashlib.sha256()
    for file in bundles:
        digest.update(b"bundle ")  # a file may be empty
        digest.update(_first_bytes(file))
    for data in confirmed:
        digest.update(b"confirmed ")
        digest.update(_UNUSABLE if data is None else hashlib.sha256(data).digest())
    return digest.hexdigest()


_EMPTY_DIGEST = _digest(())


def _first_bytes(file: BundleFile) -> bytes:
    """Returns a bundle's first bytes."""
    if file.problem is not None:
        return _UNUSABLE
    if file.checked_prefix:
        return file.checked_prefix
    try:
        with file.path.open("rb") as opened:
            return opened.read(PREFIX_BYTES)
    except OSError:
        return _UNUSABLE


def _modification_times(files: Iterable[BundleFile]) -> list[tuple[str, int]]:
    """Returns modification times of bundles and their possible locations: path, nanoseconds."""
    named_paths = filter(None, os.environ.get(BUNDLES_VARIABLE, "").split(os.pathsep))
    paths = [*named_paths, *_user_directory(), *sys.path, *(str(file.path) for file in files)]
    if policy := os.environ.get(POLICY_VARIABLE):
        # A file that is signed later counts from then on.
        from .signatures import SIGNATURE_SUFFIX

        paths += [policy, *(f"{file.path}{SIGNATURE_SUFFIX}" for file in files)]
    return [(path, _modified_ns(path)) for path in paths]


def _user_directory() -> list[str]:
    """Returns the directory with this user's confirmations, if the user has any."""
    try:
        return [str(confirmed_directory())]
    except StorageError:
        return []


def _modified_ns(path: str) -> int:
    try:
        return os.stat(path or os.curdir).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0
