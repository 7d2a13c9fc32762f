"""Measurements that tests make up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cpu_provider
from nvgemm_aot.rankings.entries import Entry, Operator, Origin, Rankings, merge
from nvgemm_runtime.bundle.ranking_entries import APART, Conditions, Timing
from nvgemm_runtime.gemm.problem import Problem

GPU_A, GPU_B, GPU_C = ("a" * 64, "b" * 64, "c" * 64)
"""Digests of UUIDs."""

PROBLEM = cpu_provider.problem(sizes=(8, 32, 64))

TOOLCHAIN = {"compiler": "1.0"}


def entry(
    times: Mapping[str, int],
    *,
    aten: int | None = 2000,
    gpu: str | None = GPU_A,
    date: str = "2026-11-21",
    spread: int = 1,
    doubts: tuple[str, ...] = (),
    problem: Problem = PROBLEM,
    provider: str = "some",
    arch: str = "sm_90a",
    product: str = "NVIDIA H200",
    toolchain: Mapping[str, str] = TOOLCHAIN,
    torch: str = "2.11.0",
    launches: str = APART,
    repeated: int | None = None,
) -> Entry:
    """One measurement, of kernels by their operators; all spreads are equal."""
    kernels = [
        (Operator(provider=provider, operator=name), Timing(time_ns=ns, spread_ns=spread))
        for name, ns in sorted(times.items(), key=lambda one: one[1])
    ]
    return Entry(
        problem=problem,
        origin=Origin(
            arch=arch,
            toolchain=toolchain,
            gpu=product,
            by="a test",
            conditions=Conditions(
                driver="580.95.05",
                torch=torch,
                cuda="13.0",
                date=date,
                launches=launches,
                gpu_sha256=gpu,
            ),
        ),
        kernels=tuple(kernels),
        aten=None if aten is None else Timing(time_ns=aten, spread_ns=spread),
        triton=None,
        doubts=doubts,
        repeated=repeated,
    )


def rankings(*entries: Entry) -> Rankings:
    """Rankings of them."""
    return merge([Rankings(entries=(one,)) for one in entries])


def on(gpu: str | None, times: Mapping[str, int], **how: Any) -> Entry:
    """A measurement on a GPU."""
    return entry(times, gpu=gpu, **how)
