"""GEMM timing on a GPU, without effects from L2, host and order.

Operands are random and take turns. Windows begin with L2 overwritten, follow each other in random
order, and are timed by events on the GPU while the host is ahead.

- offline: launches as a CUDA graph, back to back or *apart*. Apart, a small kernel runs between
  launches, which begins after the launch before it has ended and ends before the next begins.
  Kernels of programmatic dependent launch overlap with each other back to back, but not with the
  other work of a program. The small kernel's own time is subtracted.
- server: single launches after random gaps; the gap does not count.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from nvgemm_aot.tuning.measuring.gpu import small_kernel
from nvgemm_runtime.bundle.ranking_entries import APART, BACK_TO_BACK
from nvgemm_runtime.gemm.problem import Layout

if TYPE_CHECKING:
    import torch

Operands = tuple[Any, Any, Any]
"""Tensors A [m, k], B [k, n] and the result [m, n], row-major."""

Launch = Callable[..., Any]
"""Starts a GEMM on the current stream, given A, B and the result."""

BUFFER_BYTES = 200_000_000
"""Least bytes over all operand sets: over three times an H200's L2 cache."""
FLUSH_BYTES = 256_000_000
"""Bytes overwritten before a window, so that L2 holds no operand."""
MAX_LAUNCHES = 256
"""Most launches in a window."""
SPIN_CYCLES = 200_000
"""Cycles for which the GPU is kept busy, about 100 us, while the host sends a window,"""
SPIN_CYCLES_PER_LAUNCH = 20_000
"""and about 10 us more per launch."""
MOST_WAITS = 9
"""Most tries to time launches, each behind a wait twice as long as before, up to 28 ms for one
launch."""

_ALIGNED = 128
"""Operand alignment in two-byte elements, as from torch's allocator."""


