"""Ranking kernels for sizes that were not measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nvgemm_aot.bundle.content import BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import encode_bundle
from nvgemm_runtime.bundle.format import KernelDesign
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource, Timing
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.matching.device import TorchVersions
from nvgemm_runtime.matching.index import Index
from nvgemm_runtime.matching.matches import Basis, BundleView, Match
from nvgemm_runtime.matching.nearest import NearestSizes
from nvgemm_runtime.matching.ranking import KernelTimes, interpolate, waves
from synthetic_content import SIGNATURE, synthetic_content
from synthetic_facts import B200

DESIGN = KernelDesign(
    tile=(128, 128, 64), ctas_per_tile=1, cluster=(1, 1), fallback_cluster=None, scheduler="s"
)
MM = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")
BMM = Signature.parse("bmm/tn/bf16xbf16/fp32/bf16")


def design(
    tile: tuple[int, int] = (128, 128), cluster: tuple[int, int] = (1, 1), ctas_per_tile: int = 1
) -> KernelDesign:
    return KernelDesign(
        tile=(*tile, 64),
        ctas_per_tile=ctas_per_tile,
        cluster=cluster,
        fallback_cluster=None,
        scheduler="static_persistent",
    )


@pytest.mark.parametrize(
    ("made", "sizes", "expected"),
    [
        (design(), (128 * 10, 128 * 10), 1),  # 100 blocks of 100
        (design(), (128 * 10 + 1, 128 * 10), 2),  # 110
        (design((64, 256)), (1, 1), 1),
        (design((64, 256)), (6400, 256 * 3), 3),
        (design(cluster=(2, 1)), (128 * 9, 128 * 10), 1),  # 9 rows of blocks, launched as 10
        (design(cluster=(2, 1)), (128 * 10, 128 * 11), 2),
        (design(cluster=(1, 4)), (128 * 10, 128 * 9), 2),  # 9 columns of blocks, launched as 12
        (design((256, 128), (2, 1), 2), (256 * 5, 128 * 10), 1),  # two blocks a tile
        (design((256, 128), (2, 1), 2), (256 * 5 + 1, 128 * 10), 2),
        (replace(design(), splits=4), (128 * 5, 128 * 5), 1),  # 25 tiles, four blocks each
        (replace(design(), splits=4), (128 * 5, 128 * 6), 2),
    ],
)
def test_clusters_and_waves_are_counted_whole(
    made: KernelDesign, sizes: tuple[int, int], expected: int
) -> None:
    assert waves(made, Problem(signature=MM, m=sizes[0], n=sizes[1], k=64), 100) == expected


def test_each_of_a_batch_has_its_own_tiles() -> None:
    problem = Problem(signature=BMM, m=1, n=128, k=64, batch=101)
    assert waves(design(), problem, 100) == 2


def test_each_group_has_its_share_of_rows_in_tiles_of_its_own() -> None:
    signature = Signature.parse("grouped_mm/tn/bf16xbf16/fp32/bf16")
    problem = Problem(signature=signature, m=129 * 50, n=128, k=64, groups=50)
    assert waves(design(), problem, 100) == 1  # two tiles for 129 rows, 50 times
    assert waves(design(), problem, 99) == 2


def problem(m: int, n: int = 4096, k: int = 4096) -> Problem:
    return Problem(signature=SIGNATURE, m=m, n=n, k=k)


def row(m: int, **times_ns: int) -> KernelTimes:
    return KernelTimes(problem=problem(m), times_ns=times_ns)


def between(m: int, below: KernelTimes, above: KernelTimes, multiprocessors: int = 32) -> float:
    return interpolate(
        problem(m), DESIGN, "a", below=below, above=above, multiprocessors=multiprocessors
    )


def test_the_time_of_a_wave_is_interpolated() -> None:
    # 32 tiles a row of tiles: one wave for each 128 of m.
    assert between(256, row(128, a=1000), row(512, a=4000)) == pytest.approx(2000)
    assert between(257, row(128, a=1000), row(512, a=4000)) == pytest.approx(3000, rel=1e-2)
    assert between(256, row(128, a=1000), row(512, a=8000)) == pytest.approx(2 * 1000 * 2**0.5)


def test_the_ends_are_what_was_measured() -> None:
    low, high = row(128, a=1000), row(512, a=5000)
    assert between(128, low, high) == pytest.approx(1000)
    assert between(512, low, high) == pytest.approx(5000)


def test_beyond_what_was_measured_waves_alone_count() -> None:
    only = row(128, a=1000)
    assert between(1024, only, only) == pytest.approx(8000)


def test_a_kernel_that_one_row_lacks_is_scaled_from_the_other() -> None:
    assert between(256, row(128), row(512, a=4000)) == pytest.approx(2000)
    assert between(256, row(128, a=700), row(512)) == pytest.approx(1400)


def test_the_sizes_around_a_problem_are_found() -> None:
    sizes = NearestSizes((problem(m, n), (m, n)) for m in (16, 64, 256) for n in (1024, 4096))
    for asked, below, above in (
        (problem(100), (64, 4096), (256, 4096)),
        (problem(64), (64, 4096), (64, 4096)),
        (problem(1), (16, 4096), (16, 4096)),
        (problem(9999), (256, 4096), (256, 4096)),
        (problem(100, n=1100), (64, 1024), (256, 1024)),
    ):
        around = sizes.around(asked)
        assert (around.below, around.above) == (below, above)
        assert around.nearest in (below, above)


SOURCE = RankingSource(
    kind="measurement",
    by="tuner 1.0",
    gpu=B200.name,
    conditions=Conditions(driver="1", torch="2.11.0", cuda="13.0", date="2026-11-21"),
)


def content(*rows: tuple[int, dict[int, int]]) -> BundleContent:
    """A bundle with measured rows: m, and by number of the kernel its nanoseconds."""
    base = synthetic_content(kernels=3, problems=1)
    rankings = []
    for m, times in rows:
        order = sorted(times, key=times.__getitem__)
        rankings.append(
            ProblemRanking(
                problem=problem(m),
                source=SOURCE,
                kernels=tuple((base.kernels[number].id, times[number]) for number in order),
                measured=Measured(spreads_ns=(0,) * len(order), aten=None, triton=None, doubts=()),
            )
        )
    return replace(base, rankings=tuple(rankings))


def ranked(given: BundleContent, m: int) -> list[int]:
    header = encode_bundle(given)[1]
    found = Index([BundleView(name="b", header=header)], B200).match(problem(m), 16)
    assert isinstance(found, Match)
    assert found.basis is Basis.SIGNATURE
    assert found.measured is None, "nothing was measured at this very size"
    numbers = {kernel.id: number for number, kernel in enumerate(given.kernels)}
    return [numbers[served.kernel.id] for served in found.kernels]


def test_between_two_measured_sizes_both_count() -> None:
    given = content((16, {0: 1000, 1: 1500}), (1024, {0: 9000, 1: 2000, 2: 6000}))
    assert ranked(given, 17)[0] == 0
    assert ranked(given, 1000)[0] == 1
    assert sorted(ranked(given, 100)) == [0, 1, 2], "kernels of either are offered"


def best(rankings: Sequence[ProblemRanking], **options: Any) -> Match:
    """What an index gives for m = 16, where each ranking is in a bundle of its own."""
    base = content((16, {0: 1000, 1: 1500}))
    views = [
        BundleView(name=f"b{i}", header=encode_bundle(replace(base, rankings=(one,)))[1])
        for i, one in enumerate(rankings)
    ]
    found = Index(views, B200, **options).match(problem(16), 16)
    assert isinstance(found, Match)
    return found


def with_conditions(**changes: str) -> RankingSource:
    assert SOURCE.conditions is not None
    return replace(SOURCE, conditions=replace(SOURCE.conditions, **changes))


ELSEWHERE = replace(SOURCE, gpu="NVIDIA GB200")
ESTIMATE = RankingSource(kind="estimate", by="model", gpu=B200.name)


def doubted(ranking: ProblemRanking) -> ProblemRanking:
    assert ranking.measured is not None
    return replace(ranking, measured=replace(ranking.measured, doubts=("it was busy",)))


WEAK: dict[str, Callable[[ProblemRanking], ProblemRanking]] = {
    "an estimate": lambda one: replace(one, source=ESTIMATE, measured=None),
    "of another product": lambda one: replace(one, source=ELSEWHERE),
    "in doubt": doubted,
    "with another CUDA": lambda one: replace(one, source=with_conditions(cuda="12.8")),
}
"""What does not count here as a measurement."""


@pytest.mark.parametrize("weak", WEAK)
@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_what_does_not_count_here_is_not_interpolated(places: tuple[int, ...], weak: str) -> None:
    """The nearer problem's times alone are scaled, as estimates."""
    given = content((16, {0: 1000, 1: 1500}), (1024, {1: 2000, 2: 6000}))
    rankings = [
        WEAK[weak](one) if place in places else one for place, one in enumerate(given.rankings)
    ]
    given = replace(given, rankings=tuple(rankings))
    assert sorted(ranked(given, 20)) == [0, 1]
    assert sorted(ranked(given, 1000)) == [1, 2]


