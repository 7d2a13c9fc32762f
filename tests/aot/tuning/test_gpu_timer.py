"""The timer of CUDA devices, on a simulated one that runs kernels of programmatic dependent launch.

Such a kernel begins before the one in front of it has ended, if that one signals.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nvgemm_aot.tuning.measuring import gpu
from nvgemm_aot.tuning.measuring.gpu import GpuTimer
from nvgemm_runtime.bundle.ranking_entries import APART, BACK_TO_BACK
from simulated_cuda import SimulatedCuda

BETWEEN_MS = 0.002
OVERLAP_MS = 0.003


class SimulatedStream(SimulatedCuda):
    """Kernels that signal let the next one of theirs begin early."""

    def __init__(self) -> None:
        super().__init__()
        self.signalled = False

    def launch(self, milliseconds: float, *, is_dependent: bool) -> None:
        def run() -> None:
            self.now_ms += milliseconds - OVERLAP_MS * (is_dependent and self.signalled)
            self.signalled = is_dependent

        self.submit(run)

    def on_synchronize(self) -> None:
        self.signalled = False  # nothing runs any more


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimulatedStream:
    stream = SimulatedStream()
    stream.install(monkeypatch)
    monkeypatch.setattr(
        gpu, "small_kernel", lambda: lambda: stream.launch(BETWEEN_MS, is_dependent=False)
    )
    return stream


def test_dependent_launches_gain_nothing_apart(stream: SimulatedStream) -> None:
    def dependent() -> None:
        stream.launch(0.010, is_dependent=True)

    def plain() -> None:
        stream.launch(0.009, is_dependent=False)

    timer = GpuTimer()
    apart = {call: timer.prepare([call], launches=APART)() for call in (dependent, plain)}
    assert apart == {dependent: pytest.approx(10_000), plain: pytest.approx(9_000)}
    beside = {call: timer.prepare([call], launches=BACK_TO_BACK)() for call in (dependent, plain)}
    assert beside[plain] == pytest.approx(9_000), "what overlaps with nothing takes as long"
    assert beside[dependent] == pytest.approx(7_000, rel=0.01)


def test_apart_is_the_default_and_calls_take_turns(stream: SimulatedStream) -> None:
    seen = []

    def call(number: int) -> Callable[[], None]:
        def run() -> None:
            seen.append(number)
            stream.launch(1.0, is_dependent=True)

        return run

    sample = GpuTimer().prepare([call(0), call(1)])
    assert sample() == pytest.approx(1_000_000)
    assert seen[-2:] == [0, 1]
