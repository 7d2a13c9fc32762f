"""A thread's time within some packages, by stack samples every few milliseconds.

Two processes with the same work differ by several per cent. A package's share of the time is finer:
the share of samples in which the package is on the stack, also below an import, or below torch's
functions that it calls.

Only the entering thread is sampled. A sample needs the interpreter's lock: while a C function holds
it, for example to load a library, there are no samples, and the time until the next one counts for
whatever is then on the stack.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection
from types import FrameType, TracebackType

EVERY_S = 0.004
"""Seconds between samples. A first result has thousands; a sample takes well under 0.1 ms."""

IMPORT_HOOKS = frozenset({"nvgemm_runtime.inductor.autoload"})
"""Modules on the stack while torch imports its own modules, which do not count."""

IN_ANY_CASE = frozenset({("triton.runtime.cache", "triton_key")})
"""Functions that do not count, by module: stock torch computes a digest of Triton's files once a
process too."""


class TimeWithin:
    """Seconds that the entering thread spends in packages, from enter to exit.

    Attributes:
        seconds: Sum over intervals whose final sample found them; 0 before the first.
    """

    def __init__(self, packages: Collection[str]) -> None:
        self.seconds = 0.0
        self._packages = frozenset(packages)
        self._thread = threading.get_ident()
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> TimeWithin:
        self._looking.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._looking.join()

    def _look(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(EVERY_S):
            found = is_within(sys._current_frames().get(self._thread), self._packages)
            now = time.perf_counter()
            if found:
                self.seconds += now - last
            last = now


def is_within(frame: FrameType | None, packages: Collection[str]) -> bool:
    """Returns True if a frame, or a caller of it, runs or imports a module of the packages."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if (module, frame.f_code.co_name) in IN_ANY_CASE:
            return False
        if frame.f_code.co_name == "_find_and_load":  # its argument is the module's name
            module = str(frame.f_locals.get("name"))
        if module.partition(".")[0] in packages and module not in IMPORT_HOOKS:
            return True
        frame = frame.f_back
    return False
