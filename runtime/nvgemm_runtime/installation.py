"""The bundles of this process: found, opened and indexed once, when first asked for."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from .bundle import Bundle
from .discover import Candidate, find_bundles
from .errors import NvgemmError
from .facts import DeviceFacts, host_platform, torch_cuda
from .format import Kernel
from .match import BundleView, Index, preferred
from .refusals import process_refusal, refusal, unlaunchable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FoundBundle:
    """A bundle file that was found.

    Attributes:
        path: The file.
        origin: The distribution and version that brought it, or the variable that names it.
        bundle: It, opened, and open as long as the process lives; None where it cannot be used.
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
            reasons = {unlaunchable(kernel): None for kernel in header.kernels}  # each once
            if None not in reasons:
                said = "; ".join(map(str, reasons))
                reason = f"none of its {len(header.kernels)} kernels can be launched: {said}"
        return reason


class Installation:
    """All bundles that are installed or named, and an index of them for each kind of device.

    What was found stays as it was: bundles that are installed later are seen by later processes.
    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._found: tuple[FoundBundle, ...] | None = None
        self._kernels: dict[str, tuple[Bundle, Kernel]] | None = None
        self._indexes: dict[DeviceFacts, tuple[Index, tuple[Bundle, ...]]] = {}

    def renew_lock(self) -> None:
        """Forget who holds the lock: in a forked child, perhaps a thread that it does not have."""
        self._lock = threading.RLock()

    def bundles(self) -> tuple[FoundBundle, ...]:
        """Every bundle, usable or not, in a fixed order. Reads their headers the first time."""
        with self._lock:
            if self._found is None:
                self._found = tuple(_open(candidate) for candidate in find_bundles())
            return self._found

    def index(self, facts: DeviceFacts) -> tuple[Index, tuple[Bundle, ...]]:
        """The kernels that a device can run, and the bundle of each position in the index."""
        known = self._indexes.get(facts)
        if known is not None:
            return known
        with self._lock:
            if facts not in self._indexes:
                self._indexes[facts] = self._make_index(facts)
            return self._indexes[facts]

    def _make_index(self, facts: DeviceFacts) -> tuple[Index, tuple[Bundle, ...]]:
        found = self.bundles()
        opened = {one.name: one.bundle for one in found if one.bundle is not None}
        views = preferred(
            BundleView(name=name, header=bundle.header) for name, bundle in opened.items()
        )
        unusable = [f"{one.name}: {one.problem}" for one in found if one.bundle is None]
        return Index(views, facts, unusable), tuple(opened[view.name] for view in views)

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
                self._kernels = {kernel.id: (bundle, kernel) for bundle, kernel in reversed(places)}
            return self._kernels


def _open(found: Candidate) -> FoundBundle:
    problem = found.problem
    bundle = None
    if problem is None:
        try:
            bundle = Bundle(found.path)
        except NvgemmError as error:
            problem = str(error)
    if problem is not None:
        _log.warning("bundle left out (%s): %s", found.origin, problem)
    return FoundBundle(path=found.path, origin=found.origin, bundle=bundle, problem=problem)


INSTALLATION = Installation()
"""What this process found; made when first asked."""

os.register_at_fork(after_in_child=INSTALLATION.renew_lock)
