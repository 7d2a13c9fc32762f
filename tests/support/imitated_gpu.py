"""Imitated GPU and host, for tests of `nvgemm_runtime.inductor.autotuning.gpu_times`."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from nvgemm_runtime.inductor.autotuning import gpu_times

FLUSH_US = 20.0
"""What the imitated GPU takes to read as much as its L2 cache holds."""

BOOSTED_US = 100e3
"""For how long it may run at higher clocks."""


@dataclass
class Machine:
    """A host that sends work to a GPU, each with a clock of its own, in microseconds.

    Attributes:
        boost: What share of its time the GPU takes for work until it has worked for `BOOSTED_US`.
        last: Whose call came last, where callers say so.
    """

    host_us: float = 0.0
    gpu_us: float = 0.0
    worked_us: float = 0.0
    boost: float = 1.0
    last: object = None
    flushes: int = 0
    waits_us: list[float] = field(default_factory=list)

    def run(self, *, host_us: float, gpu_us: float) -> None:
        """The host takes some time to send what then takes the GPU some time, in order."""
        self.host_us += host_us
        took_us = gpu_us * (self.boost if self.worked_us < BOOSTED_US else 1.0)
        self.worked_us += took_us
        self.gpu_us = max(self.gpu_us, self.host_us) + took_us

    def flush(self) -> None:
        self.flushes += 1
        self.run(host_us=5.0, gpu_us=FLUSH_US)

    def sleep(self, cycles: int) -> None:
        self.waits_us.append(cycles / gpu_times.CYCLES_PER_MS * 1e3)
        self.host_us += 5.0
        self.gpu_us = max(self.gpu_us, self.host_us) + self.waits_us[-1]

    def synchronize(self) -> None:
        self.host_us = max(self.host_us, self.gpu_us)


class Event:
    """An event of the imitated GPU."""

    machine: Machine

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.machine.run(host_us=1.0, gpu_us=0.0)
        self.time_us = self.machine.gpu_us

    def query(self) -> bool:
        return self.time_us <= self.machine.host_us

    def elapsed_time(self, later: Event) -> float:
        return (later.time_us - self.time_us) / 1e3


def imitate(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine on which `gpu_times` times calls."""
    machine = Machine()
    monkeypatch.setattr(Event, "machine", machine, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", machine.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", machine.sleep)
    monkeypatch.setattr(gpu_times.time, "perf_counter", lambda: machine.host_us / 1e6)
    monkeypatch.setattr(gpu_times, "_l2_flush", lambda: machine.flush)
    monkeypatch.setattr(
        gpu_times, "_small_kernel", lambda: lambda: machine.run(host_us=2.0, gpu_us=1.5)
    )
    return machine
