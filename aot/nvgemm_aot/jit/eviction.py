"""Lists the cache directory, and evicts the least recently used content beyond its limit.

Builds have no limit: only run-time compiling evicts, after it has added something.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, NvgemmError, StorageError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX
from nvgemm_runtime.installed.jit_cache import generation_path, jit_directory, stamp_path
from nvgemm_runtime.settings import CACHE_LIMIT_VARIABLE, printable

from ..storage.build_cache import Cache, entry_files
from ..storage.files import write_atomic
from ..storage.locks import acquire
from .user_bundle import SuspectBundleError, damaged_files, remove_problems, require_own

_log = logging.getLogger(__name__)

DEFAULT_LIMIT_BYTES = 1 << 30

_IN_USE_SECONDS = 60
"""Time after its last use during which content stays: a process may be about to read it."""

_BUILD_SECONDS = 6 * 3600
"""Age in seconds below which compiled kernels stay: a running build may read them again."""

_FREED_SHARE = 0.1
"""Share of the limit that is freed beyond the excess, so that not every new kernel evicts an old
one."""

_SIZE = re.compile(r"(\d{1,18})([KMGT]?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file in the cache, with its last use in seconds since 1970."""

    path: Path
    size_bytes: int
    used_at: float


@dataclass(frozen=True, kw_only=True)
class CachedProblem:
    """A problem in a user bundle, with its kernels' stored sizes in bytes, by id.

    ``used_at`` is its last use, in seconds since 1970.
    """

    problem: Problem
    kernels: dict[str, int]
    used_at: float


@dataclass(frozen=True, kw_only=True)
class CachedBundle:
    """A user bundle, or the reason why it is unusable; ``device`` is its profile's device."""

    file: StoredFile
    target: str | None = None
    device: str | None = None
    problems: tuple[CachedProblem, ...] = ()
    error: str | None = None

    @property
    def kernels(self) -> int:
        """Number of kernels."""
        return len({id_ for problem in self.problems for id_ in problem.kernels})


@dataclass(frozen=True, kw_only=True)
class CacheUsage:
    """Content of a cache directory.

    Attributes:
        directory: The cache directory.
        entries: Compiled kernels and plans.
        bundles: User bundles, by path.
        damaged: User bundles that were moved aside, oldest first.
    """

    directory: Path
    entries: tuple[StoredFile, ...]
    bundles: tuple[CachedBundle, ...]
    damaged: tuple[StoredFile, ...]

    @property
    def size_bytes(self) -> int:
        """Total size, in bytes."""
        files = (*self.entries, *(bundle.file for bundle in self.bundles), *self.damaged)
        return sum(file.size_bytes for file in files)


def read_usage(cache: Cache) -> CacheUsage:
    """Lists a cache directory, which need not exist. Omits files that vanish meanwhile."""
    directory = jit_directory(cache.directory)
    bundles = sorted(directory.glob(f"*{BUNDLE_SUFFIX}"))
    return CacheUsage(
        directory=cache.directory,
        entries=tuple(_stored_files(entry_files(cache.directory))),
        bundles=tuple(_cached_bundle(cache, file) for file in _stored_files(bundles)),
        damaged=tuple(_stored_files(damaged_files(directory))),
    )


def _stored_files(paths: Iterable[Path]) -> Iterator[StoredFile]:
    """Yields the files that have not vanished meanwhile."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            yield StoredFile(path=path, size_bytes=status.st_size, used_at=status.st_mtime)


def _cached_bundle(cache: Cache, file: StoredFile) -> CachedBundle:
    try:
        require_own(file.path)
        with Bundle(file.path) as bundle:
            header = bundle.header
    except NvgemmError as error:
        return CachedBundle(file=file, error=str(error))
    sizes = [kernel.span.stored_bytes for kernel in header.kernels]
    return CachedBundle(
        file=file,
        target=header.target.key,
        device=header.device,
        problems=tuple(
            CachedProblem(
                problem=ranking.problem,
                kernels={
                    header.kernels[ranked.kernel].id: sizes[ranked.kernel]
                    for ranked in ranking.kernels
                },
                used_at=_used_at(cache, ranking.problem, file),
            )
            for ranking in header.rankings
        ),
    )


def _used_at(cache: Cache, problem: Problem, bundle: StoredFile) -> float:
    with contextlib.suppress(OSError):
        return stamp_path(cache.directory, problem).stat().st_mtime
    return bundle.used_at


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """Files and user bundle problems to drop from a cache directory."""

    files: tuple[Path, ...] = ()
    problems: Mapping[Path, Collection[Problem]] = field(default_factory=dict)


def limit_bytes() -> int:
    """Returns the user's limit in bytes, or the default; warns of an invalid value."""
    text = os.environ.get(CACHE_LIMIT_VARIABLE)
    match = _SIZE.fullmatch((text or "").strip())
    if match is not None:
        return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")
    if text is not None:
        _log.warning(
            "%s=%s: must be a number of bytes, or one followed by K, M, G or T; taken as %d",
            *(CACHE_LIMIT_VARIABLE, printable(text), DEFAULT_LIMIT_BYTES),
        )
    return DEFAULT_LIMIT_BYTES


