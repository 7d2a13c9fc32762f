"""Bundles of kernels for the CPU with made-up measurements of this CPU and this torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking, read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.bundle.reader import Bundle
from tuning_bench import bench

ATEN = "aten"
"""Stands for ATen among operators."""

TWO_GPUS = ("a" * 64, "b" * 64)
"""Digests of the UUIDs of two GPUs."""


def write_measured(
    built: Path,
    output: Path,
    times: Mapping[int, Mapping[str, int]],
    *,
    gpu: str | None = None,
    confirmed_by: tuple[str, ...] = TWO_GPUS,
    repeated: int | None = None,
    doubts: tuple[str, ...] = (),
    not_declared: Collection[int] = (),
    torch: str | None = None,
    cuda: str | None = None,
) -> Path:
    """Write a bundle as another, in which problems were measured, and confirmed by two GPUs.

    Args:
        built: The other bundle.
        output: What to write; others cannot write to its directory.
        times: By m, of each operator and of ATen, nanoseconds; other m keep their estimates.
        gpu: What was measured, if not this machine's CPU.
        confirmed_by: Which GPUs agree.
        repeated: After how many seconds one of them measured the same again.
        doubts: What speaks against every one of the measurements.
        not_declared: The m of problems that were measured and are not declared.
        torch, cuda: Versions of what ATen was measured with, if not those of this process.
    """
    here = bench()
    source = RankingSource(
        kind="measurement",
        by="a test",
        gpu=gpu or here.facts.name,
        conditions=Conditions(
            driver="580.95.05",
            torch=torch or here.versions.torch,
            cuda=cuda or here.versions.cuda,
            date="2026-11-21",
        ),
    )
    with Bundle(built) as bundle:
        content = read_content(bundle)

    def measure(ranking: ProblemRanking) -> ProblemRanking:
        of_size = times.get(ranking.problem.m)
        if of_size is None:
            return ranking
        operators = _operators(content)
        timed = [(id_, of_size[operators[id_]]) for id_, _ in ranking.kernels]
        measured = Measured(
            spreads_ns=(1,) * len(timed),
            aten=Timing(time_ns=of_size[ATEN], spread_ns=1),
            triton=None,
            doubts=doubts,
            confirmed_by=confirmed_by,
            repeated=repeated,
        )
        kernels = tuple(sorted(timed, key=lambda one: one[1]))
        return replace(
            ranking,
            source=source,
            kernels=kernels,
            measured=measured,
            is_declared=ranking.problem.m not in not_declared,
        )

    output.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_bundle(output, replace(content, rankings=tuple(map(measure, content.rankings))))
    return output


def _operators(content: BundleContent) -> dict[str, str]:
    return {kernel.id: kernel.operator for kernel in content.kernels}
