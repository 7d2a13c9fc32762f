"""Imports the `cutlass.operators` compiler and answers its GPU queries."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

from nvgemm_runtime.errors import ToolchainError, install_command

from ...targets.profile import DeviceProfile
from ..cute_dsl.whole_imports import deferred_interrupts


@functools.cache
def import_operators() -> Any:
    """Imports the compiler (about 1.7 s).

    Raises:
        ToolchainError: If part of it is missing.
    """
    with deferred_interrupts(), warnings.catch_warnings():
        # torch warns if NumPy is missing, which is not used here.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        try:
            import cutlass.operators
            import torch._subclasses.fake_tensor  # noqa: F401
        except ImportError as error:
            raise ToolchainError(
                f"cannot compile kernels: {error}; run: {install_command('build')}"
            ) from error
    return cutlass.operators


@contextlib.contextmanager
def hardware_facts(device: DeviceProfile) -> Iterator[set[int]]:
    """Answers the compiler's GPU queries from a device profile.

    Yields:
        The queried cluster sizes.
    """
    import cutlass.utils

    queried: set[int] = set()

    class ProfileHardwareInfo:
        """Replacement for the class that asks the driver, which may be missing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def get_max_active_clusters(self, cluster_size: int, *_: Any, **__: Any) -> int:
            queried.add(cluster_size)
            return device.cluster_capacity(cluster_size).value

    original = cutlass.utils.HardwareInfo
    cutlass.utils.HardwareInfo = ProfileHardwareInfo
    try:
        yield queried
    finally:
        cutlass.utils.HardwareInfo = original
