"""Journals of parts that workers measure, kept here from the lines that workers send."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..part_measuring import Part
from ..session import Progress
from ..state.journal import Journal, Line, state_path
from .several_gpus import SummedProgress


@dataclass(kw_only=True)
class _PartJournal:
    """A part's journal here, and the number of lines that it has of the worker's."""

    path: Path
    journal: Journal | None = None
    count: int = 0

    def add(self, lines: Sequence[Line], at: int = 0) -> None:
        """Appends those of the worker's lines from ``at`` that the file lacks."""
        for line in lines[max(0, self.count - at) :]:
            if self.journal is None:
                self.journal = Journal(self.path, line)
            else:
                self.journal.append(line)
            self.count += 1


@dataclass
class PartJournals:
    """Journals of parts on workers, and their progress, from events."""

    parts: Sequence[Part]
    events: queue.SimpleQueue[dict[str, Any]]
    progress: Progress | None
    again: Progress | None
    ended: int = 0
    journals: dict[str, _PartJournal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sums = {
            name: SummedProgress(report=report, parts=len(self.parts))
            for name, report in (("progress", self.progress), ("again", self.again))
        }
        self._reports = {
            (part.output.name, name): one.of(index)
            for index, part in enumerate(self.parts)
            for name, one in sums.items()
        }
        for part in self.parts:
            self.journals[part.output.name] = _PartJournal(path=state_path(part.output))

    def keep(self, seconds: float) -> None:
        """Waits for an event, and takes all that have come."""
        with contextlib.suppress(queue.Empty):
            self._take(self.events.get(timeout=seconds))
            while True:
                self._take(self.events.get_nowait())

    def _take(self, event: dict[str, Any]) -> None:
        name = event["part"]
        self.ended += "ended" in event
        self.journals[name].add(event.get("lines", ()), event.get("at", 0))
        for kind in ("progress", "again"):
            report = self._reports[name, kind]
            if kind in event and report is not None:
                report(*event[kind])

    def complete(self, part: Part, lines: Sequence[Line]) -> None:
        """Adds those of a finished part's lines that no event has brought."""
        self.journals[part.output.name].add(lines)

    def close(self) -> None:
        """Keeps what has come, and closes the files."""
        self.keep(0.0)
        for one in self.journals.values():
            if one.journal is not None:
                one.journal.close()
