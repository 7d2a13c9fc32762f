"""Estimated runtimes of sums of gathered rows: what is moved, by the memory's bandwidth.

They rank designs of one kernel, which differ little. Rows that are read twice count twice, although
the L2 cache may have them.
"""

from __future__ import annotations

from nvgemm_runtime.gemm.problem import Problem

from ..base import BlockShape

_BYTES_PER_NS = {"H100": 3_350, "H200": 4_800, "B200": 8_000, "GB200": 8_000, "GB300": 8_000}
"""Bandwidth of memory by device profile, as NVIDIA's data sheets state it."""

_USUAL_BYTES_PER_NS = min(_BYTES_PER_NS.values())
"""That of other devices, which changes no order but that of a few rows."""

_STEP_NS = 170
"""What a step along k adds where multiprocessors have too few warps to hide it: on an H100, 64 rows
of 2,880 columns and k 4 took 0.5 microseconds longer in four steps than in one."""

_FULL = 132 * 16
"""Thread blocks of 128 threads with which all multiprocessors of an H200 are full."""

_SEVERAL_LOADS = 1.05
"""How much longer a full GPU takes with several loads at once, which need registers: 1.03 to 1.08
at m 24,576 (benchmarks/results/gathered-designs-h200-2026-11-26.txt)."""


class MemoryModel:
    """A model of one GPU product's memory.

    Args:
        device: Name of its profile, e.g. ``H100``.
    """

    name = "nvgemm-aot bytes moved 1"

    def __init__(self, device: str) -> None:
        self._bytes_per_ns = _BYTES_PER_NS.get(device, _USUAL_BYTES_PER_NS)

    def estimate_ns(self, problem: Problem, shape: BlockShape) -> int | None:
        """Estimate a runtime; see `RuntimeModel.estimate_ns`.

        A step loads as many rows as the tile has along k. Those behind the last count as if they
        were loaded: what is left out costs instructions, and registers of its own.
        """
        signature = problem.signature
        steps = -(-problem.k // shape.tile[2])
        weights = signature.a.bytes_of(problem.m * problem.k) * 2  # and as many numbers of rows
        gathered = signature.b.bytes_of(problem.m * steps * shape.tile[2] * problem.n)
        stored = signature.out.bytes_of(problem.m * problem.n)
        moved_ns = (weights + gathered + stored) / self._bytes_per_ns
        if shape.tile[2] > 1:
            moved_ns *= _SEVERAL_LOADS
        blocks = problem.m * -(-problem.n // shape.tile[1])
        return round(moved_ns + steps * _STEP_NS * max(0, 1 - blocks / _FULL))
