"""Memory barriers (mbarrier): counts of arrivals and bytes, by phases."""

from __future__ import annotations

from ..emulation_errors import EmulationError
from .ordering import Clock, Ordering, Warp

TRANSACTION_LIMIT = (1 << 20) - 1
"""Bytes that may be pending at a barrier (PTX ISA, "Size and alignment of mbarrier object")."""


class MemoryBarrier:
    """One barrier.

    Attributes:
        expected: Arrivals of a phase.
        pending: Arrivals that are missing in this phase.
        bytes: Bytes that copies still have to bring in this phase; negative if they came first.
        phase: Number of the current phase.
        arrived: Clock of the arrivals in this phase; ``passed``, of those in the last one.
        suspended: Warps that are suspended until this phase ends.
    """

    __slots__ = ("arrived", "bytes", "expected", "passed", "pending", "phase", "suspended")

    def __init__(self, expected: int) -> None:
        self.expected = self.pending = expected
        self.bytes = 0
        self.phase = 0
        self.arrived: Clock = None
        self.passed: Clock = None
        self.suspended: list[Warp] = []

    @property
    def is_between_phases(self) -> bool:
        """True if no arrival and no bytes belong to the current phase yet."""
        return self.pending == self.expected and not self.bytes

    @property
    def bytes_text(self) -> str:
        """Text about the bytes that the current phase waits for."""
        if self.bytes < 0:
            return f"copies brought {-self.bytes} bytes too many"
        return f"{self.bytes} bytes are missing"

    def arrive(
        self,
        ordering: Ordering,
        clock: Clock,
        *,
        count: int = 1,
        expect: int = 0,
        drop: bool = False,
    ) -> bool:
        """Counts arrivals, and bytes to expect; returns whether the phase ended.

        With ``drop``, later phases expect that many arrivals less.
        """
        self.bytes += expect
        self.pending -= count
        if self.pending < 0:
            raise EmulationError(
                f"{count} arrivals at a memory barrier that expects {self.pending + count} more"
            )
        if drop:
            self.expected -= count
        return self._advance(ordering, clock)

    def expect(self, size: int) -> None:
        """Counts bytes that the current phase waits for."""
        self.bytes += size
        self._check_bytes()

    def complete(self, ordering: Ordering, clock: Clock, size: int) -> bool:
        """Counts bytes that a copy brought; returns whether the phase ended."""
        self.bytes -= size
        return self._advance(ordering, clock)

    def _advance(self, ordering: Ordering, clock: Clock) -> bool:
        self._check_bytes()
        self.arrived = ordering.merge(self.arrived, clock)
        if self.pending or self.bytes:
            return False
        self.phase += 1
        self.pending = self.expected
        self.passed, self.arrived = self.arrived, None
        for warp in self.suspended:
            warp.suspended = False
        self.suspended.clear()
        return True

    def _check_bytes(self) -> None:
        if abs(self.bytes) > TRANSACTION_LIMIT:
            raise EmulationError(
                f"{self.bytes} bytes pend at a memory barrier, must be at most {TRANSACTION_LIMIT}"
            )
