"""Bundles of this process: found, opened and indexed at the first request.

Installed and named bundles are read once. User bundles in the JIT cache grow while processes run;
`Installation.refresh_user_bundles` reads them again.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..bundle.confirmations import Confirmations
from ..bundle.format import Header, Kernel
from ..bundle.paging.paged_header import PagedHeader
from ..bundle.reader import Bundle, file_identity
from ..errors import NvgemmError, StorageError, count_text
from ..gemm.problem import Problem
from ..matching.combined.layered_index import LayeredIndex
from ..matching.combined.paged_index import PagedIndex
from ..matching.device import DeviceFacts, host_platform, torch_cuda, torch_versions
from ..matching.index import Index
from ..matching.matches import BundleView, newest_compiler_first
from ..matching.refusals import (
    describe_fault,
    kernel_refusals,
    process_refusal,
    refusal,
    unlaunchable,
)
from . import digest
from .confirmed_files import ConfirmedFile, find_confirmed, read_confirmed
from .discover import BundleFile, find_bundles
from .jit_cache import find_user_bundles, user_bundle_origin

_log = logging.getLogger(__name__)

AnyIndex = Index | PagedIndex | LayeredIndex
"""Index over all bundles."""


@dataclass(frozen=True, kw_only=True)
class FoundBundle:
    """Bundle file, opened if usable.

    Attributes:
        path: File path.
        origin: Distribution and version that contain it, the variable that names it, or the JIT
            cache.
        bundle: Open bundle; None if it cannot be used.
        problem: Reason that it cannot be used, or None.
        requirement: Distribution and version as a pip requirement, if known.
        is_refused: True if the policy is the problem.
    """

    path: Path
    origin: str
    bundle: Bundle | None
    problem: str | None
    requirement: str | None = None
    is_refused: bool = False

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.origin}: {self.path}"

    def refusal(self, facts: DeviceFacts) -> str | None:
        """Returns the reason that a device cannot run its kernels, or None."""
        if self.bundle is None:
            return self.problem
        if (pages := self.bundle.pages()) is not None:
            try:
                return _paged_refusal(pages, facts)
            except NvgemmError as error:  # a page is damaged
                return str(error)
        header = self.bundle.header
        reason = refusal(header, facts)
        if reason is None:
            reasons = kernel_refusals(header, facts)
            if None not in reasons:
                reason = _none_can_be_launched(len(reasons), dict.fromkeys(map(str, reasons)))
        return reason


class Installation:
    """All installed, named and user bundles, with an index for each kind of device.

    Later processes see bundles installed later. Safe to use from several threads.

    Attributes:
        generation: Number of times that the usable bundles have changed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.generation = 0
        self._shipped: tuple[FoundBundle, ...] | None = None
        self._confirmed: tuple[ConfirmedFile, ...] = ()
        self._user_bundles: tuple[FoundBundle, ...] = ()
        self._temporary: tuple[Path, ...] = ()
        self._logged: set[str] = set()
        self._replaced: dict[str, tuple[Bundle, Kernel]] = {}
        self._kernels: dict[str, tuple[Bundle, Kernel]] | None = None
        self._found_kernels: dict[str, tuple[Bundle, Kernel]] = {}
        self._shipped_indexes: dict[DeviceFacts, Index | PagedIndex] = {}
        self._indexes: dict[DeviceFacts, AnyIndex] = {}

    def renew_lock(self) -> None:
        """Replaces the lock in a forked child, where its holder may be a thread that is gone."""
        self._lock = threading.RLock()

    def bundles(self) -> tuple[FoundBundle, ...]:
        """Returns every bundle, usable or not, in a fixed order; reads headers the first time."""
        with self._lock:
            return self.shipped_bundles() + self._user_bundles

    def shipped_bundles(self) -> tuple[FoundBundle, ...]:
        """Returns the installed and named bundles, without user bundles."""
        with self._lock:
            if self._shipped is None:
                files = find_bundles()
                self._confirmed = self._read_confirmed(files)
                digest.keep(files, [confirmed.data for confirmed in self._confirmed])
                shipped = tuple(self._open(file) for file in files)
                self._user_bundles = self._open_user_bundles()
                self._shipped = shipped  # last, because it marks the search as complete
            return self._shipped

    def confirmed_files(self) -> tuple[ConfirmedFile, ...]:
        """Returns the files with confirmations, usable or not; none without a bundle."""
        with self._lock:
            self.shipped_bundles()
            return self._confirmed

    def _read_confirmed(self, bundles: tuple[BundleFile, ...]) -> tuple[ConfirmedFile, ...]:
        """Reads the confirmations for bundles, and warns of unusable files."""
        confirmed_files = tuple(map(read_confirmed, find_confirmed(bundles) if bundles else ()))
        for confirmed in confirmed_files:
            if confirmed.problem is not None:
                self._warn("confirmations", confirmed.origin, confirmed.problem)
        return confirmed_files

    def _confirmations(self) -> list[Confirmations]:
        return [
            confirmed.confirmations
            for confirmed in self._confirmed
            if confirmed.confirmations is not None
        ]

    def index(self, facts: DeviceFacts, *, without: Collection[Bundle] = ()) -> AnyIndex:
        """Returns the kernels that a device can run, leaving out the ``without`` bundles."""
        cached = self._indexes.get(facts)
        if cached is not None and not without:
            return cached
        with self._lock:
            if without:
                problem = "it is temporarily unreadable"
                shipped = _index_of(
                    _mark_unusable(self.shipped_bundles(), without, problem),
                    facts,
                    confirmations=self._confirmations(),
                )
                return _add_user_bundles(
                    shipped, _mark_unusable(self._user_bundles, without, problem), facts
                )
            if facts not in self._shipped_indexes:
                self._shipped_indexes[facts] = _index_of(
                    self.shipped_bundles(), facts, confirmations=self._confirmations()
                )
            if facts not in self._indexes:
                shipped = self._shipped_indexes[facts]
                self._indexes[facts] = _add_user_bundles(shipped, self._user_bundles, facts)
            return self._indexes[facts]

    def refresh_user_bundles(self, temporary: Path | None = None) -> None:
        """Reads the user bundles again, so that newly compiled kernels are found.

        Loaded kernels, existing indexes and kernels from a former user bundle stay. A temporary
        bundle is added wherever it is: the cache directory may be unwritable.
        """
        with self._lock:
            if temporary is not None and temporary not in self._temporary:
                self._temporary += (temporary,)
            if self._shipped is None:
                return  # the first search will read them
            previous, self._user_bundles = self._user_bundles, self._open_user_bundles()
            self._indexes = {}
            self._kernels, self._found_kernels = None, {}
            self.generation += 1
            # Code that was offered an evicted kernel may still need it.
            replaced = self._replaced | {entry[1].id: entry for entry in _kernel_entries(previous)}
            current = {kernel.id for _, kernel in _kernel_entries(self._user_bundles)}
            self._replaced = {id_: entry for id_, entry in replaced.items() if id_ not in current}

    def leave_out(self, bundle: Bundle, problem: str) -> bool:
        """Stops using a bundle whose content turns out to be damaged; the others stay in use.

        Returns:
            True if it was in use.
        """
        with self._lock:
            affected = next(
                (bundle_file for bundle_file in self.bundles() if bundle_file.bundle is bundle),
                None,
            )
            if affected is None:
                return False
            self._shipped = _mark_unusable(self.shipped_bundles(), (bundle,), problem)
            self._user_bundles = _mark_unusable(self._user_bundles, (bundle,), problem)
            self._shipped_indexes, self._indexes = {}, {}
            self._kernels, self._found_kernels = None, {}
            self.generation += 1
            self._warn("bundle", affected.origin, problem)
            return True

    def user_bundle_problems(self, kernel_id: str) -> tuple[Problem, ...]:
        """Returns the problems in user bundles that a kernel is ranked for."""
        with self._lock:
            user_bundles = [
                user_bundle.bundle
                for user_bundle in self._user_bundles
                if user_bundle.bundle is not None
            ]
        headers = (_ranking_header(bundle, kernel_id) for bundle in user_bundles)
        return tuple(
            ranking.problem
            for header in headers
            if header is not None
            for ranking in header.rankings
            if any(header.kernels[ranked.kernel].id == kernel_id for ranked in ranking.kernels)
        )

    def _open_user_bundles(self) -> tuple[FoundBundle, ...]:
        """Opens the user bundles; those with unchanged files stay open."""
        files = find_user_bundles()
        known_paths = {file.path for file in files}
        temporary = (
            BundleFile(path=path, origin=user_bundle_origin(path), problem=None)
            for path in self._temporary
            if path not in known_paths
        )
        opened = {user_bundle.path: user_bundle for user_bundle in self._user_bundles}
        return tuple(
            current
            if (current := opened.get(file.path)) is not None and _is_unchanged(current)
            else self._open(file, is_user_bundle=True)
            for file in (*files, *temporary)
        )

    def _open(self, file: BundleFile, *, is_user_bundle: bool = False) -> FoundBundle:
        problem = file.problem
        bundle = None
        if problem is None:
            try:
                bundle = Bundle(file.path)
                if file.checked_prefix not in (None, bundle.prefix):
                    raise StorageError(
                        f"{file.path}: replaced after its signature was checked; start again"
                    )
                if is_user_bundle:
                    # Other bundles are checked kernel by kernel. Damage here must count as a miss:
                    # a miss compiles the kernel and rewrites the file.
                    bundle.check_body()
            except Exception as error:  # a faulty bundle must not affect the others
                problem, bundle = describe_fault(error), None
                if not isinstance(error, NvgemmError):
                    problem = f"{file.path}: {problem}"
                    _log.debug("%s", problem, exc_info=True)
                if is_user_bundle:
                    problem += "; it is rebuilt when kernels are next compiled"
        if problem is not None:
            self._warn("bundle", file.origin, problem)
        return FoundBundle(
            path=file.path,
            origin=file.origin,
            bundle=bundle,
            problem=problem,
            requirement=file.requirement,
            is_refused=file.is_refused,
        )

    def _warn(self, kind: str, origin: str, problem: str) -> None:
        if problem not in self._logged:
            self._logged.add(problem)
            _log.warning("%s left out (%s): %s", kind, origin, problem)

    def kernel(self, kernel_id: str) -> tuple[Bundle, Kernel] | None:
        """Returns a kernel and the first usable bundle that holds it, or None.

        An entry that this release can launch comes before one that it cannot, and a bundle for this
        process before one for another platform or CUDA version. A bundle whose pages cannot be read
        has no kernels.
        """
        with self._lock:
            if not any(
                bundle_file.bundle is not None and bundle_file.bundle.is_paged
                for bundle_file in self.bundles()
            ):
                return self.kernels().get(kernel_id)
            if kernel_id not in self._found_kernels:
                entries = self._find_kernel(kernel_id)
                found = min(entries, key=_entry_order(), default=self._replaced.get(kernel_id))
                if found is None:
                    return None
                self._found_kernels[kernel_id] = found
            return self._found_kernels[kernel_id]

    def _find_kernel(self, kernel_id: str) -> list[tuple[Bundle, Kernel]]:
        entries: list[tuple[Bundle, Kernel]] = []
        for bundle_file in self.bundles():
            if bundle_file.bundle is None:
                continue
            try:
                kernel = _kernel_in(bundle_file.bundle, kernel_id)
            except NvgemmError as error:
                self._warn("bundle", bundle_file.origin, str(error))
                continue
            if kernel is not None:
                entries.append((bundle_file.bundle, kernel))
        return entries

    def kernels(self) -> dict[str, tuple[Bundle, Kernel]]:
        """Returns every kernel in every usable bundle, by id; see `kernel`."""
        with self._lock:
            if self._kernels is None:
                entries = _kernel_entries(self.bundles())
                entries.sort(key=_entry_order())
                by_id = {entry[1].id: entry for entry in reversed(entries)}
                self._kernels = {**self._replaced, **by_id}
            return self._kernels


