"""The bundles of this process: found, opened and indexed once, when first asked for."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from .bundle import Bundle
from .discover import find_bundles
from .errors import NvgemmError
from .facts import DeviceFacts
from .format import Kernel
from .match import BundleView, Index, preferred, refusal

_log = logging.getLogger("nvgemm.installation")


@dataclass(frozen=True, kw_only=True)
class FoundBundle:
    """A bundle file that was found.

    Attributes:
        path: The file.
        origin: The distribution and version that brought it, or the variable that names it.
        bundle: It, opened; None where it cannot be used.
        problem: Why it cannot be used, or None.
    """

    path: Path
    origin: str
    bundle: Bundle | None
    problem: str | None

    def refusal(self, facts: DeviceFacts) -> str | None:
        """Why a device cannot run its kernels, or None."""
        return self.problem if self.bundle is None else refusal(self.bundle.header, facts)


class Installation:
    """All bundles that are installed or named, and an index of them for each kind of device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[FoundBundle, ...] | None = None
        self._kernels: dict[str, tuple[Bundle, Kernel]] | None = None
        self._indexes: dict[DeviceFacts, tuple[Index, tuple[Bundle, ...]]] = {}

    def bundles(self) -> tuple[FoundBundle, ...]:
        """Every bundle, usable or not, in a fixed order. Reads their headers the first time."""
        with self._lock:
            if self._found is None:
                self._found = tuple(
                    _open(candidate.path, candidate.origin, candidate.problem)
                    for candidate in find_bundles()
                )
            return self._found

    def index(self, facts: DeviceFacts) -> tuple[Index, tuple[Bundle, ...]]:
        """The kernels that a device can run, and the bundle of each position in the index."""
        known = self._indexes.get(facts)
        if known is None:
            opened = {
                f"{found.origin}: {found.path}": found.bundle
                for found in self.bundles()
                if found.bundle is not None
            }
            views = preferred(
                BundleView(name=name, header=bundle.header) for name, bundle in opened.items()
            )
            known = Index(views, facts), tuple(opened[view.name] for view in views)
            self._indexes[facts] = known
        return known

    def kernels(self) -> dict[str, tuple[Bundle, Kernel]]:
        """Every kernel of every usable bundle, by id, with a bundle that holds it."""
        if self._kernels is None:
            self._kernels = {
                kernel.id: (found.bundle, kernel)
                for found in reversed(self.bundles())
                if found.bundle is not None
                for kernel in found.bundle.header.kernels
            }
        return self._kernels


def _open(path: Path, origin: str, problem: str | None) -> FoundBundle:
    if problem is None:
        try:
            return FoundBundle(path=path, origin=origin, bundle=Bundle(path), problem=None)
        except NvgemmError as error:
            problem = str(error)
    _log.warning("bundle left out: %s", problem)
    return FoundBundle(path=path, origin=origin, bundle=None, problem=problem)


INSTALLATION = Installation()
"""What this process found; made when first asked."""
