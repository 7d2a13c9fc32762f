"""Timing on a GPU: replays of CUDA graphs of launches, between two events."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .race import Sample

if TYPE_CHECKING:
    import torch

GRAPH_NS = 2_000_000
"""Launches are repeated in one graph until it runs about this long: starting a graph and reading
events, some microseconds, are then lost in it."""

MOST_LAUNCHES = 512
"""In one graph; even launches that compute nothing are not quicker than about a microsecond."""

BUFFERS_OVER_L2 = 4
"""Operands take turns until they are this many times as large as the L2 cache."""


class GpuTimer:
    """Times calls on the current CUDA device. Clocks stay as they are.

    The host is not measured: launches are captured once into a CUDA graph, whose replays are timed.
    """

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Sample:
        """See `race.Timer`."""
        for call in calls[:3]:  # loads device code, and lets libraries choose their kernels
            call()
        once = min(_elapsed_ns(call) for call in calls[:2] for _ in range(2))
        count = _launches(once)
        graph = _capture(calls, count)
        # A launch by itself waits for the host: launches of a graph tell what one really takes.
        in_graph = _launches(min(_elapsed_ns(graph.replay) for _ in range(2)) / count)
        if in_graph > 2 * count:
            count = in_graph
            graph = _capture(calls, count)
            graph.replay()
        return lambda: _elapsed_ns(graph.replay) / count

    def check(self) -> None:
        """See `race.Timer`."""
        import torch

        torch.cuda.synchronize()


def _launches(launch_ns: float) -> int:
    return max(2, min(MOST_LAUNCHES, int(GRAPH_NS / max(launch_ns, 1.0))))


def _capture(calls: Sequence[Callable[[], object]], count: int) -> torch.cuda.CUDAGraph:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
    return graph


def buffer_bytes() -> int:
    """What operands must take together, so that none is found in the current device's L2."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return BUFFERS_OVER_L2 * int(properties.L2_cache_size)


def _elapsed_ns(call: Callable[[], object]) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e6
