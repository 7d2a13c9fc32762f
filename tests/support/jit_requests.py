"""What compiling at run time is asked for: a device, and the manifest of one problem."""

from __future__ import annotations

from nvgemm_aot.manifest.parse import Declared, Manifest
from nvgemm_aot.targets import build_target
from nvgemm_aot.targets.local import Device
from nvgemm_runtime.gemm.problem import Problem

DEVICE = Device(
    kind="cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    multiprocessors=132,
    shared_memory_bytes=None,
    platform="linux_x86_64",
    cuda="cu13",
)


def manifest_of(wanted: Problem, candidates: int) -> Manifest:
    return Manifest(
        name="some",
        description="",
        targets=(build_target("sm_90a"),),
        declared=(Declared(problem=wanted, candidates=candidates),),
    )
