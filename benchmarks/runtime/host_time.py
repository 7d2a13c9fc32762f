"""Host time of calls until they return, in alternating windows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import torch

STREAM_DEPTH = 1024
"""Launches that a stream holds before the host waits; an H100 holds 1022. A window has fewer."""

WARM_UP_CALLS = 50


def host_times_us(
    calls: Mapping[str, Callable[[], object]], *, windows: int, window_calls: int
) -> dict[str, list[float]]:
    """Returns microseconds a call, window by window, with calls that take turns.

    Each window begins when the GPU has done all of the window before.

    Args:
        calls: Calls by name. A window must launch fewer kernels than `STREAM_DEPTH`.
        windows: Windows per call.
        window_calls: Calls in a window.
    """
    for call in calls.values():
        for _ in range(min(window_calls, WARM_UP_CALLS)):
            call()
        _synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(windows):
            for name, call in calls.items():
                _synchronize()
                begin = time.perf_counter()
                for _ in range(window_calls):
                    call()
                times[name].append((time.perf_counter() - begin) / window_calls * 1e6)
    finally:
        gc.enable()
    return times


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
