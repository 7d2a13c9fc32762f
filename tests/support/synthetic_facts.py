"""GPUs as a process with the runtime library would see them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nvgemm_runtime.matching.device import DeviceFacts, RuntimeLibrary

LIBRARY = RuntimeLibrary(path=Path("/lib.so"), cuda="cu13", version="4.8.1")

B200 = DeviceFacts(
    kind="cuda",
    name="NVIDIA B200",
    capability=(10, 0),
    multiprocessors=148,
    platform="linux_x86_64",
    cuda="cu13",
    runtime_library=LIBRARY,
)

H200 = replace(B200, name="NVIDIA H200", capability=(9, 0), multiprocessors=132)
