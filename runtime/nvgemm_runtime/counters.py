"""Counts how the GEMMs that torch.compile compiled in this process were served."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .errors import count_text

MOST_REASONS = 1000
"""Most reasons that misses are counted by. Reasons name problems, so a process that compiles for
ever would meet ever more of them."""

OTHER_REASONS = "other reasons"
"""What misses for all further reasons are counted by."""

OTHER_TABLES = "other tables"
"""Likewise calls that choose by m, behind as many tables as `MOST_REASONS`."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts since the process began, or since `reset_stats`.

    A GEMM counts each time that Inductor asks for choices for it. What torch takes from its caches
    is not compiled, and not counted.

    Attributes:
        declared: GEMMs that a bundle declares.
        signature: GEMMs of other sizes that bundled kernels serve.
        jit: GEMMs for which this or another process compiled kernels at run time.
        jit_kernels: Kernels that this process had compiled.
        misses: By reason, GEMMs that got no kernel; by `OTHER_REASONS` those whose reasons came up
            when `MOST_REASONS` were known.
        won: By kernel id, how often a call of it was written into generated code; a call that
            chooses by m counts for each of its kernels.
        dispatched: By GEMM, sizes and winners in words, how often a call that chooses by m was
            written into generated code.
        failed: By kernel id, why a kernel that was to compute could not be loaded, or failed before
            it ever ran here. ATen computes its GEMMs for the rest of the process.
        milliseconds: By what it was spent on: ``matching`` kernels, ``loading`` them, ``timing``
            them with all that their first launch takes, ``jit``, the waiting for a compiler.
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
        """GEMMs that got no kernel."""
        return sum(self.misses.values())

    @property
    def met(self) -> int:
        """GEMMs in all."""
        return self.declared + self.signature + self.jit + self.missed

    def since(self, earlier: Stats) -> Stats:
        """What was added to earlier counts."""
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
        """The counts in one line, without sizes and winners."""
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
    """The counts of a process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nested = threading.local()
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        with self._lock:
            self._counts: Counter[str] = Counter()
            self._misses: Counter[str] = Counter()
            self._won: Counter[str] = Counter()
            self._dispatched: Counter[str] = Counter()
            self._failed: dict[str, str] = {}
            self._milliseconds: dict[str, float] = {}
            self._told = Stats()

    def renew_lock(self) -> None:
        """Forget who holds the lock: in a forked child, perhaps a thread that it does not have."""
        self._lock = threading.Lock()

    def hit(self, basis: str) -> None:
        """Count a GEMM that got kernels: ``declared``, ``signature`` or ``jit``."""
        with self._lock:
            self._counts[basis] += 1

    def compiled(self, kernels: int) -> None:
        """Count kernels that this process had compiled."""
        with self._lock:
            self._counts["jit_kernels"] += kernels

    def miss(self, reason: str) -> None:
        """Count a GEMM that got none."""
        with self._lock:
            if reason not in self._misses and len(self._misses) >= MOST_REASONS:
                reason = OTHER_REASONS
            self._misses[reason] += 1

    def win(self, kernel_id: str) -> None:
        """Count a call of a kernel in generated code."""
        with self._lock:
            self._won[kernel_id] += 1

    def dispatch(self, table: str) -> None:
        """Count a call in generated code that chooses by m: its GEMM, sizes and winners."""
        with self._lock:
            if table not in self._dispatched and len(self._dispatched) >= MOST_REASONS:
                table = OTHER_TABLES
            self._dispatched[table] += 1

    def fail(self, kernel_id: str, reason: str) -> bool:
        """Note that ATen computes the GEMMs of a kernel from now on.

        Returns:
            Whether that was not known; the first reason counts.
        """
        with self._lock:
            is_first = kernel_id not in self._failed
            self._failed.setdefault(kernel_id, reason)
            return is_first

    @contextlib.contextmanager
    def spending(self, name: str) -> Iterator[None]:
        """Count the time that the block takes, without what blocks in it count for themselves."""
        begin = time.perf_counter()
        beside = getattr(self._nested, "ms", 0.0)
        self._nested.ms = 0.0
        try:
            yield
        finally:
            spent = (time.perf_counter() - begin) * 1e3
            own = spent - self._nested.ms
            self._nested.ms = beside + spent
            with self._lock:
                self._milliseconds[name] = self._milliseconds.get(name, 0.0) + own

    def stats(self) -> Stats:
        """The counts as they are now."""
        with self._lock:
            return self._now()

    def news(self) -> Stats:
        """What was counted since this was last called."""
        with self._lock:
            told, self._told = self._told, self._now()
            return self._told.since(told)

    def _now(self) -> Stats:
        return Stats(
            **self._counts,
            misses=dict(self._misses),
            won=dict(self._won),
            dispatched=dict(self._dispatched),
            failed=dict(self._failed),
            milliseconds=dict(self._milliseconds),
        )


COUNTERS = Counters()
"""The counts of this process."""

os.register_at_fork(after_in_child=COUNTERS.renew_lock)


def stats() -> Stats:
    """Counts of how the GEMMs that this process compiled were served."""
    return COUNTERS.stats()


def reset_stats() -> None:
    """Count from zero again."""
    COUNTERS.reset()
