"""What is in a cache directory, how large it is, and when it was last used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import NvgemmError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX
from nvgemm_runtime.installed.jit_cache import jit_directory, stamp_path

from ..storage.cache import Cache
from .user_bundle import damaged_files, require_own


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of the cache.

    Attributes:
        used_at: When it was last used, in seconds since 1970.
    """

    path: Path
    size_bytes: int
    used_at: float


@dataclass(frozen=True, kw_only=True)
class KeptProblem:
    """A problem of a user bundle.

    Attributes:
        kernels: Its kernels and the bytes that each takes in the bundle, by id.
        used_at: When it was last used, in seconds since 1970.
    """

    problem: Problem
    kernels: dict[str, int]
    used_at: float


@dataclass(frozen=True, kw_only=True)
class KeptBundle:
    """A user bundle.

    Attributes:
        target: Key of its target; None where it cannot be read.
        device: Name of the device profile that its kernels were chosen for; likewise.
        problems: In order of problem.
        error: Why it cannot be read or used, or None.
    """

    file: StoredFile
    target: str | None
    device: str | None
    problems: tuple[KeptProblem, ...]
    error: str | None

    @property
    def kernels(self) -> int:
        """How many kernels it holds."""
        return len({id_ for kept in self.problems for id_ in kept.kernels})


@dataclass(frozen=True, kw_only=True)
class CacheUsage:
    """Everything in a cache directory.

    Attributes:
        entries: Compiled kernels and plans.
        bundles: User bundles, by path.
        damaged: User bundles that were moved aside, oldest first.
    """

    directory: Path
    entries: tuple[StoredFile, ...]
    bundles: tuple[KeptBundle, ...]
    damaged: tuple[StoredFile, ...]

    @property
    def size_bytes(self) -> int:
        """All of it."""
        files = (*self.entries, *(bundle.file for bundle in self.bundles), *self.damaged)
        return sum(file.size_bytes for file in files)


def look_at(cache: Cache) -> CacheUsage:
    """Look through a cache directory, which need not exist. What vanishes meanwhile is left out."""
    directory = jit_directory(cache.directory)
    bundles = (_bundle(cache, path) for path in sorted(directory.glob(f"*{BUNDLE_SUFFIX}")))
    damaged = (_stored(path) for path in damaged_files(directory))
    return CacheUsage(
        directory=cache.directory,
        entries=tuple(_entries(cache)),
        bundles=tuple(bundle for bundle in bundles if bundle is not None),
        damaged=tuple(file for file in damaged if file is not None),
    )


def _entries(cache: Cache) -> Iterator[StoredFile]:
    for folder, _, names in os.walk(cache.directory / "entries"):
        for name in names:
            file = _stored(Path(folder) / name)
            if file is not None:
                yield file


def _stored(path: Path) -> StoredFile | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return StoredFile(path=path, size_bytes=status.st_size, used_at=status.st_mtime)


def _bundle(cache: Cache, path: Path) -> KeptBundle | None:
    file = _stored(path)
    if file is None:
        return None
    try:
        require_own(path)
        with Bundle(path) as bundle:
            header = bundle.header
    except NvgemmError as error:
        return KeptBundle(file=file, target=None, device=None, problems=(), error=str(error))
    sizes = [kernel.span.stored_bytes for kernel in header.kernels]
    return KeptBundle(
        file=file,
        target=header.target.key,
        device=header.device,
        problems=tuple(
            KeptProblem(
                problem=ranking.problem,
                kernels={
                    header.kernels[place.kernel].id: sizes[place.kernel]
                    for place in ranking.kernels
                },
                used_at=_used_at(cache, ranking.problem, file),
            )
            for ranking in header.rankings
        ),
        error=None,
    )


def _used_at(cache: Cache, problem: Problem, bundle: StoredFile) -> float:
    with contextlib.suppress(OSError):
        return stamp_path(cache.directory, problem).stat().st_mtime
    return bundle.used_at
