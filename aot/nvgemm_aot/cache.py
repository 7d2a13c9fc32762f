"""The build cache: files named by the digest of everything that determines their content.

An entry is its payload's sha256 followed by the payload, so damage is noticed when it is read; a
damaged entry counts as absent. Entries are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.format import canonical_json
from nvgemm_runtime.jit_cache import default_directory

from .storage import require_writable, sweep_partials, write_atomic

__all__ = ["Cache", "cache_key", "default_directory"]

_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_key(kind: str, inputs: object) -> str:
    """Name of the entry that is determined by ``inputs`` (anything JSON can say)."""
    return hashlib.sha256(canonical_json([kind, inputs])).hexdigest()


class Cache:
    """A directory of entries. Safe for many processes at once: entries never change.

    Attributes:
        directory: Where the entries are; created when first written to.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: str) -> Path:
        """Where the entry called ``key`` is or would be."""
        return self.directory / "entries" / key[:2] / key

    def lock_path(self, name: str) -> Path:
        """The lock file of this name; see `locks`."""
        return self.directory / "locks" / name

    def get(self, key: str) -> bytes | None:
        """Payload of an entry, or None where it is absent or damaged.

        Raises:
            StorageError: If the entry exists and cannot be read.
        """
        try:
            data = self.path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"{self.path(key)}: cannot read: {error.strerror}") from error
        digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            return None
        with contextlib.suppress(OSError):
            os.utime(self.path(key))  # what was not used for longest is evicted first
        return payload

    def has(self, key: str) -> bool:
        """Whether an entry exists; it may yet be damaged."""
        return self.path(key).exists()

    def put(self, key: str, payload: bytes) -> None:
        """Store an entry.

        Raises:
            StorageError: If the cache cannot be written.
        """
        write_atomic(self.path(key), hashlib.sha256(payload).digest() + payload)

    def put_if_possible(self, key: str, payload: bytes) -> None:
        """Store an entry that is only a convenience: a cache that cannot be written is no error."""
        with contextlib.suppress(StorageError):
            self.put(key, payload)

    def require_writable(self) -> None:
        """Fail now rather than after hours of compiling, and sweep what killed builds left behind.

        Raises:
            StorageError: If the directory cannot be written, with how to name another.
        """
        try:
            require_writable(self.directory / "entries")
        except StorageError as error:
            raise StorageError(
                f"the build cache is not writable: {error}; "
                "set NVGEMM_AOT_CACHE or --cache-dir to a directory that is"
            ) from error
        for directory in self.directory.glob("entries/*"):
            sweep_partials(directory)
