"""Named barriers of a block (``bar``, ``barrier``): threads arrive, and some wait."""

from __future__ import annotations

from ..emulation_errors import EmulationError
from .lanes import LANES
from .ordering import Clock, Ordering, Warp

COUNT = 16
"""Named barriers of a block (PTX ISA, "bar, barrier")."""


class NamedBarriers:
    """The barriers of one block."""

    def __init__(self) -> None:
        self._arrived = [0] * COUNT
        self._expected = [0] * COUNT
        self._for_all = [False] * COUNT
        self._clocks: list[Clock] = [None] * COUNT
        self._waiting: list[list[Warp]] = [[] for _ in range(COUNT)]

    def arrive(
        self, ordering: Ordering, warp: Warp, number: int, threads: int | None, *, waits: bool
    ) -> bool:
        """Counts a warp's arrival; returns whether the barrier opened.

        A warp that waits and does not open it is parked.

        Args:
            ordering: Watches the order of accesses.
            warp: The warp.
            number: The barrier's number.
            threads: Threads that the barrier expects; None for all that have not ended.
            waits: True if the warp waits for the barrier.

        Raises:
            EmulationError: If the number is not a barrier's, or warps expect unequal numbers of
                threads at it.
        """
        if not 0 <= number < COUNT:
            raise EmulationError(f"barrier {number} must be in 0..{COUNT - 1}")
        for_all = threads is None
        if threads is None:
            threads = LANES * sum(not each.done for each in warp.block.warps)
        if threads % LANES or threads <= 0:
            raise EmulationError(f"barrier {number} expects {threads} threads, not whole warps")
        if self._arrived[number] and self._expected[number] != threads:
            raise EmulationError(
                f"barrier {number} expects {threads} threads, but others expect "
                f"{self._expected[number]}"
            )
        self._expected[number] = threads
        self._for_all[number] |= for_all
        self._arrived[number] += LANES
        self._clocks[number] = ordering.merge(self._clocks[number], ordering.release(warp))
        if self._arrived[number] < threads:
            if waits:
                self._waiting[number].append(warp)
                warp.parked = True
                warp.waiting = f"barrier {number} of {threads} threads"
            return False
        if waits:
            self._waiting[number].append(warp)
        self._open(ordering, number)
        return True

    def leave(self, ordering: Ordering) -> None:
        """Expects a warp less, which has ended, where all threads are expected."""
        for number in range(COUNT):
            if self._arrived[number] and self._for_all[number]:
                self._expected[number] -= LANES
                if self._arrived[number] >= self._expected[number]:
                    self._open(ordering, number)

    def _open(self, ordering: Ordering, number: int) -> None:
        for each in self._waiting[number]:
            ordering.acquire(each, self._clocks[number])
            each.parked = False
            each.waiting = None
        self._arrived[number], self._clocks[number], self._waiting[number] = 0, None, []
        self._for_all[number] = False