def _entry_order() -> Callable[[tuple[Bundle, Kernel]], tuple[bool, bool]]:
    """Returns the sort key for a kernel's entries; the first is used."""
    platform, cuda = host_platform(), torch_cuda()
    return lambda entry: (
        unlaunchable(entry[1]) is not None,
        process_refusal(entry[0].facts.target, platform, cuda) is not None,
    )


def _kernel_in(bundle: Bundle, kernel_id: str) -> Kernel | None:
    """Returns a bundle's kernel by id, or None."""
    pages = bundle.pages()
    if pages is not None:
        return pages.kernel(kernel_id)
    kernels = bundle.header.kernels  # sorted by id
    index = bisect_left(kernels, kernel_id, key=lambda kernel: kernel.id)
    is_found = index < len(kernels) and kernels[index].id == kernel_id
    return kernels[index] if is_found else None


def _ranking_header(bundle: Bundle, kernel_id: str) -> Header | None:
    """Returns a header with all rankings that may name a kernel; None without the kernel."""
    pages = bundle.pages()
    if pages is None:
        return bundle.header
    kernel = pages.kernel(kernel_id)
    return None if kernel is None else pages.signature(kernel.signature)


def _paged_refusal(pages: PagedHeader, facts: DeviceFacts) -> str | None:
    """Returns the reason that a device cannot run kernels in pages; reads until one can."""
    reason = refusal(pages.facts, facts)
    if reason is not None:
        return reason
    reasons: list[str] = []
    for kernel in pages.kernels():
        (why,) = kernel_refusals(replace(pages.facts, kernels=(kernel,)), facts)
        if why is None:
            return None
        reasons.append(why)
    return _none_can_be_launched(len(reasons), dict.fromkeys(reasons))


