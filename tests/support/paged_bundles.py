"""Small bundles whose header is in pages, and contents with everything that matching looks at."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle.format import PREFIX, KernelDesign
from nvgemm_runtime.bundle.paging import encode_pages
from nvgemm_runtime.bundle.paging.tables import LISTS
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
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Op, Problem, Signature
from nvgemm_runtime.gemm.target import Target
from synthetic_content import synthetic_content

SIGNATURES = [
    Signature.parse(text)
    for text in (
        "bmm/tn/bf16xbf16/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/bf16",
        "mm/tn/bf16xbf16/fp32/bf16/bias",
        "mm/tt/fp16xfp16/fp32/fp16",
    )
]
LEFT_OUT = Signature.parse("mm/nn/fp16xfp16/fp32/fp16")
"""A signature that contents have no kernel for."""

PRODUCTS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
CONDITIONS = Conditions(
    driver="580.95.05", torch="2.11.0+cu130", cuda="13.0", date="2026-11-21", launches=APART
)
UNKNOWN_CONVENTION = "tvm_ffi:gemm(a,b,out,later,stream)"
_SHARED = random.Random(0).randbytes(300)
_SIZES = (8, 64, 96, 512)
_CONVENTIONS = ("tvm_ffi:gemm(a,b,out,stream)", "tvm_ffi:gemm(a*,b*,out*,mnkl,stream)")


@contextmanager
def in_pages(entries: int = 2) -> Iterator[None]:
    """Makes the writer put every header into pages with few entries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nvgemm_aot.bundle.writer.PAGED_ABOVE_BYTES", 0)
        few = dict.fromkeys(encode_pages.ENTRIES, entries)
        patch.setattr(encode_pages, "ENTRIES", few)
        yield


def encode_in_pages(content: BundleContent, entries: int = 2) -> bytes:
    with in_pages(entries):
        return encode_bundle(content)[0]


def write_in_pages(path: Path, content: BundleContent, entries: int = 2) -> Bundle:
    path.write_bytes(encode_in_pages(content, entries))
    return Bundle(path)


def damage_list(path: Path, name: str) -> None:
    """Changes the last byte of each of a list's pages."""
    data = bytearray(path.read_bytes())
    _, _, root_bytes, _ = PREFIX.unpack(data[: PREFIX.size])
    offset = PREFIX.size + root_bytes
    pages = json.loads(data[PREFIX.size : offset])["pages"]
    for before in LISTS[: LISTS.index(name)]:
        offset += sum(pages[before]["stored"])
    for end in itertools.accumulate(pages[name]["stored"], initial=offset):
        data[end - 1] ^= end > offset
    path.write_bytes(data)


def some_problem(source: random.Random, signature: Signature) -> Problem:
    m, n, k = (source.choice(_SIZES) for _ in range(3))
    batch = source.choice((1, 4)) if signature.op is Op.BMM else 1
    return Problem(signature=signature, m=m, n=n, k=k, batch=batch)


def made_content(
    seed: int, *, kernels: int = 14, problems: int = 18, all_usable: bool = False
) -> BundleContent:
    """A content with products, measurements, failures, unserved problems and unlike kernels.

    With ``all_usable``, every device of the target uses every kernel and problem.
    """
    source = random.Random(seed)
    base = synthetic_content(kernels=1, problems=1)
    built = [_kernel(source, number) for number in range(kernels)]
    if all_usable:
        built = [
            replace(
                one, is_deterministic=True, calling_convention=_convention(one.signature, False)
            )
            for one in built
        ]
    if source.random() < 0.3:  # operands with gaps find no kernel
        bad = SIGNATURES[1]
        built = [
            replace(one, calling_convention=_convention(one.signature, True))
            if one.signature == bad
            else one
            for one in built
        ]
    failures = [
        CompileFailure(operator=f"o{number}", reason="why", is_transient=number % 2 == 0)
        for number in range(5)
    ]
    has_further = source.random() < 0.6
    rankings: dict[tuple[Problem, str | None], ProblemRanking] = {}
    unserved: dict[Problem, UnservedReason] = {}
    for _ in range(problems):
        signature = source.choice([*SIGNATURES, LEFT_OUT])
        problem = some_problem(source, signature)
        own = [one for one in built if one.signature == signature]
        if not own or source.random() < 0.15:
            if (problem, None) not in rankings:
                scope = source.choice([Scope.SIGNATURE, Scope.PROBLEM, None])
                unserved[problem] = UnservedReason(text=f"why {problem.key}", scope=scope)
            continue
        if problem in unserved:
            continue
        ranked = source.sample(own, source.randint(1, min(4, len(own))))
        first = _ranking(source, problem, ranked, failures, PRODUCTS[0])
        rankings.setdefault((problem, None), first)
        if has_further and source.random() < 0.5:
            other = _ranking(source, problem, ranked, failures, PRODUCTS[1])
            rankings[problem, PRODUCTS[1]] = replace(other, is_further=True)
    if all_usable:
        rankings = {key: replace(one, is_declared=True) for key, one in rankings.items()}
    return replace(
        base,
        target=Target(arch="sm_90a"),
        device="H200",
        further_devices=("H100",) if has_further else (),
        build_key=f"{seed:064x}",
        kernels=tuple(built),
        rankings=tuple(rankings.values()),
        unserved=unserved,
    )


def _kernel(source: random.Random, number: int) -> BuiltKernel:
    signature = SIGNATURES[number % len(SIGNATURES)]
    return BuiltKernel(
        payload=_SHARED + source.randbytes(16),
        signature=signature,
        provider="synthetic",
        operator=f"operator{number}",
        design=KernelDesign(
            tile=(source.choice((64, 128)), 128, 64),
            ctas_per_tile=1,
            cluster=(1, 1),
            fallback_cluster=None,
            scheduler="static_persistent",
        ),
        alignment_bytes=source.choice((4, 16, 16, 32)),
        workspace_bytes=0,
        is_deterministic=source.random() < 0.8,
        calling_convention=UNKNOWN_CONVENTION
        if source.random() < 0.1
        else _convention(signature, source.random() < 0.3),
    )


def _convention(signature: Signature, is_compact: bool) -> str:
    if signature.epilogue is not None:
        return "tvm_ffi:gemm(a,b,addend,out,stream)"
    return _CONVENTIONS[is_compact]


def _ranking(
    source: random.Random,
    problem: Problem,
    ranked: list[BuiltKernel],
    failures: list[CompileFailure],
    product: str,
) -> ProblemRanking:
    is_measured = source.random() < 0.6
    return ProblemRanking(
        problem=problem,
        source=RankingSource(
            kind="measurement" if is_measured else "estimate",
            by="t 1.0",
            gpu=product,
            conditions=replace(CONDITIONS, date=f"2026-11-2{source.randint(0, 3)}")
            if is_measured
            else None,
        ),
        kernels=tuple((one.id, 1000 + 50 * place) for place, one in enumerate(ranked)),
        measured=Measured(
            spreads_ns=(1,) * len(ranked),
            aten=Timing(time_ns=1500, spread_ns=1),
            triton=None,
            doubts=("busy",) if source.random() < 0.2 else (),
            confirmed_by=("a" * 64, "b" * 64) if source.random() < 0.5 else (),
        )
        if is_measured
        else None,
        missing=tuple(source.sample(failures, source.randint(0, 2))),
        is_declared=not is_measured or source.random() < 0.7,
    )
