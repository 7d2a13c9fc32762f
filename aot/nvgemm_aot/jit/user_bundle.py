"""User bundles: kernels compiled at run time, in one file per device, target and toolchain.

Adding kernels replaces the file atomically under a lock, so that many processes may add to it while
others read the old one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

from nvgemm_runtime.bundle.encode import measured_json, source_json
from nvgemm_runtime.bundle.format import FORMAT_VERSION, canonical_json, sha256_hex
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, StorageError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX
from nvgemm_runtime.installed.jit_cache import jit_directory
from nvgemm_runtime.installed.ownership import writable_by_others

from ..bundle.compression import compress_quickly
from ..bundle.content import BuiltKernel, BundleContent, ProblemRanking, read_content
from ..bundle.parts.join_contents import join_contents
from ..bundle.writer import write_bundle
from ..storage.build_cache import Cache
from ..storage.files import sweep_partials_of
from ..storage.locks import locked
from ..targets import BuildTarget

DAMAGED = ".damaged-"
"""Separator between a user bundle's name and the time when it was found damaged and moved aside."""

MAX_DAMAGED = 2
"""Most damaged files that stay for inspection; older ones are removed."""


class SuspectBundleError(StorageError):
    """A user bundle could have been written by someone other than this user and root."""


class UserBundle:
    """One user bundle, which need not exist yet. Safe for concurrent threads and processes.

    The file name has a digest of target, device profile, toolchain and ``generator``, the program
    that writes it. ``on_damage`` is called with a text when a damaged file is moved aside.
    """

    def __init__(
        self,
        cache: Cache,
        target: BuildTarget,
        toolchain: dict[str, str],
        generator: str,
        on_damage: Callable[[str], None],
    ) -> None:
        identity = [FORMAT_VERSION, generator, toolchain, target.device.name]
        digest = sha256_hex(canonical_json(identity))[:12]
        name = f"{target.target.key}-{digest}{BUNDLE_SUFFIX}"
        self.path = jit_directory(cache.directory) / name
        self._cache = cache
        self._on_damage = on_damage

    def holds(self, problem: Problem) -> bool:
        """Returns True if the file has every kernel for a problem that can be compiled.

        Moves a file aside first if it is damaged or others could have written it. A problem counts
        as missing if a kernel's compiler was killed, so that it is compiled again.

        Raises:
            StorageError: If the file cannot be read.
        """
        try:
            require_own(self.path)
            with Bundle(self.path) as bundle:
                bundle.check_body()
                header = bundle.header
                return any(
                    ranking.problem == problem and header.is_complete(ranking)
                    for ranking in header.rankings
                )
        except (BundleFormatError, SuspectBundleError):
            with _locked(self._cache, self.path):
                self._read_or_move_aside()
            return False
        except StorageError:
            if self.path.exists():
                raise
            return False

    def append(self, content: BundleContent) -> None:
        """Adds kernels and rankings. A ranking replaces an older one for the same problem.

        Raises:
            StorageError: If the file cannot be written; it is then unchanged.
        """
        with _locked(self._cache, self.path):
            sweep_partials_of(self.path)
            old = self._read_or_move_aside()
            _write(self.path, content if old is None else merge(old, content))

    def _read_or_move_aside(self) -> BundleContent | None:
        """Reads the file, under its lock; returns None if it is missing or was moved aside."""
        try:
            return read_user_bundle(self.path)
        except (BundleFormatError, SuspectBundleError) as error:
            aside = self.path.with_name(f"{self.path.name}{DAMAGED}{time.time_ns()}")
            try:
                self.path.rename(aside)
            except OSError as cause:
                raise StorageError(
                    f"{self.path}: unusable, and cannot be moved aside: {cause.strerror}; remove it"
                ) from cause
            self._on_damage(f"{error}; moved to {aside.name}; a new file replaces it")
            for path in damaged_files(self.path.parent)[:-MAX_DAMAGED]:
                with contextlib.suppress(OSError):
                    path.unlink()
            return None