def set_count(m: int, n: int, k: int) -> int:
    """Returns how many operand sets take turns, with two bytes an element."""
    set_bytes = 2 * (m * k + k * n + m * n)
    return max(2, min(MAX_LAUNCHES, -(-BUFFER_BYTES // set_bytes)))


def launch_count(launch_ns: float, window_ns: float) -> int:
    """Returns the launches in a window."""
    return max(1, min(MAX_LAUNCHES, round(window_ns / max(launch_ns, 1.0))))


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED


class Arena:
    """Memory for operands, filled with random numbers once."""

    def __init__(
        self, dtype: torch.dtype, sizes: Sequence[tuple[int, int, int]], device: str = "cuda"
    ) -> None:
        import torch

        inputs = max(set_count(m, n, k) * (_aligned(m * k) + _aligned(k * n)) for m, n, k in sizes)
        outputs = max(set_count(m, n, k) * _aligned(m * n) for m, n, k in sizes)
        self._inputs = torch.randn(inputs, dtype=dtype, device=device)
        self._outputs = torch.empty(outputs, dtype=dtype, device=device)

    def sets(self, m: int, n: int, k: int, layout: Layout) -> list[Operands]:
        """Returns `set_count` random operand sets, which share no memory."""
        found = []
        for number in range(set_count(m, n, k)):
            begin = number * (_aligned(m * k) + _aligned(k * n))
            a = self._inputs[begin : begin + m * k]
            begin += _aligned(m * k)
            b = self._inputs[begin : begin + k * n]
            begin = number * _aligned(m * n)
            out = self._outputs[begin : begin + m * n].view(m, n)
            found.append((*shaped(a, b, m, n, k, layout), out))
        return found


def shaped(
    a: torch.Tensor, b: torch.Tensor, m: int, n: int, k: int, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A [m, k] and B [k, n] in a layout, over flat memory."""
    return (
        a.view(m, k) if layout.a_row_major else a.view(k, m).T,
        b.view(k, n) if layout.b_row_major else b.view(n, k).T,
    )


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Operands with only zeros and ones, and their product.

    Products are 0 or 1 and sums whole numbers below 2^24, so whatever sums in fp32 is right to the
    last bit, in whatever order, and rounding it to the result's type is the same everywhere.
    """

    a: torch.Tensor
    b: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def draw(
        cls, m: int, n: int, k: int, layout: Layout, dtype: torch.dtype, device: str = "cuda"
    ) -> Exact:
        """Draws operands."""
        import torch

        flat_a, flat_b = (
            torch.randint(0, 2, (size,), dtype=torch.int8, device=device).to(dtype)
            for size in (m * k, k * n)
        )
        a, b = shaped(flat_a, flat_b, m, n, k, layout)
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")  # TF32 holds zeros and ones exactly
        try:
            expected = (a.float() @ b.float()).to(dtype)
        finally:
            torch.set_float32_matmul_precision(precision)
        return cls(a=a, b=b, expected=expected)

    def error(self, launch: Launch) -> float:
        """Returns the error of a launch's output, the difference's norm over the norm.

        Returns:
            0 where every bit is as expected; not a number where an element was not written.
        """
        import torch

        out = torch.full_like(self.expected, float("nan"))
        launch(self.a, self.b, out)
        if torch.equal(out, self.expected):
            return 0.0
        expected = self.expected.float()
        return float((out.float() - expected).norm() / expected.norm())


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Way to compute a GEMM.

    Attributes:
        launch: Starts it.
        sets: Operands that take turns.
    """

    launch: Launch
    sets: Sequence[Operands]


@functools.cache
def _flushing_memory() -> torch.Tensor:
    import torch

    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def flush() -> None:
    """Overwrites L2."""
    _flushing_memory().zero_()


def launch_ns(way: Contender, count: int = 1, first: int = 0) -> float:
    """Returns nanoseconds a launch, over ``count`` launches in a row after an L2 flush.

    A kernel that only waits keeps the GPU busy while the host sends the launches. Where the GPU was
    through with it before all were sent, part of the time would be the host's: then everything is
    done again behind one that waits twice as long.

    Raises:
        click.ClickException: If the host is late behind the longest wait, too, as it is where
            the launch itself waits for the GPU.
    """
    import torch

    for doublings in range(MOST_WAITS):
        cycles = (SPIN_CYCLES + count * SPIN_CYCLES_PER_LAUNCH) << doublings
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush()
        torch.cuda._sleep(cycles)
        begin.record()
        for number in range(first, first + count):
            way.launch(*way.sets[number % len(way.sets)])
        end.record()
        was_ahead = not begin.query()
        end.synchronize()
        if was_ahead:
            return float(begin.elapsed_time(end)) * 1e6 / count
    raise click.ClickException(
        f"the host sent {count} launches too late in {MOST_WAITS} tries, the last of them behind a "
        f"wait of {cycles} cycles, so the GPU's time is not known: run where the host is idle"
    )


def _captured(
    way: Contender, window_ns: float, between: Callable[[], object] | None = None
) -> tuple[torch.cuda.CUDAGraph, int]:
    """Returns a launch graph, replayed once, and its launch count."""
    import torch

    count = launch_count(min(launch_ns(way, first=number) for number in range(3)), window_ns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            if between is not None:
                between()
            way.launch(*way.sets[number % len(way.sets)])
    graph.replay()
    return graph, count


_BETWEEN = "the kernel between"
"""Name for the small kernel between launches."""


def offline_ns(
    ways: Mapping[str, Contender],
    rounds: int,
    window_ns: float,
    order: random.Random,
    *,
    launches: str = BACK_TO_BACK,
) -> dict[str, list[float]]:
    """Returns each way's nanoseconds a launch, round by round, back to back or apart.

    Args:
        ways: Ways to measure, by name.
        rounds: Windows per way.
        window_ns: About how long a window is.
        order: Shuffles the ways in each round.
        launches: `APART` or `BACK_TO_BACK`.
    """
    import torch

    between = small_kernel() if launches == APART else None
    graphs = {name: _captured(way, window_ns, between) for name, way in ways.items()}
    if between is not None:
        alone = Contender(launch=lambda a, b, out: between(), sets=[(None, None, None)])
        graphs[_BETWEEN] = _captured(alone, window_ns)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for _ in range(rounds):
        order.shuffle(names)
        events = {}
        torch.cuda._sleep(SPIN_CYCLES)
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            begin.record()
            graphs[name][0].replay()
            end.record()
            events[name] = begin, end
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            times[name].append(begin.elapsed_time(end) * 1e6 / graphs[name][1])
    return without_between(times)


def without_between(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Returns times less the median kernel between launches, if there is one."""
    between_ns = statistics.median(times[_BETWEEN]) if _BETWEEN in times else 0.0
    return {
        name: [max(1.0, time_ns - between_ns) for time_ns in of_way]
        for name, of_way in times.items()
        if name != _BETWEEN
    }


def server_ns(
    ways: Mapping[str, Contender], requests: int, mean_gap_s: float, order: random.Random
) -> dict[str, list[float]]:
    """Returns each way's nanoseconds per single launch after random gaps.

    Gaps are drawn from an exponential distribution. After the gap, and before what is timed, L2 is
    flushed, and a kernel runs that only waits, so that what the host takes to send the launch is
    not counted either.

    Args:
        ways: Ways to measure, by name.
        requests: Launches per way.
        mean_gap_s: Mean gap in seconds.
        order: Shuffles the ways, and draws the gaps.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for way in ways.values():
        launch_ns(way)
    for number in range(requests):
        order.shuffle(names)
        for name in names:
            time.sleep(order.expovariate(1 / mean_gap_s))
            times[name].append(launch_ns(ways[name], first=number))
    return times


def tuned(
    ways: Mapping[str, Contender], passes: int, window_ns: float, order: random.Random
) -> dict[str, float]:
    """Returns quick medians for many ways, in nanoseconds a launch.

    Without graphs, for capturing takes longer than what this is for; ways take turns in random
    order, with operands in turn.
    """
    counts = {
        name: min(20, launch_count(min(launch_ns(way), launch_ns(way, first=1)), window_ns))
        for name, way in ways.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for _ in range(passes):
        order.shuffle(names)
        for name in names:
            first = order.randrange(len(ways[name].sets))
            times[name].append(launch_ns(ways[name], counts[name], first))
    return {name: statistics.median(of_way) for name, of_way in times.items()}
