"""What a bundle could hold, with payloads that are no kernels."""

from __future__ import annotations

import random

from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_runtime.bundle.format import ClusterLimit, KernelDesign, sha256_hex
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.target import Target

SIGNATURE = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")


def synthetic_content(*, kernels: int, problems: int, seed: int = 0) -> BundleContent:
    """Content whose payloads resemble each other as kernels do: long shared runs, few changes."""
    source = random.Random(seed)
    shared = source.randbytes(3000)
    built = tuple(_kernel(source, shared, number) for number in range(kernels))
    estimate = RankingSource(kind="estimate", by="model 1.0", gpu="NVIDIA B200")
    measurement = RankingSource(
        kind="measurement",
        by="tuner 1.0",
        gpu="NVIDIA B200",
        conditions=Conditions(
            driver="580.95.05", torch="2.11.0+cu130", cuda="13.0", date="2026-11-21"
        ),
    )
    rankings = tuple(
        _ranking(
            2**number,
            source.sample(built, min(3, kernels)),
            measurement if number % 2 else estimate,
        )
        for number in range(problems)
    )
    return BundleContent(
        target=Target(arch="sm_100f"),
        device="B200",
        generator="nvgemm-aot test",
        build_key=sha256_hex(b"build"),
        toolchain={"dsl": "4.8.1", "linker": "GNU ld 2.40"},
        kernels=built,
        rankings=rankings,
    )


def _ranking(m: int, built: list[BuiltKernel], source: RankingSource) -> ProblemRanking:
    """An estimate without a time for the third kernel, or a measurement that has all."""
    is_measured = source.kind == "measurement"
    return ProblemRanking(
        problem=Problem(signature=SIGNATURE, m=m, n=4096, k=4096),
        source=source,
        kernels=tuple(
            (kernel.id, None if place == 2 and not is_measured else 1000 + place)
            for place, kernel in enumerate(built)
        ),
        measured=Measured(
            spreads_ns=tuple(range(len(built))),
            aten=Timing(time_ns=1100, spread_ns=7),
            triton=None,
            doubts=("the GPU was busy",),
        )
        if is_measured
        else None,
    )


def _kernel(source: random.Random, shared: bytes, number: int) -> BuiltKernel:
    payload = bytearray(shared)
    for _ in range(40):
        payload[source.randrange(len(payload))] = source.randrange(256)
    return BuiltKernel(
        payload=bytes(payload),
        signature=SIGNATURE,
        provider="synthetic",
        operator=f"operator{number}",
        design=KernelDesign(
            tile=(128, 64, 64),
            ctas_per_tile=1 + number % 2,
            cluster=(2, 1),
            fallback_cluster=(1, 1) if number % 3 == 0 else None,
            scheduler="static_persistent",
            cluster_limits=(ClusterLimit(cluster_size=2, max_active=74, basis="estimated"),),
        ),
        alignment_bytes=16,
        workspace_bytes=0,
        calling_convention="tvm_ffi:gemm(a,b,out,stream)",
    )
