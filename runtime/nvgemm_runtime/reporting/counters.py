"""Counts the GEMMs that torch.compile compiled in this process, by how they were served."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import count_text

MOST_REASONS = 1000
"""Most reasons for which misses are counted separately. Reasons name problems, so a process that
compiles for ever would collect ever more."""

OTHER_REASONS = "other reasons"
"""Key under which misses for all further reasons are counted."""

OTHER_TABLES = "other tables"
"""Key under which dispatching calls are counted after `MOST_REASONS` tables."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts since the process began, or since `reset_stats`.

    A GEMM counts each time that Inductor asks for its choices. Results from torch's caches are not
    compiled, so they do not count.

    Attributes:
        declared: GEMMs that a bundle declares.
        signature: GEMMs with other sizes that bundled kernels serve.
        jit: GEMMs for which this or another process compiled kernels at run time.
        jit_kernels: Kernels compiled at run time for this process.
        misses: GEMMs without a kernel, by reason; `OTHER_REASONS` after `MOST_REASONS` reasons.
        won: Calls written into generated code, by kernel id; a dispatching call counts once per
            kernel in it.
        dispatched: Dispatching calls written into generated code, by GEMM, sizes and winners in
            words.
        failed: Reasons by kernel id, for kernels that could not be loaded or failed before their
            first run here. ATen computes their GEMMs for the rest of the process.
        milliseconds: Time by activity: ``matching`` kernels, ``loading`` them, ``timing`` them
            including their first launch, and ``jit``, waiting for a compiler.
    """

    declared: int = 0
    signature: int = 0
    jit: int = 0
    jit_kernels: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    won: Mapping[str, int] = field(default_factory=dict)
    dispatched: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def missed(self) -> int:
        """Number of GEMMs without a kernel."""
        return sum(self.misses.values())

    @property
    def met(self) -> int:
        """Total number of GEMMs."""
        return self.declared + self.signature + self.jit + self.missed

    def since(self, earlier: Stats) -> Stats:
        """Returns the difference from earlier counts."""
        return Stats(
            declared=self.declared - earlier.declared,
            signature=self.signature - earlier.signature,
            jit=self.jit - earlier.jit,
            jit_kernels=self.jit_kernels - earlier.jit_kernels,
            misses=dict(Counter(self.misses) - Counter(earlier.misses)),
            won=dict(Counter(self.won) - Counter(earlier.won)),
            dispatched=dict(Counter(self.dispatched) - Counter(earlier.dispatched)),
            failed={
                kernel_id: reason
                for kernel_id, reason in self.failed.items()
                if kernel_id not in earlier.failed
            },
            milliseconds={
                name: spent - earlier.milliseconds.get(name, 0.0)
                for name, spent in self.milliseconds.items()
            },
        )

    def __str__(self) -> str:
        tables = (f"  {table} (calls: {count})" for table, count in self.dispatched.items())
        failed = (
            f"  kernel {kernel_id[:12]} failed, and ATen computes its GEMMs: {reason}"
            for kernel_id, reason in self.failed.items()
        )
        return "\n".join([self.summary, *tables, *failed])

    @property
    def summary(self) -> str:
        """Counts in one line, without sizes and winners."""
        spent = ", ".join(f"{ms:.0f} ms {name}" for name, ms in sorted(self.milliseconds.items()))
        failed = f" and failed {len(self.failed)}" if self.failed else ""
        return (
            f"{count_text(self.met, 'GEMM')}: {self.declared} declared, "
            f"{self.signature} by signature, "
            f"{self.jit} by JIT ({count_text(self.jit_kernels, 'kernel')} compiled), "
            f"{self.missed} missed; "
            f"bundled kernels won {sum(self.won.values())}{failed}; {spent or '0 ms'}"
        )


class Counters:
    """Counts of a process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nested = threading.local()
        self.reset()

    def reset(self) -> None:
        """Resets all counts."""
        with self._lock:
            self._counts: Counter[str] = Counter()
            self._misses: Counter[str] = Counter()
            self._won: Counter[str] = Counter()
            self._dispatched: Counter[str] = Counter()
            self._failed: dict[str, str] = {}
            self._milliseconds: dict[str, float] = {}
            self._reported = Stats()

    def renew_lock(self) -> None:
        """Replaces the lock in a forked child, where its holder may be a thread that is gone."""
        self._lock = threading.Lock()

    def hit(self, basis: str) -> None:
        """Counts a GEMM that got kernels: ``declared``, ``signature`` or ``jit``."""
        with self._lock:
            self._counts[basis] += 1

    def compiled(self, kernels: int) -> None:
        """Counts kernels compiled at run time for this process."""
        with self._lock:
            self._counts["jit_kernels"] += kernels

    def miss(self, reason: str) -> None:
        """Counts a GEMM without a kernel."""
        with self._lock:
            if reason not in self._misses and len(self._misses) >= MOST_REASONS:
                reason = OTHER_REASONS
            self._misses[reason] += 1

    def win(self, kernel_id: str) -> None:
        """Counts a kernel call in generated code."""
        with self._lock:
            self._won[kernel_id] += 1

    def dispatch(self, table: str) -> None:
        """Counts a dispatching call in generated code: its GEMM, sizes and winners."""
        with self._lock:
            if table not in self._dispatched and len(self._dispatched) >= MOST_REASONS:
                table = OTHER_TABLES
            self._dispatched[table] += 1

    def fail(self, kernel_id: str, reason: str) -> bool:
        """Notes that ATen computes a kernel's GEMMs from now on.

        Returns:
            True for the kernel's first failure; later reasons are dropped.
        """
        with self._lock:
            is_first = kernel_id not in self._failed
            self._failed.setdefault(kernel_id, reason)
            return is_first

    @contextlib.contextmanager
    def spending(self, name: str) -> Iterator[None]:
        """Counts the block's time, without the time that nested blocks count for themselves."""
        begin = time.perf_counter()
        outer_ms = getattr(self._nested, "ms", 0.0)
        self._nested.ms = 0.0
        try:
            yield
        finally:
            spent = (time.perf_counter() - begin) * 1e3
            own_ms = spent - self._nested.ms
            self._nested.ms = outer_ms + spent
            with self._lock:
                self._milliseconds[name] = self._milliseconds.get(name, 0.0) + own_ms

    def stats(self) -> Stats:
        """Returns the current counts."""
        with self._lock:
            return self._snapshot()

    def news(self) -> Stats:
        """Returns the counts since the last call."""
        with self._lock:
            previous, self._reported = self._reported, self._snapshot()
            return self._reported.since(previous)

    def _snapshot(self) -> Stats:
        return Stats(
            **self._counts,
            misses=dict(self._misses),
            won=dict(self._won),
            dispatched=dict(self._dispatched),
            failed=dict(self._failed),
            milliseconds=dict(self._milliseconds),
        )


COUNTERS = Counters()
"""Counts of this process."""

os.register_at_fork(after_in_child=COUNTERS.renew_lock)


def stats() -> Stats:
    """Returns this process's counts of compiled GEMMs, by how they were served."""
    return COUNTERS.stats()


def reset_stats() -> None:
    """Resets all counts."""
    COUNTERS.reset()
