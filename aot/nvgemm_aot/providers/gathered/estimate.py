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
"""What a step along k adds, which waits for the one before it: on an H100, 64 rows of 2,880 columns
and k 4 took 0.5 microseconds longer in four steps than in one (`TILES` of the provider)."""


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
        return round((weights + gathered + stored) / self._bytes_per_ns) + steps * _STEP_NS
