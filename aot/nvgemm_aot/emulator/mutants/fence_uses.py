"""Notes what each fence and wait of a kernel orders, and if anything relied on it."""

from __future__ import annotations

import enum
from typing import Any

from ..machine.fusion import running_instruction
from ..machine.ordering import Block, Clock, Warp
from ..races.detector import RaceDetector
from ..races.race_findings import Access
from ..races.segments import Knowledge
from ..races.shadow import Event


class Redundancy(enum.IntEnum):
    """Reasons why a program can do without a fence or wait; a larger one is a weaker reason."""

    ORDERS_NOTHING = 0
    NOT_RELIED_ON = 1
    ORDERED_BY_OTHERS = 2

    @property
    def text(self) -> str:
        """The reason in words."""
        return (
            "it orders nothing that is not ordered already",
            "no access relies on what it orders",
            "others order the accesses that rely on it, too",
        )[self]


class FenceUses(RaceDetector):
    """Detects races, and notes by instruction which segments it newly ordered."""

    def __init__(self) -> None:
        super().__init__()
        self._gains: dict[int, Knowledge] = {}
        self._relied = Knowledge()

    def redundancy(self, place: int) -> Redundancy:
        """Returns why a program can do without a fence or wait, if it can."""
        gained = self._gains.get(place, Knowledge())
        if any(mine & used for mine, used in zip(gained, self._relied)):
            return Redundancy.ORDERED_BY_OTHERS
        return Redundancy.NOT_RELIED_ON if any(gained) else Redundancy.ORDERS_NOTHING

    def acquire(self, warp: Warp, clock: Clock) -> None:
        """Notes what a wait orders."""
        before = self._state(warp).known
        super().acquire(warp, clock)
        self._note(warp, before)

    def fence_async(self, warp: Warp) -> None:
        """Notes what a proxy fence orders."""
        before = self._state(warp).known
        super().fence_async(warp)
        after = self._state(warp).known
        self._note(warp, before._replace(generic=after.generic))

    def fence_initialised_barriers(self, warp: Warp) -> None:
        """Notes which barriers a fence makes visible."""
        before = self._state(warp).known
        super().fence_initialised_barriers(warp)
        after = self._state(warp).known
        self._note(warp, before._replace(generic=after.generic))

    def use_barrier(
        self, warp: Warp, block: Block, offset: int, *, asynchronous: bool = False
    ) -> None:
        """Notes on whose initialisation of a barrier its use relies."""
        super().use_barrier(warp, block, offset, asynchronous=asynchronous)
        cells = self._shared.get(block)
        if cells is not None:
            content = self._histories.contents[int(cells[offset // self._granule])]
            event = self._histories.events[content.writer]
            if event is not None:
                self._relied |= Knowledge(barriers=1 << event.segment)

    def _note(self, warp: Warp, before: Knowledge) -> None:
        after = self._state(warp).known
        place = running_instruction(warp)
        gained = Knowledge(*(new & ~old for new, old in zip(after, before)))
        self._gains[place] = self._gains.get(place, Knowledge()) | gained

    def _check(
        self, access: Access, event: Event, block: Any, space: str, *, was_read: bool, reads: bool
    ) -> None:
        super()._check(access, event, block, space, was_read=was_read, reads=reads)
        segment = 1 << event.segment
        asynchronous = access.operation is not None and event.operation is None
        self._relied |= Knowledge(segment, segment if asynchronous else 0, 0)
