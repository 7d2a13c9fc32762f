"""Made-up bundle contents for look-ups, which read no payload."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import zstandard

from nvgemm_aot.bundle.compression import Packed
from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_runtime.bundle.format import KernelDesign, sha256_hex
from nvgemm_runtime.bundle.ranking_entries import RankingSource
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import DType, Layout, Op, Problem, Signature
from nvgemm_runtime.gemm.target import Target

RANKED = 8
"""Kernels in a ranking."""

ROWS = (1, 16, 64, 256, 1024, 2048, 4096, 8192)
"""Each m of a row."""

_ESTIMATE = RankingSource(kind="estimate", by="model 1.0", gpu="NVIDIA H200")
_SIZES = range(64, 32_769, 64)
_EPILOGUES = (None, "bias", "bias_relu", "bias_gelu_tanh", "bias_silu", "add")
_TYPES = (DType.BF16, DType.FP16, DType.FP8_E4M3, DType.FP8_E5M2)
_OUTS = (DType.BF16, DType.FP16, DType.FP32)


def signatures(count: int) -> list[Signature]:
    """Returns the first of 576 signatures of mm and bmm."""
    combinations = itertools.product(_EPILOGUES, _OUTS, _TYPES, Layout, (Op.MM, Op.BMM))
    return [
        Signature(
            op=op,
            layout=layout,
            a=dtype,
            b=dtype,
            accumulator=DType.FP32,
            out=out,
            epilogue=None if epilogue is None else Epilogue.parse(epilogue),
        )
        for epilogue, out, dtype, layout, op in itertools.islice(combinations, count)
    ]


def content(kernels: int, signature_count: int, *, one_m: bool) -> BundleContent:
    """Returns a content with as many problems as kernels.

    Args:
        kernels: Number of kernels.
        signature_count: Signatures, with equally many kernels each.
        one_m: True if no two problems share n and k, and each ranks kernels at random. False if a
            row has each m in `ROWS`, and its problems rank the same dozen kernels.
    """
    source = random.Random(0)
    built: list[BuiltKernel] = []
    rankings: list[ProblemRanking] = []
    chosen = signatures(signature_count)
    for place, signature in enumerate(chosen):
        count = len(range(place, kernels, len(chosen)))
        own = [made_kernel(signature, f"{place}_{number}", source) for number in range(count)]
        built += own
        ids = [sha256_hex(kernel.payload) for kernel in own]
        problems = _problems(signature, source, (16,) if one_m else ROWS)
        for problem, pool in itertools.islice(_with_pools(problems, ids, source, one_m), count):
            rankings.append(made_ranking(problem, pool, source))
    return made_content("benchmarks.large_bundles", built, rankings)


def made_kernel(signature: Signature, name: str, source: random.Random) -> BuiltKernel:
    """Returns a kernel whose payload is random bytes."""
    addend = "" if signature.epilogue is None else "addend,"
    return BuiltKernel(
        payload=source.randbytes(256),
        signature=signature,
        provider="cutlass_operators",
        operator=f"cutlass.PersistentDenseGemmKernel_sm90_ttt_{name}",
        design=KernelDesign(
            tile=(128, 256, 64),
            ctas_per_tile=1,
            cluster=(2, 1),
            fallback_cluster=None,
            scheduler="static_persistent",
        ),
        alignment_bytes=16,
        workspace_bytes=0,
        calling_convention=f"tvm_ffi:gemm(a,b,{addend}out,stream)",
    )


def made_ranking(problem: Problem, ids: Sequence[str], source: random.Random) -> ProblemRanking:
    """Returns a ranking of kernels at random."""
    ranked = source.sample(ids, min(RANKED, len(ids)))
    return ProblemRanking(
        problem=problem,
        source=_ESTIMATE,
        kernels=tuple((id_, 1000 + rank) for rank, id_ in enumerate(ranked)),
    )


def made_content(
    generator: str, kernels: Sequence[BuiltKernel], rankings: Sequence[ProblemRanking]
) -> BundleContent:
    """Returns a content for an H200."""
    return BundleContent(
        target=Target(arch="sm_90a"),
        device="H200",
        generator=generator,
        build_key=sha256_hex(generator.encode()),
        toolchain={"nvidia-cutlass-dsl": "4.8.1"},
        kernels=tuple(kernels),
        rankings=tuple(rankings),
    )


def pack(payloads: Sequence[bytes]) -> Packed:
    """Compresses payloads alone and quickly; no look-up reads them."""
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=False)
    return Packed(frames=[compressor.compress(payload) for payload in payloads])


def _problems(signature: Signature, source: random.Random, ms: Sequence[int]) -> Iterator[Problem]:
    seen: set[tuple[int, int, int]] = set()
    while True:
        n, k = source.choice(_SIZES), source.choice(_SIZES)
        batch = source.choice((8, 32, 128)) if signature.op is Op.BMM else 1
        if (n, k, batch) not in seen:
            seen.add((n, k, batch))
            yield from (Problem(signature=signature, m=m, n=n, k=k, batch=batch) for m in ms)


def _with_pools(
    problems: Iterator[Problem], ids: list[str], source: random.Random, one_m: bool
) -> Iterator[tuple[Problem, list[str]]]:
    """Yields problems with the ids of the kernels that they may rank."""
    for _, row in itertools.groupby(problems, key=lambda one: (one.n, one.k, one.batch)):
        pool = ids if one_m else source.sample(ids, min(12, len(ids)))
        yield from ((problem, pool) for problem in row)