def _locked(cache: Cache, path: Path) -> AbstractContextManager[None]:
    """Holds the lock that protects a user bundle's replacement."""
    return locked(cache.lock_path(f"bundle-{path.name}"))


def damaged_files(directory: Path) -> list[Path]:
    """Returns damaged user bundles that were moved aside, oldest first."""
    return sorted(
        directory.glob(f"*{BUNDLE_SUFFIX}{DAMAGED}*"),
        key=lambda path: path.name.rpartition(DAMAGED)[2],
    )


def read_user_bundle(path: Path) -> BundleContent | None:
    """Reads everything a user bundle holds, or returns None if the file does not exist.

    Raises:
        BundleFormatError: If it is damaged.
        StorageError: If it cannot be read; SuspectBundleError if others could have written it.
    """
    if not path.exists():
        return None
    require_own(path)
    with Bundle(path) as bundle:
        bundle.check_body()
        return read_content(bundle)


def require_own(path: Path) -> None:
    """Refuses a file that others could have written, because its kernels run as this user.

    Raises:
        SuspectBundleError: If others could have written it.
    """
    with contextlib.suppress(OSError):  # the read reports it
        reason = writable_by_others(path.absolute())
        if reason is not None:
            raise SuspectBundleError(f"{path}: its kernels cannot be trusted: {reason}")


def _write(path: Path, content: BundleContent) -> None:
    """Writes a user bundle; equal kernels and rankings give equal bytes."""
    write_bundle(path, _with_build_key(content), pack=compress_quickly)


def merge(old: BundleContent, new: BundleContent) -> BundleContent:
    """Joins two contents for one target. ``new`` supplies the ranking for a problem in both."""
    return join_contents([new, old], lambda rankings, _: rankings[0])


def without(content: BundleContent, problems: Collection[Problem]) -> BundleContent:
    """Drops problems, and the kernels that no other problem ranks."""
    kernels = {kernel.id: kernel for kernel in content.kernels}
    return _with_rankings(
        content, kernels, [r for r in content.rankings if r.problem not in problems]
    )


def _with_rankings(
    base: BundleContent, kernels: dict[str, BuiltKernel], rankings: Iterable[ProblemRanking]
) -> BundleContent:
    """Returns ``base`` with these rankings and only the kernels that they name."""
    rankings = tuple(rankings)
    ranked = {id_ for ranking in rankings for id_, _ in ranking.kernels}
    return replace(
        base,
        kernels=tuple(kernel for id_, kernel in kernels.items() if id_ in ranked),
        rankings=rankings,
    )


def _with_build_key(content: BundleContent) -> BundleContent:
    """Sets a build key derived from the content itself, which comes from several builds."""
    document = {
        "user bundle": FORMAT_VERSION,
        "generator": content.generator,
        "target": content.target.key,
        "device": content.device,
        "toolchain": content.toolchain,
        "kernels": sorted([kernel.id, kernel.operator] for kernel in content.kernels),
        "rankings": sorted(
            [
                ranking.problem.key,
                source_json(ranking.source),
                ranking.kernels,
                [asdict(failure) for failure in ranking.missing],
                *([measured_json(ranking.measured)] if ranking.measured else []),
            ]
            for ranking in content.rankings
        ),
    }
    return replace(content, build_key=sha256_hex(canonical_json(document)))


def remove_problems(cache: Cache, path: Path, problems: Collection[Problem]) -> None:
    """Removes problems from a user bundle; deletes the file with its last problem.

    Raises:
        BundleFormatError, StorageError: See `read_user_bundle`; also if it cannot be replaced.
    """
    with _locked(cache, path):
        content = read_user_bundle(path)
        if content is None:
            return
        rest = without(content, problems)
        if rest.rankings:
            _write(path, rest)
            return
        try:
            path.unlink()
        except OSError as error:
            raise StorageError(f"{path}: cannot remove: {error.strerror}") from error
