"""Imports the compiler behind `cutlass.operators`, and answers its questions about the GPU."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

from nvgemm_runtime.errors import ToolchainError

from ...targets.profile import DeviceProfile

HOST_CPU = "x86-64"
HOST_FEATURES = "+sse2"
"""What every processor of the platform has. Left alone, the compiler writes host code for the
processor of the build machine: kernels built on one with AVX-512 would crash elsewhere."""


@functools.cache
def import_operators() -> Any:
    """Import the compiler (about 1.7 s).

    Raises:
        ToolchainError: If a part of it is missing.
    """
    with warnings.catch_warnings():
        # torch warns if NumPy is missing, which is not used here.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        try:
            import cutlass.operators
            import torch._subclasses.fake_tensor  # noqa: F401
        except ImportError as error:
            raise ToolchainError(
                f"cannot compile kernels: {error}; run: pip install 'nvgemm-aot[build]'"
            ) from error
    return cutlass.operators


@functools.cache
def warm_up() -> None:
    """Compile an empty function: a process's first compile must not be for another architecture.

    See NVIDIA/cutlass#2859.
    """
    from cutlass import cute

    @cute.jit  # type: ignore[untyped-decorator]
    def nothing() -> None:
        pass

    cute.compile(nothing)


@contextlib.contextmanager
def hardware_facts(device: DeviceProfile) -> Iterator[set[int]]:
    """Answer the compiler's questions about the GPU from a device profile.

    Yields:
        The cluster sizes that were asked for.
    """
    import cutlass.utils

    asked: set[int] = set()

    class ProfileHardwareInfo:
        """Replaces the class that asks the driver, which may be missing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def get_max_active_clusters(self, cluster_size: int, *_: Any, **__: Any) -> int:
            asked.add(cluster_size)
            return device.cluster_capacity(cluster_size).value

    original = cutlass.utils.HardwareInfo
    cutlass.utils.HardwareInfo = ProfileHardwareInfo
    try:
        yield asked
    finally:
        cutlass.utils.HardwareInfo = original


def use_baseline_host_code(module: Any) -> None:
    """Set the processor of host functions to `HOST_CPU`; the exporter has no option for it."""
    from cutlass._mlir import ir

    with module.context:
        features = ir.Attribute.parse(f'#llvm.target_features<["{HOST_FEATURES}"]>')
        for operation in module.body.operations:
            if operation.operation.name == "llvm.func":
                operation.operation.attributes["target_cpu"] = ir.StringAttr.get(HOST_CPU)
                operation.operation.attributes["target_features"] = features
