"""Default mode by times that are made up, so that kernels win where a test wants it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from nvgemm_runtime import bundles
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import (
    APART,
    Conditions,
    Measured,
    Ranked,
    Ranking,
    RankingSource,
    Timing,
)
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.matching.device import DeviceFacts, device_facts, torch_versions
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView


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
        return replace(ranking, source=0, kernels=kernels, measured=measured, product=None)

    here = header.rankings_on(source.gpu)
    return replace(header, sources=(source,), rankings=tuple(map(measure, here)))


@contextlib.contextmanager
def default_mode(index: Index, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No max-autotune, such bundles, and a graph is compiled once."""
    monkeypatch.setattr(Installation, "index", lambda self, facts, *, without=(): index)
    monkeypatch.delenv("NVGEMM_AOT_DEFAULT_MODE", raising=False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with (
        fresh_cache(),
        config.patch(max_autotune=False, max_autotune_gemm=False),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        yield
    torch._dynamo.reset()


def runs_aten(operator: str, function: Callable[..., torch.Tensor], *given: torch.Tensor) -> bool:
    """Whether an operator of ATen, such as ``mm``, computes a call."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu]) as profile:
        function(*given)
        torch.cuda.synchronize()
    return any(event.key.startswith(f"aten::{operator}") for event in profile.key_averages())
