"""Tasks for the compile stage, of the fake provider's kernels."""

from __future__ import annotations

from fake_provider import FakeProvider, candidate
from nvgemm_aot.pipeline.compiler import Task, make_tasks
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.problem import Signature

BF16 = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")


def tasks(*operators: str, cluster_sizes: tuple[int, ...] = (), device: str = "B200") -> list[Task]:
    return list(
        make_tasks(
            [candidate(name, BF16, cluster_sizes=cluster_sizes) for name in operators],
            build_target("sm_100f", device, platform="linux_x86_64"),
            FakeProvider(),
        )
    )
