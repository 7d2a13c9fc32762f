"""A build cache that only this user can change: the usual one, or a temporary one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from nvgemm_runtime.errors import StorageError

from . import temporary_directory
from .cache import Cache

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def private_cache(cache: Cache) -> Iterator[Cache]:
    """Yield the cache, or a temporary one if others could change what is put there.

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
            "the build cache is not used, for others could change kernels in it: %s; for all of "
            "it: chmod -R go-w %s",
            *(reason, cache.directory.absolute()),
        )
        yield temporary
    finally:
        temporary_directory.remove(directory)


def _refusal(cache: Cache) -> str | None:
    try:
        return cache.refusal()
    except OSError as error:
        raise StorageError(
            f"{cache.directory}: {error.strerror}; set NVGEMM_AOT_CACHE or --cache-dir to a "
            "directory of yours"
        ) from error
