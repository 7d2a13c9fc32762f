"""A bundle content with everything that a bundle can hold, and payloads that are no kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_runtime.bundle.format import KernelDesign, sha256_hex
from nvgemm_runtime.bundle.ranking_entries import (
    APART,
    CompileFailure,
    Conditions,
    Measured,
    RankingSource,
    Scope,
    Timing,
    UnservedReason,
)
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.target import Target

SIGNATURES = tuple(
    Signature.parse(key)
    for key in (
        "mm/tn/bf16xbf16/fp32/bf16",
        "mm/tn/fp16xfp16/fp32/fp16",
        "mm/tt/bf16xbf16/fp32/bf16",
    )
)
HERE, THERE = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
ESTIMATE = RankingSource(kind="estimate", by="model 1.0", gpu=HERE)


def measurement(gpu: str = HERE, *, date: str = "2026-11-21", uuid: str = "a") -> RankingSource:
    """A measurement's source; ``uuid`` tells GPUs of one product apart."""
    conditions = Conditions(
        driver="580.95.05",
        torch="2.11.0+cu130",
        cuda="13.0",
        date=date,
        launches=APART,
        gpu_sha256=sha256_hex(uuid.encode()),
    )
    return RankingSource(kind="measurement", by="tuner 1.0", gpu=gpu, conditions=conditions)


def made_kernel(signature: Signature, number: int, payload_bytes: int = 400) -> BuiltKernel:
    source = random.Random(f"{signature.key} {number}")
    shared = random.Random("shared").randbytes(600)
    return BuiltKernel(
        payload=shared + source.randbytes(payload_bytes),
        signature=signature,
        provider="synthetic",
        operator=f"operator{number}",
        design=KernelDesign(
            tile=(128, 64, 64),
            ctas_per_tile=1,
            cluster=(1, 1),
            fallback_cluster=None,
            scheduler="static_persistent",
        ),
        alignment_bytes=16,
        workspace_bytes=0,
        calling_convention="tvm_ffi:gemm(a,b,out,stream)",
    )


def estimated(problem: Problem, ids: Sequence[str]) -> ProblemRanking:
    times = tuple((id_, 1000 + place) for place, id_ in enumerate(ids))
    return ProblemRanking(problem=problem, source=ESTIMATE, kernels=times)


def measured(
    problem: Problem, times: dict[str, int], source: RankingSource | None = None, aten: int = 9000
) -> ProblemRanking:
    ordered = sorted(times.items(), key=lambda item: item[1])
    return ProblemRanking(
        problem=problem,
        source=source or measurement(),
        kernels=tuple(ordered),
        measured=Measured(
            spreads_ns=(5,) * len(ordered),
            aten=Timing(time_ns=aten, spread_ns=5),
            triton=None,
            doubts=(),
        ),
    )


def varied_content(*, rows: int = 4, kernels: int = 5, payload_bytes: int = 400) -> BundleContent:
    """Three signatures with ``rows`` n each, three m each, and a sample of their kernels."""
    built, rankings = [], []
    for signature in SIGNATURES:
        own = [made_kernel(signature, number, payload_bytes) for number in range(kernels)]
        built += own
        for row in range(rows):
            for m in (1, 16, 256):
                problem = Problem(signature=signature, m=m, n=512 * (row + 1), k=1024)
                ids = [own[(row + place) % kernels].id for place in range(3)]
                if m == 256:
                    times = {id_: 1000 + place for place, id_ in enumerate(ids)}
                    rankings += [
                        measured(problem, times),
                        replace(
                            measured(problem, times, measurement(THERE, uuid="b")), is_further=True
                        ),
                    ]
                    continue
                failure = CompileFailure(operator=f"lost{row}", reason="no", is_transient=False)
                ranking = estimated(problem, ids)
                rankings.append(replace(ranking, missing=(failure,)) if m == 1 else ranking)
    first = SIGNATURES[0]
    unserved = {
        Problem(signature=first, m=7, n=512, k=1024): UnservedReason(
            text="too small", scope=Scope.PROBLEM
        ),
        Problem(
            signature=Signature.parse("mm/nn/bf16xbf16/fp32/bf16"), m=7, n=512, k=1024
        ): UnservedReason(text="no operator", scope=Scope.SIGNATURE),
    }
    return BundleContent(
        target=Target(arch="sm_90a"),
        device="H200",
        generator="nvgemm-aot test",
        build_key=sha256_hex(b"build"),
        toolchain={"dsl": "4.8.1", "linker": "GNU ld 2.40"},
        kernels=(*built, made_kernel(first, 99)),
        rankings=tuple(rankings),
        unserved=unserved,
        further_devices=("H100",),
    )
