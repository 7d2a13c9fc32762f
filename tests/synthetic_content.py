"""What a bundle could hold, with payloads that are no kernels."""

from __future__ import annotations

import random

from nvgemm_aot.bundle import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_runtime.format import ClusterLimit, KernelDesign, RankingSource, sha256_hex
from nvgemm_runtime.problem import Problem, Signature
from nvgemm_runtime.target import Target

SIGNATURE = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")


def synthetic_content(*, kernels: int, problems: int, seed: int = 0) -> BundleContent:
    """Content whose payloads resemble each other as kernels do: long shared runs, few changes."""
    source = random.Random(seed)
    shared = source.randbytes(3000)
    built = tuple(_kernel(source, shared, number) for number in range(kernels))
    estimate = RankingSource(kind="estimate", by="model 1.0", gpu="NVIDIA B200")
    measurement = RankingSource(kind="measurement", by="tuner 1.0", gpu="NVIDIA B200")
    rankings = tuple(
        ProblemRanking(
            problem=Problem(signature=SIGNATURE, m=2**number, n=4096, k=4096),
            source=measurement if number % 2 else estimate,
            kernels=tuple(
                (sha256_hex(kernel.payload), None if place == 2 else 1000 + place)
                for place, kernel in enumerate(source.sample(built, min(3, kernels)))
            ),
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
