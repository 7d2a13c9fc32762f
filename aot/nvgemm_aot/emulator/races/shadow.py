"""Shadow memory: for each cell, who wrote it last and who has read it since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .segments import OperationState

Index: TypeAlias = Any
"""Index of a numpy array that chooses cells."""


class Event(NamedTuple):
    """Accesses by one instruction in one segment.

    Attributes:
        segment: Number of the segment.
        place: Index of the instruction.
        warp: Warp that made them, or issued the operation that did.
        operation: The operation, or None if the warp made them.
    """

    segment: int
    place: int
    warp: Any
    operation: OperationState | None


class Content(NamedTuple):
    """A cell's history: numbers of the event that wrote it, and of those that have read it since.

    Event 0 stands for nobody.
    """

    writer: int
    readers: frozenset[int]


class Histories:
    """All events and contents, which cells name by numbers. Content 0 is never written."""

    def __init__(self) -> None:
        self.events: list[Event | None] = [None]
        self.contents: list[Content] = [Content(0, frozenset())]
        self._event_numbers: dict[tuple[int, int], int] = {}
        self._content_numbers: dict[Content, int] = {self.contents[0]: 0}

    def event(self, segment: int, place: int, warp: Any, operation: OperationState | None) -> int:
        """Returns the number of an event."""
        key = (segment, place)
        if (number := self._event_numbers.get(key)) is None:
            number = self._event_numbers[key] = len(self.events)
            self.events.append(Event(segment, place, warp, operation))
        return number

    def content(self, content: Content) -> int:
        """Returns the number of a content."""
        if (number := self._content_numbers.get(content)) is None:
            number = self._content_numbers[content] = len(self.contents)
            self.contents.append(content)
        return number


Cells: TypeAlias = npt.NDArray[np.int32]
"""Content numbers of a memory's cells."""


def change_cells(cells: Cells, index: Index, change: Callable[[int], int]) -> None:
    """Replaces the content numbers of chosen cells, each by what a function returns for it.

    Args:
        cells: All cells.
        index: The chosen ones.
        change: Called once for each content number among them.
    """
    old = cells[index]
    first = int(old.flat[0])
    if 1 not in (old != first).tobytes():
        new = change(first)
        if new != first:
            cells[index] = new
        return
    found, inverse = np.unique(old, return_inverse=True)
    replaced = np.array([change(each) for each in found.tolist()], np.int32)
    if (replaced != found).any():
        cells[index] = replaced[inverse.reshape(old.shape)]
