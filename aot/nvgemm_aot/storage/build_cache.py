"""Build cache: files named by the digest of everything that determines their content.

An entry is its payload's sha256 followed by the payload, so that a reader notices damage. An entry
counts as absent if it is damaged, or if users other than this one and root could have written it:
entries hold native code. Entries are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.bundle.format import canonical_json
from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.installed.jit_cache import default_directory
from nvgemm_runtime.installed.ownership import path_writable_by_others, writable_by_others

from . import temporary_directory
from .files import require_writable, sweep_partials, write_atomic

__all__ = ["Cache", "cache_key", "default_directory"]

_log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size

_KEY = re.compile(r"[0-9a-f]{64}")


def cache_key(kind: str, inputs: object) -> str:
    """Returns the name of the entry that ``inputs`` determine. They can be any JSON value."""
    return hashlib.sha256(canonical_json([kind, inputs])).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """A cache entry whose digest has been checked."""

    payload: bytes
    sha256: str


class Cache:
    """A directory of entries. Safe for concurrent processes, because entries never change.

    The first write creates the directory. A quiet cache does not warn of entries that others could
    have written.
    """

    def __init__(self, directory: Path, *, quiet: bool = False) -> None:
        self.directory = directory
        self._quiet = quiet

    def path(self, key: str) -> Path:
        """Returns an entry's path. The entry need not exist.

        Raises:
            ValueError: If the key is not one that `cache_key` could return.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key[:100]!r} is no key of the build cache: it needs 64 hex digits")
        return self.directory / "entries" / key[:2] / key

    @property
    def lock_directory(self) -> Path:
        """Directory for lock files only."""
        return self.directory / "locks"

    def lock_path(self, name: str) -> Path:
        """Returns a lock file's path; see `locks`."""
        return self.lock_directory / name

    def get(self, key: str) -> bytes | None:
        """Returns an entry's payload; see `read`."""
        entry = self.read(key)
        return None if entry is None else entry.payload

    def read(self, key: str) -> CacheEntry | None:
        """Reads an entry, or returns None if it is absent, damaged, or writable by others.

        Raises:
            StorageError: If the entry exists and cannot be read.
        """
        try:
            refusal = writable_by_others(self.path(key).absolute())
            data = b"" if refusal else self.path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"{self.path(key)}: cannot read: {error.strerror}") from error
        if refusal is not None:
            if not self._quiet:
                _warn_of_others(self.directory, refusal)
            return None
        digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            return None
        with contextlib.suppress(OSError):
            os.utime(self.path(key))  # the least recently used is evicted first
        return CacheEntry(payload=payload, sha256=digest.hex())

    def has(self, key: str) -> bool:
        """Returns True if an entry exists that only this user could write; it may be damaged."""
        try:
            return writable_by_others(self.path(key).absolute()) is None
        except OSError:
            return False

    def put(self, key: str, payload: bytes, *, is_durable: bool = True) -> None:
        """Stores an entry; see `write_atomic` for ``is_durable``.

        Raises:
            StorageError: If the cache cannot be written.
        """
        data = hashlib.sha256(payload).digest() + payload
        write_atomic(self.path(key), data, is_durable=is_durable)

    def put_if_possible(self, key: str, payload: bytes) -> None:
        """Stores an entry if the cache is writable."""
        with contextlib.suppress(StorageError):
            self.put(key, payload)

    def refusal(self) -> str | None:
        """Returns how others could change this cache's entries, or None if they cannot.

        Raises:
            OSError: If the directories cannot be inspected.
        """
        folder = self.directory.absolute() / "entries"
        if not folder.is_dir():
            while not folder.exists():
                folder = folder.parent
            return writable_by_others(folder)
        folders = (
            path_writable_by_others(path) for path in list(folder.iterdir()) if path.is_dir()
        )
        return writable_by_others(folder) or next(filter(None, folders), None)

    def require_writable(self) -> None:
        """Fails early if the cache is not writable; sweeps leftovers from killed builds.

        Raises:
            StorageError: If the directory is not writable, with the way to name another.
        """
        try:
            require_writable(self.directory / "entries")
        except StorageError as error:
            raise StorageError(
                f"the build cache is not writable: {error}; "
                "set NVGEMM_AOT_CACHE or --cache-dir to a writable directory"
            ) from error
        for directory in self.directory.glob("entries/*"):
            sweep_partials(directory)


_warned = False


def _warn_of_others(directory: Path, refusal: str) -> None:
    """Warns once per process that entries are not used."""
    global _warned
    if not _warned:
        _warned = True
        _log.warning(
            "ignoring cached kernels that others could have changed: %s; to fix all of them, run: "
            "chmod -R go-w %s",
            *(refusal, directory.absolute()),
        )


def entry_files(directory: Path) -> Iterator[Path]:
    """Yields a cache directory's entry files; skips folders that vanish or cannot be read."""
    for folder, _, names in os.walk(directory / "entries"):
        yield from (Path(folder, name) for name in names)


@contextlib.contextmanager
def private_cache(cache: Cache) -> Iterator[Cache]:
    """Yields the cache, or a temporary one if others could change its entries.

    Raises:
        StorageError: If the cache cannot be read, or the temporary one is not private either.
    """
    reason = _refusal(cache)
    if reason is None:
        yield cache
        return
    directory = temporary_directory.make(in_memory=False)
    try:
        temporary = Cache(directory)
        if (other := _refusal(temporary)) is not None:
            raise StorageError(
                f"others could change compiled kernels, in the cache ({reason}) and in the "
                f"directory for temporary files ({other}); set NVGEMM_AOT_CACHE or TMPDIR to a "
                "directory that only you can write"
            )
        _log.warning(
            "the build cache is not used, because others could change its kernels: %s; to fix all "
            "of it, run: chmod -R go-w %s",
            *(reason, cache.directory.absolute()),
        )
        yield temporary
    finally:
        temporary_directory.remove(directory)


def require_private(cache: Cache) -> None:
    """Requires that nobody else could change a cache's entries.

    Raises:
        StorageError: If others could, or the cache cannot be read.
    """
    reason = _refusal(cache)
    if reason is not None:
        raise StorageError(
            f"{cache.directory}: others could change the kernels in this cache: {reason}; run "
            f"chmod -R go-w {cache.directory.absolute()}, or set NVGEMM_AOT_CACHE or --cache-dir "
            "to a directory that only you can write"
        )


def _refusal(cache: Cache) -> str | None:
    try:
        return cache.refusal()
    except OSError as error:
        raise StorageError(
            f"{cache.directory}: {error.strerror}; set NVGEMM_AOT_CACHE or --cache-dir to a "
            "directory that you own"
        ) from error
