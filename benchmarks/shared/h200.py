"""The measuring GPU's device facts, for benchmarks that run without one."""

from __future__ import annotations

from pathlib import Path

from nvgemm_runtime.matching.device import RUNTIME_LIBRARY, DeviceFacts, RuntimeLibrary

H200 = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    multiprocessors=132,
    platform="linux_x86_64",
    cuda="cu13",
    runtime_library=RuntimeLibrary(path=Path(RUNTIME_LIBRARY), cuda="cu13", version="4.8.1"),
)
