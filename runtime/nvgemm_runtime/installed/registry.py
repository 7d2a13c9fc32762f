"""The bundles of this process: found, opened and indexed once, when first asked for.

Bundles that are installed or named are read once. User bundles of the JIT cache grow while
processes run; `Installation.refresh_kept_bundles` reads them again.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..bundle.format import Kernel
from ..bundle.reader import Bundle, file_identity
from ..errors import NvgemmError
from ..gemm.problem import Problem
from ..matching.device import DeviceFacts, host_platform, torch_cuda, torch_versions
from ..matching.index import BundleView, Index, LayeredIndex, newest_compiler_first
from ..matching.refusals import (
    describe_fault,
    kernel_refusals,
    process_refusal,
    refusal,
    unlaunchable,
)
from .discover import BundleFile, find_bundles
from .jit_cache import find_kept_bundles, user_bundle_origin

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FoundBundle:
    """A bundle file that was found.

    Attributes:
        path: The file.
        origin: The distribution and version that brought it, the variable that names it, or the
            JIT cache.
        bundle: It, opened, and open as long as it is needed; None where it cannot be used.
        problem: Why it cannot be used, or None.
    """

    path: Path
    origin: str
    bundle: Bundle | None
    problem: str | None

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.origin}: {self.path}"

    def refusal(self, facts: DeviceFacts) -> str | None:
        """Why a device cannot run its kernels, or None."""
        if self.bundle is None:
            return self.problem
        header = self.bundle.header
        reason = refusal(header, facts)
        if reason is None:
            reasons = kernel_refusals(header, facts)
            if None not in reasons:
                said = "; ".join(map(str, dict.fromkeys(reasons)))  # each once
                reason = f"none of its {len(reasons)} kernels can be launched: {said}"
        return reason


_Indexed = tuple[Index, tuple[Bundle, ...]]
"""An index, and the bundle of each of its positions."""


class Installation:
    """All bundles that are installed, named or kept, and an index of them for each kind of device.

    Bundles that are installed later are seen by later processes. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._shipped: tuple[FoundBundle, ...] | None = None
        self._kept: tuple[FoundBundle, ...] = ()
        self._temporary: tuple[Path, ...] = ()
        self._origins: weakref.WeakKeyDictionary[Bundle, str] = weakref.WeakKeyDictionary()
        self._logged: set[str] = set()
        self._replaced: dict[str, tuple[Bundle, Kernel]] = {}
        self._kernels: dict[str, tuple[Bundle, Kernel]] | None = None
        self._shipped_indexes: dict[DeviceFacts, _Indexed] = {}
        self._indexes: dict[DeviceFacts, tuple[Index | LayeredIndex, tuple[Bundle, ...]]] = {}

    def renew_lock(self) -> None:
        """Forget who holds the lock: in a forked child, perhaps a thread that it does not have."""
        self._lock = threading.RLock()

    def bundles(self) -> tuple[FoundBundle, ...]:
        """Every bundle, usable or not, in a fixed order. Reads their headers the first time."""
        with self._lock:
            return self.shipped_bundles() + self._kept

    def shipped_bundles(self) -> tuple[FoundBundle, ...]:
        """Those of `bundles` that are installed or named, and not kept from a JIT."""
        with self._lock:
            if self._shipped is None:
                shipped = tuple(self._open(candidate) for candidate in find_bundles())
                self._kept = self._open_kept()
                self._shipped = shipped  # last, for it says that all have been looked at
            return self._shipped

    def index(
        self, facts: DeviceFacts, *, without: Collection[Bundle] = ()
    ) -> tuple[Index | LayeredIndex, tuple[Bundle, ...]]:
        """The kernels that a device can run, and the bundle of each position in the index.

        Args:
            facts: The device.
            without: Bundles that are not to be used this time, as they cannot be read just now.
        """
        if without:
            return self._make_index_without(facts, without)
        known = self._indexes.get(facts)
        if known is not None:
            return known
        with self._lock:
            if facts not in self._indexes:
                self._indexes[facts] = self._make_index(facts)
            return self._indexes[facts]

    def refresh_kept_bundles(self, temporary: Path | None = None) -> None:
        """Look at the user bundles again, so that what was compiled meanwhile is found from now on.

        Kernels that are loaded, indexes that were handed out, and kernels of a former user bundle
        stay as they were.

        Args:
            temporary: A bundle to take in as well, which may lie outside the cache directory where
                that cannot be written.
        """
        with self._lock:
            if temporary is not None and temporary not in self._temporary:
                self._temporary += (temporary,)
            if self._shipped is None:
                return  # they are yet to be looked at for the first time
            before, self._kept = self._kept, self._open_kept()
            self._indexes = {}
            self._kernels = None
            # What was evicted meanwhile may yet be wanted by code that was offered it.
            known = self._replaced | _kernels_by_id(before)
            current = _kernels_by_id(self._kept)
            self._replaced = {id_: place for id_, place in known.items() if id_ not in current}

    def leave_out(self, bundle: Bundle, problem: str) -> bool:
        """Stop using a bundle whose content turns out to be damaged; the others are used.

        Args:
            bundle: One that `index` has given.
            problem: What is wrong with it.

        Returns:
            Whether it was in use.
        """
        with self._lock:
            shipped, kept = self.shipped_bundles(), self._kept
            self._shipped = _without(shipped, (bundle,), problem)
            self._kept = _without(kept, (bundle,), problem)
            if (self._shipped, self._kept) == (shipped, kept):
                return False
            self._shipped_indexes, self._indexes, self._kernels = {}, {}, None
            self._warn(self._origins[bundle], problem)
            return True

    def kept_problems(self, kernel_id: str) -> tuple[Problem, ...]:
        """Problems of user bundles that a kernel is ranked for."""
        with self._lock:
            return tuple(
                ranking.problem
                for one in self._kept
                if one.bundle is not None
                for ranking in one.bundle.header.rankings
                if any(
                    one.bundle.header.kernels[place.kernel].id == kernel_id
                    for place in ranking.kernels
                )
            )

    def origin(self, bundle: Bundle) -> str:
        """What brought a bundle that `index` has given, whether or not it has been replaced."""
        return self._origins[bundle]

    def _open_kept(self) -> tuple[FoundBundle, ...]:
        """The user bundles; those whose files are as they were stay open."""
        kept = find_kept_bundles()
        known_paths = {candidate.path for candidate in kept}
        temporary = (
            BundleFile(path=path, origin=user_bundle_origin(path), problem=None)
            for path in self._temporary
            if path not in known_paths
        )
        opened = {one.path: one for one in self._kept}
        return tuple(
            known
            if (known := opened.get(candidate.path)) is not None and _is_unchanged(known)
            else self._open(candidate, is_kept=True)
            for candidate in (*kept, *temporary)
        )

    def _open(self, found: BundleFile, *, is_kept: bool = False) -> FoundBundle:
        problem = found.problem
        bundle = None
        if problem is None:
            try:
                bundle = Bundle(found.path)
                if is_kept:
                    # Others are checked a kernel at a time; damage here must be seen as a miss,
                    # for what misses is compiled, and the file made anew.
                    bundle.check_body()
            except Exception as error:  # Whatever is wrong with one, the others are used.
                problem, bundle = describe_fault(error), None
                if not isinstance(error, NvgemmError):
                    problem = f"{found.path}: {problem}"
                    _log.debug("%s", problem, exc_info=True)
                if is_kept:
                    problem += "; it is made anew when kernels are next compiled"
        if problem is not None:
            self._warn(found.origin, problem)
        if bundle is not None:
            self._origins[bundle] = found.origin
        return FoundBundle(path=found.path, origin=found.origin, bundle=bundle, problem=problem)

    def _warn(self, origin: str, problem: str) -> None:
        if problem not in self._logged:
            self._logged.add(problem)
            _log.warning("bundle left out (%s): %s", origin, problem)

    def _make_index(self, facts: DeviceFacts) -> tuple[Index | LayeredIndex, tuple[Bundle, ...]]:
        if facts not in self._shipped_indexes:
            self._shipped_indexes[facts] = _index_of(self.shipped_bundles(), facts)
        return _with_user_bundles(self._shipped_indexes[facts], self._kept, facts)

    def _make_index_without(
        self, facts: DeviceFacts, unread: Collection[Bundle]
    ) -> tuple[Index | LayeredIndex, tuple[Bundle, ...]]:
        problem = "it cannot be read just now"
        with self._lock:
            shipped = _index_of(_without(self.shipped_bundles(), unread, problem), facts)
            return _with_user_bundles(shipped, _without(self._kept, unread, problem), facts)

    def kernels(self) -> dict[str, tuple[Bundle, Kernel]]:
        """Every kernel of every usable bundle, by id, with the first bundle that holds it.

        An entry that this release can launch comes before one that it cannot, and a bundle for this
        process before one for another platform or CUDA version.
        """
        with self._lock:
            if self._kernels is None:
                places = [
                    (found.bundle, kernel)
                    for found in self.bundles()
                    if found.bundle is not None
                    for kernel in found.bundle.header.kernels
                ]
                platform, cuda = host_platform(), torch_cuda()
                places.sort(
                    key=lambda place: (
                        unlaunchable(place[1]) is not None,
                        process_refusal(place[0].header.target, platform, cuda) is not None,
                    )
                )
                found = {kernel.id: (bundle, kernel) for bundle, kernel in reversed(places)}
                self._kernels = {**self._replaced, **found}
            return self._kernels


