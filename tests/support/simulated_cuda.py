"""A simulated CUDA device for tests of timers: a clock, events that read it, and graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch


class SimulatedCuda:
    """Runs work at once, or when the graph is replayed that captures it.

    Attributes:
        now_ms: The clock, which work advances.
        late: How many of the next events the device has reached when the host asks, because the
            host was slow to send what follows them.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.late = 0
        self._captured: list[Callable[[], None]] | None = None

    def submit(self, run: Callable[[], None]) -> None:
        """Do work, or have the graph that is being captured do it."""
        if self._captured is None:
            run()
        else:
            self._captured.append(run)

    def on_synchronize(self) -> None:
        """Called where the host waits for an event."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give torch this device's events and graphs."""
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_ms = device.now_ms

            def query(self) -> bool:
                was_late = device.late > 0
                device.late -= was_late
                return was_late

            def synchronize(self) -> None:
                device.on_synchronize()

            def elapsed_time(self, end: Event) -> float:
                return end.at_ms - self.at_ms

        class Graph:
            def __init__(self) -> None:
                self.work: list[Callable[[], None]] = []

            def replay(self) -> None:
                for work in self.work:
                    work()

        @contextlib.contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            device._captured = graph.work
            yield
            device._captured = None

        for name, fake in {"Event": Event, "CUDAGraph": Graph, "graph": capture}.items():
            monkeypatch.setattr(torch.cuda, name, fake)
