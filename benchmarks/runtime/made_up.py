"""Bundles with made-up measurements, so that graphs contain the calls to benchmark.

Kernels and GPU are real. The rankings claim that two kernels alternate as the fastest while m
grows, with ATen between and beyond, and that two GPUs confirm it. Default mode then generates a
tuned bundle's calls from any bundle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import click

from nvgemm_runtime import bundles
from nvgemm_runtime.bundle.format import Header, Kernel
from nvgemm_runtime.bundle.ranking_entries import (
    APART,
    Conditions,
    Measured,
    Ranked,
    Ranking,
    RankingSource,
    Timing,
)
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.installed.registry import Installation
from nvgemm_runtime.matching.device import DeviceFacts, device_facts, torch_versions
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import BundleView
from nvgemm_runtime.settings import BUNDLES_VARIABLE

FAST_NS, SLOW_NS, ATEN_NS = 1000, 1500, 2000
"""Times for the winner, the other kernel, and ATen."""

KERNELS = 2


@dataclass(frozen=True, kw_only=True)
class Square:
    """Products with square matrices B, so that they can follow each other.

    Attributes:
        device: ``cuda`` or ``cpu``.
        signature: The products' signature.
        size: n and k, and the m at which a kernel computes.
    """

    device: str
    signature: Signature
    size: int

    @property
    def measured(self) -> tuple[int, ...]:
        """Values of m with made-up times: winners alternate, with ATen between them."""
        return self.size // 16, self.size // 4, self.size

    @property
    def left_to_aten(self) -> int:
        """An m near `size` that ATen computes."""
        return self.size + 1


def _usable(kernel: Kernel, square: Square) -> bool:
    return kernel.signature == square.signature and kernel.is_deterministic


def _as_measured(header: Header, square: Square, facts: DeviceFacts) -> Header:
    """Returns the header with the made-up rankings of `Square.measured` alone."""
    usable = [i for i, kernel in enumerate(header.kernels) if _usable(kernel, square)]
    # A call with a workspace takes longer, and most kernels have none.
    places = sorted(usable, key=lambda i: header.kernels[i].has_workspace)[:KERNELS]
    if len(places) < KERNELS:
        return replace(header, rankings=())
    versions = torch_versions()
    source = RankingSource(
        kind="measurement",
        by="made up by a benchmark",
        gpu=facts.name,
        conditions=Conditions(
            driver="",
            torch=versions.torch,
            cuda=versions.cuda,
            date="2026-11-24",
            launches=APART,
        ),
    )
    measured = Measured(
        spreads_ns=(1,) * KERNELS,
        aten=Timing(time_ns=ATEN_NS, spread_ns=1),
        triton=None,
        doubts=(),
        confirmed_by=("a" * 64, "b" * 64),
    )

    def ranked(turn: int, m: int) -> Ranking:
        order = places if turn % 2 == 0 else places[::-1]
        return Ranking(
            problem=Problem(signature=square.signature, m=m, n=square.size, k=square.size),
            source=0,
            kernels=tuple(
                Ranked(kernel=place, time_ns=time_ns)
                for place, time_ns in zip(order, (FAST_NS, SLOW_NS))
            ),
            measured=measured,
        )

    rankings = tuple(ranked(turn, m) for turn, m in enumerate(square.measured))
    return replace(header, sources=(source,), rankings=rankings, unserved={})


def _views(square: Square, facts: DeviceFacts) -> Sequence[BundleView]:
    """Returns the first usable bundle with two kernels of the signature."""
    for found in bundles():
        if found.bundle is None or found.refusal(facts) is not None:
            continue
        header = _as_measured(found.bundle.header, square, facts)
        if header.rankings:
            name = str(found.path)
            return [BundleView(name=name, header=header, origin=found.origin, opened=found.bundle)]
    raise click.ClickException(
        f"no bundle that this device can run has {KERNELS} kernels of "
        f"{square.signature.key}; build benchmarks/runtime/manifest.yaml and name the bundle in "
        f"{BUNDLES_VARIABLE}"
    )


@contextlib.contextmanager
def made_up_rankings(square: Square) -> Iterator[None]:
    """Makes torch.compile see this process' bundles as if `Square.measured` were measured.

    Raises:
        click.ClickException: If no bundle has two kernels of the signature.
    """
    facts = device_facts(square.device, 0)
    index = Index(_views(square, facts), facts, versions=torch_versions())
    with mock.patch.object(Installation, "index", return_value=index):
        yield