@pytest.mark.parametrize("weak", WEAK)
def test_what_was_measured_here_comes_before_what_another_bundle_says(weak: str) -> None:
    (ranking,) = content((16, {0: 1000, 1: 1500})).rankings
    found = best((WEAK[weak](ranking), ranking))
    assert (found.source, found.measured) == (SOURCE, ranking.measured)
    assert {served.bundle.name for served in found.kernels} == {"b1"}


def test_of_two_measurements_here_the_one_beside_this_torchs_aten_counts() -> None:
    (ranking,) = content((16, {0: 1000, 1: 1500})).rankings
    assert ranking.measured is not None
    aten = Timing(time_ns=1200, spread_ns=0)
    ranking = replace(ranking, measured=replace(ranking.measured, aten=aten))
    older = with_conditions(torch="2.10.0")
    for torch, counts in (("2.11.1", SOURCE), ("2.10.1", older), ("2.12.0", older)):
        versions = TorchVersions(torch=torch, cuda="13.0")
        found = best((replace(ranking, source=older), ranking), versions=versions)
        assert found.source == counts, "where neither was, the bundle that comes first"


def test_of_two_measurements_that_say_as_much_the_newer_counts() -> None:
    (ranking,) = content((16, {0: 1000, 1: 1500})).rankings
    newer = with_conditions(date="2026-12-01")
    for order in ((newer, SOURCE), (SOURCE, newer)):
        assert best([replace(ranking, source=each) for each in order]).source == newer