def _none_can_be_launched(count: int, reasons: Iterable[str]) -> str:
    return f"none of its {count_text(count, 'kernel')} can be launched: {'; '.join(reasons)}"


def _mark_unusable(
    bundles: tuple[FoundBundle, ...], unusable: Collection[Bundle], problem: str
) -> tuple[FoundBundle, ...]:
    return tuple(
        replace(bundle_file, bundle=None, problem=problem)
        if bundle_file.bundle in unusable
        else bundle_file
        for bundle_file in bundles
    )


def _add_user_bundles(
    shipped: Index | PagedIndex, user_bundles: tuple[FoundBundle, ...], facts: DeviceFacts
) -> AnyIndex:
    return (
        LayeredIndex(shipped, _index_of(user_bundles, facts, from_jit=True))
        if user_bundles
        else shipped
    )


def _index_of(
    bundles: Iterable[FoundBundle],
    facts: DeviceFacts,
    *,
    from_jit: bool = False,
    confirmations: Sequence[Confirmations] = (),
) -> Index | PagedIndex:
    bundles = tuple(bundles)
    views = newest_compiler_first(
        BundleView(
            name=bundle_file.name,
            header=bundle_file.bundle.facts,
            origin=bundle_file.origin,
            opened=bundle_file.bundle,
            pages=bundle_file.bundle.pages(),
        )
        for bundle_file in bundles
        if bundle_file.bundle is not None
    )
    unusable = [
        f"{bundle_file.name}: {bundle_file.problem}"
        for bundle_file in bundles
        if bundle_file.bundle is None
    ]
    kind = Index if all(view.pages is None for view in views) else PagedIndex
    return kind(
        views,
        facts,
        unusable,
        from_jit=from_jit,
        versions=torch_versions(),
        confirmations=confirmations,
    )


def _kernel_entries(bundles: Iterable[FoundBundle]) -> list[tuple[Bundle, Kernel]]:
    """Returns every kernel in usable bundles, with its bundle."""
    entries: list[tuple[Bundle, Kernel]] = []
    for bundle_file in bundles:
        if (bundle := bundle_file.bundle) is None:
            continue
        try:
            entries += [(bundle, kernel) for kernel in bundle.header.kernels]
        except NvgemmError as error:  # Pages of one bundle must not prevent use of the others.
            _log.warning("bundle left out (%s): %s", bundle_file.origin, error)
    return entries


def _is_unchanged(bundle_file: FoundBundle) -> bool:
    """Returns True if a file is the opened one, or was removed and stays readable."""
    if bundle_file.bundle is None:
        return False
    try:
        return bundle_file.bundle.identity == file_identity(bundle_file.path.stat())
    except FileNotFoundError:
        return True
    except OSError:
        return False


INSTALLATION = Installation()
"""Bundles of this process, found at the first request."""

os.register_at_fork(after_in_child=INSTALLATION.renew_lock)
