"""Refuses launches that a driver refuses, and finds the launched kernel's device code."""

from __future__ import annotations

import functools
import math

from nvgemm_runtime.errors import DriverError

from ...targets.profile import DeviceProfile
from ...verify.device.cubin import MAX_THREADS_PER_BLOCK, RESERVED_SHARED_BYTES, Cubin, read_cubins
from ..driver.caught_launch import CaughtLaunch
from ..emulation_errors import EmulationError
from ..machine.launch import Extent

_PORTABLE_CLUSTER, _BIGGEST_CLUSTER = 8, 16
"""Most blocks in a cluster, by default and if the launcher allows more (CUDA C++ Programming Guide,
thread block clusters)."""


def check_limits(launch: CaughtLaunch, profile: DeviceProfile) -> None:
    """Checks a launch against what its launcher allowed the kernel, and against a product.

    Raises:
        EmulationError: With the limit, if a driver would refuse the launch.
    """
    preferred = launch.preferred_cluster
    blocks = math.prod(preferred or launch.cluster)
    most_blocks = _BIGGEST_CLUSTER if launch.allows_big_clusters else _PORTABLE_CLUSTER
    shared_limit = profile.shared_memory_per_block_bytes.value
    for observed, most, unit in (
        (blocks, most_blocks, "blocks in a cluster"),
        (math.prod(launch.block), MAX_THREADS_PER_BLOCK, "threads in a block"),
        (launch.most_shared_bytes, shared_limit, f"bytes of shared memory on {profile.name}"),
        (launch.shared_bytes, launch.most_shared_bytes, "bytes of shared memory that it allows"),
    ):
        if observed > most:
            raise EmulationError(
                f"{launch.kernel}: launched with {observed} {unit}, at most {most}"
            )
    for grid, cluster, axis in zip(launch.grid, launch.cluster, "xyz"):
        if grid < 1 or cluster < 1 or grid % cluster:
            raise EmulationError(
                f"{launch.kernel}: launched with {grid} blocks along {axis}, must be a positive "
                f"multiple of the cluster's {cluster}"
            )
    if preferred is not None:
        _check_preferred(launch, preferred)


def _check_preferred(launch: CaughtLaunch, preferred: Extent) -> None:
    """Checks a preferred cluster (CUDA, cudaLaunchAttributePreferredClusterDimension)."""
    for grid, cluster, size, axis in zip(launch.grid, launch.cluster, preferred, "xyz"):
        if size < 1 or grid % size or size % cluster:
            raise EmulationError(
                f"{launch.kernel}: launched with a preferred cluster of {size} blocks along "
                f"{axis}, must divide the grid's {grid} and be a multiple of the cluster's "
                f"{cluster}"
            )


@functools.lru_cache(maxsize=8)
def cubin_of(image: bytes, kernel: str) -> Cubin:
    """Returns the cubin that holds a kernel.

    Raises:
        DriverError: If none in the image does.
    """
    # The reader skips an image at byte 0, which in a payload is the host's.
    for cubin in read_cubins(b"\0" + image):
        if any(function.name == kernel for function in cubin.kernels):
            return cubin
    raise DriverError(f"the launched device code has no kernel {kernel}")


def static_shared_bytes(image: bytes, kernel: str) -> int:
    """Returns a kernel's static shared memory per block, without the part that CUDA reserves."""
    functions = cubin_of(image, kernel).kernels
    shared = next(function.shared_bytes for function in functions if function.name == kernel)
    return max(0, shared - RESERVED_SHARED_BYTES)