def enforce(cache: Cache) -> None:
    """Evicts the least recently used content if the cache directory exceeds its limit.

    Does nothing if the directory cannot be written or while another process evicts.
    """
    with contextlib.suppress(StorageError):
        lock = acquire(cache.lock_path("limit"), wait=False)
        if lock is None:
            return
        try:
            evict(cache, select_over_limit(read_usage(cache), limit_bytes(), time.time()))
        finally:
            lock.release()


def select_over_limit(usage: CacheUsage, limit: int, now: float) -> Eviction:
    """Selects content to drop so that a cache fits its limit.

    ``limit`` is in bytes, ``now`` in seconds since 1970.
    """
    excess = usage.size_bytes - limit
    if excess <= 0:
        return Eviction()
    excess += round(limit * _FREED_SHARE)
    files: list[Path] = []
    problems: dict[Path, set[Problem]] = {}
    holders = {
        bundle.file.path: Counter(id_ for entry in bundle.problems for id_ in entry.kernels)
        for bundle in usage.bundles
    }
    items: list[tuple[CachedBundle | None, StoredFile | CachedProblem]] = [
        *((None, file) for file in (*usage.entries, *usage.damaged)),
        *((bundle, entry) for bundle in usage.bundles for entry in bundle.problems),
    ]
    for bundle, item in sorted(items, key=lambda item: item[1].used_at):
        if excess <= 0 or now - item.used_at < _IN_USE_SECONDS:
            break
        if isinstance(item, StoredFile):
            if now - item.used_at < _BUILD_SECONDS:
                continue
            files.append(item.path)
            excess -= item.size_bytes
            continue
        assert bundle is not None  # every problem has its bundle
        path = bundle.file.path
        problems.setdefault(path, set()).add(item.problem)
        for id_, size_bytes in item.kernels.items():
            holders[path][id_] -= 1
            excess -= size_bytes * (holders[path][id_] == 0)
    return Eviction(files=tuple(files), problems=problems)


def select_requested(
    usage: CacheUsage, *, problems: Collection[Problem] = (), used_before: float | None = None
) -> Eviction:
    """Selects the content that a person asked to remove.

    Args:
        usage: The cache's content.
        problems: Problems to remove; empty for all problems, compiled kernels and plans.
        used_before: Upper bound for the last use, in seconds since 1970, or None for no bound.
    """

    def is_old(item: StoredFile | CachedProblem) -> bool:
        return used_before is None or item.used_at < used_before

    unreadable = (bundle.file for bundle in usage.bundles if bundle.error is not None)
    files = () if problems else (*usage.entries, *usage.damaged, *unreadable)
    chosen = {
        bundle.file.path: {
            entry.problem
            for entry in bundle.problems
            if is_old(entry) and (not problems or entry.problem in problems)
        }
        for bundle in usage.bundles
    }
    return Eviction(
        files=tuple(file.path for file in files if is_old(file)),
        problems={path: selected for path, selected in chosen.items() if selected},
    )


def evict(cache: Cache, eviction: Eviction) -> None:
    """Drops selected content. Leaves a damaged bundle to the next process that compiles.

    Raises:
        StorageError: If a user bundle cannot be replaced.
    """
    for file in eviction.files:
        with contextlib.suppress(OSError):
            file.unlink()
    for path, problems in eviction.problems.items():
        with contextlib.suppress(BundleFormatError, SuspectBundleError):
            remove_problems(cache, path, problems)
    if eviction.problems:
        # Torch's caches must not return graphs that call an evicted kernel.
        write_atomic(generation_path(cache.directory), secrets.token_hex(8).encode())
    _remove_stamps(cache, {p for problems in eviction.problems.values() for p in problems})


def _remove_stamps(cache: Cache, problems: set[Problem]) -> None:
    if not problems:
        return
    cached = {entry.problem for bundle in read_usage(cache).bundles for entry in bundle.problems}
    for problem in problems - cached:
        with contextlib.suppress(OSError):
            stamp_path(cache.directory, problem).unlink()
