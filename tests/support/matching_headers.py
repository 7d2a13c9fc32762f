"""Headers to match problems against, and what came of it."""

from __future__ import annotations

from dataclasses import replace

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle.format import Header, sha256_hex
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.matching.device import DeviceFacts
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView, Match, Miss
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import B200


def problem(m: int, n: int = 4096, k: int = 4096, signature: Signature = SIGNATURE) -> Problem:
    return Problem(signature=signature, m=m, n=n, k=k)


def content(*problems: Problem, seed: int = 0) -> BundleContent:
    """A bundle in which kernel i is the best for problem i."""
    base = synthetic_content(kernels=len(problems), problems=1, seed=seed)
    source = base.rankings[0].source
    return replace(
        base,
        kernels=tuple(
            replace(kernel, signature=declared.signature)
            for declared, kernel in zip(problems, base.kernels)
        ),
        rankings=tuple(
            ProblemRanking(
                problem=declared, source=source, kernels=((sha256_hex(kernel.payload), 1000 + i),)
            )
            for i, (declared, kernel) in enumerate(zip(problems, base.kernels))
        ),
    )


def header(*problems: Problem, seed: int = 0) -> Header:
    return encode_bundle(content(*problems, seed=seed))[1]


def index(*headers: Header, facts: DeviceFacts = B200) -> Index:
    return Index([BundleView(name=f"b{i}", header=h) for i, h in enumerate(headers)], facts)


def found(outcome: Match | Miss) -> Match:
    assert isinstance(outcome, Match), outcome
    return outcome


def reasons(outcome: Match | Miss) -> str:
    assert isinstance(outcome, Miss), outcome
    return "\n".join(outcome.reasons)
