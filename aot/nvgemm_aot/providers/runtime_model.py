"""What estimates the runtime of kernels that nobody has timed; a provider names its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nvgemm_runtime.gemm.problem import Problem


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What the model needs to know of a kernel: what one thread block computes and loads.

    Attributes:
        tile: Extents (m, n, k) of one thread block's tile.
        cluster: Thread blocks of a cluster along (m, n).
        swapped: Whether the kernel computes the transposed problem (its m is the problem's n).
    """

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    swapped: bool = False


class RuntimeModel(Protocol):
    """A model of one device.

    Making one must be quick, for plans are looked up by its name: what is slow to load is loaded by
    the first estimate.
    """

    @property
    def name(self) -> str:
        """Name and version, as rankings state it, e.g. ``nvidia-matmul-heuristics 0.1.0.27``.

        Raises:
            ToolchainError: If the model is not installed.
        """

    def estimate_ns(self, problem: Problem, shape: BlockShape) -> int | None:
        """Estimate the runtime of ``problem``: nanoseconds, or None where there is no answer.

        Raises:
            ToolchainError: If the model cannot be loaded, or does not know the device.
        """
