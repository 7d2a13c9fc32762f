"""Processes of the benchmark: their modes, caches, and the order in which they take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.table import Start
from nvgemm_runtime.settings import Mode

STARTS = (Start.COLD, Start.WARM, Start.COLD)
"""Starts of a mode's processes, again and again: two with caches of their own, for whether they
choose alike, and one with those of the process before."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process to measure.

    Attributes:
        mode: Mode of nvgemm-aot.
        start: Caches that it begins with.
    """

    mode: Mode
    start: Start

    @property
    def label(self) -> str:
        """Name in progress lines."""
        return f"{self.mode.value}, {self.start.value}"


class Caches:
    """Cache directories: a new one for each cold process, kept for its mode's warm ones."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._latest: dict[Mode, Path] = {}
        self._count = 0

    def of(self, process: Process) -> Path:
        """Returns a process' cache directory."""
        if process.start is Start.COLD:
            self._count += 1
            self._latest[process.mode] = self._directory / f"{process.mode.value}-{self._count}"
            self._latest[process.mode].mkdir(parents=True)
        return self._latest[process.mode]


def turns(repeat: int) -> list[Process]:
    """Returns so many processes of each mode: off, auto, auto, off, off, auto."""
    order = []
    for turn in range(repeat):
        modes = (Mode.OFF, Mode.AUTO) if turn % 2 == 0 else (Mode.AUTO, Mode.OFF)
        order += [Process(mode=mode, start=STARTS[turn % len(STARTS)]) for mode in modes]
    return order


def left_of(order: list[Process], done: Iterable[Process]) -> list[Process]:
    """Returns an order's rest after these processes.

    A warm process needs the caches of a cold one of its mode, which are gone when the benchmark
    continues: the next cold one comes before it, or another if there is none.
    """
    counts = Counter(done)
    left: list[Process] = []
    for process in order:
        if counts[process]:
            counts[process] -= 1
        else:
            left.append(process)
    for mode in (Mode.OFF, Mode.AUTO):
        of_mode = [process for process in left if process.mode is mode]
        if of_mode and of_mode[0].start is Start.WARM:
            cold = Process(mode=mode, start=Start.COLD)
            at = left.index(of_mode[0])
            if cold in left:
                left.remove(cold)
            left.insert(at, cold)
    return left
