"""The installed bundles with times that are made up, so that kernels win where a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nvgemm_runtime import bundles
from nvgemm_runtime.bundle.format import (
    APART,
    Conditions,
    Header,
    Measured,
    Ranked,
    Ranking,
    RankingSource,
    Timing,
)
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.matching.device import DeviceFacts, device_facts, torch_versions
from nvgemm_runtime.matching.index import BundleView, Index


def measured_index(is_won: Callable[[Problem], bool]) -> Index:
    """The bundles of this GPU, as if two GPUs of its product had measured them.

    Args:
        is_won: Whether kernels are faster than ATen at a problem.
    """
    facts = device_facts("cuda", 0)
    views = [
        BundleView(
            name=str(found.path),
            header=_as_measured(found.bundle.header, facts, is_won),
            origin=found.origin,
            opened=found.bundle,
        )
        for found in bundles()
        if found.bundle is not None and found.refusal(facts) is None
    ]
    return Index(views, facts, versions=torch_versions())


def _as_measured(header: Header, facts: DeviceFacts, is_won: Callable[[Problem], bool]) -> Header:
    versions = torch_versions()
    source = RankingSource(
        kind="measurement",
        by="a test",
        gpu=facts.name,
        conditions=Conditions(
            driver="",
            torch=versions.torch,
            cuda=versions.cuda,
            date="2026-11-22",
            launches=APART,
        ),
    )

    def measure(ranking: Ranking) -> Ranking:
        # Two neighbours may have different kernels first: then none is used between them.
        kernels = tuple(
            Ranked(kernel=one.kernel, time_ns=1000 + 100 * rank)
            for rank, one in enumerate(ranking.kernels)
        )
        measured = Measured(
            spreads_ns=(1,) * len(kernels),
            aten=Timing(time_ns=2000 if is_won(ranking.problem) else 500, spread_ns=1),
            triton=None,
            doubts=(),
            confirmed_by=("a" * 64, "b" * 64),
        )
        return replace(ranking, source=0, kernels=kernels, measured=measured)

    return replace(header, sources=(source,), rankings=tuple(map(measure, header.rankings)))