def _without(
    found: tuple[FoundBundle, ...], unusable: Collection[Bundle], problem: str
) -> tuple[FoundBundle, ...]:
    return tuple(
        replace(one, bundle=None, problem=problem) if one.bundle in unusable else one
        for one in found
    )


def _with_user_bundles(
    indexed: _Indexed, kept: tuple[FoundBundle, ...], facts: DeviceFacts
) -> tuple[Index | LayeredIndex, tuple[Bundle, ...]]:
    """An index with the user bundles behind the others."""
    shipped, bundles = indexed
    if not kept:
        return shipped, bundles
    behind, opened = _index_of(kept, facts, first_position=len(bundles), from_jit=True)
    return LayeredIndex(shipped, behind), bundles + opened


def _index_of(
    found: Iterable[FoundBundle],
    facts: DeviceFacts,
    *,
    first_position: int = 0,
    from_jit: bool = False,
) -> _Indexed:
    opened = {one.name: one.bundle for one in found if one.bundle is not None}
    views = newest_compiler_first(
        BundleView(name=name, header=bundle.header) for name, bundle in opened.items()
    )
    unusable = [f"{one.name}: {one.problem}" for one in found if one.bundle is None]
    index = Index(
        views,
        facts,
        unusable,
        first_position=first_position,
        from_jit=from_jit,
        versions=torch_versions(),
    )
    return index, tuple(opened[view.name] for view in views)


def _kernels_by_id(found: Iterable[FoundBundle]) -> dict[str, tuple[Bundle, Kernel]]:
    return {
        kernel.id: (one.bundle, kernel)
        for one in found
        if one.bundle is not None
        for kernel in one.bundle.header.kernels
    }


def _is_unchanged(found: FoundBundle) -> bool:
    """Whether a file is the one that was opened, or gone, which leaves that one to be read."""
    if found.bundle is None:
        return False
    try:
        return found.bundle.identity == file_identity(found.path.stat())
    except FileNotFoundError:
        return True
    except OSError:
        return False


INSTALLATION = Installation()
"""What this process found; made when first asked."""

os.register_at_fork(after_in_child=INSTALLATION.renew_lock)
