"""Compares one GPU's measurements with another's, and two GPUs' with a third's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.record import Baseline, Case
from benchmarks.shared.summaries import geomean
from nvgemm_aot.rankings.agreement import ATEN
from nvgemm_aot.rankings.assess import assess
from nvgemm_aot.rankings.entries import Entry, Rankings
from nvgemm_runtime.gemm.problem import Problem

SLOWER = 1.01
"""Ratio from which a choice counts as slower."""

GAINS = (0.0, 0.02, 0.05)
"""Gains on ATen at which rows of `third_opinions_table` begin."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One GPU's winner, called on another.

    Attributes:
        problem: The problem.
        standing: Standing over all measurements, as in `nvgemm-aot rankings show`.
        is_bundled: True if the winner is a bundled kernel.
        over_best: Time on the other GPU over the fastest there.
        over_aten: Time on the other GPU over ATen there.
    """

    problem: Problem
    standing: str
    is_bundled: bool
    over_best: float
    over_aten: float


def find_transfers(rankings: Rankings) -> list[Transfer]:
    """Finds each problem's winner on each GPU, with its time on every other GPU."""
    found = []
    for (problem, _), entries in rankings.groups.items():
        standing = assess(entries).standing
        measurements = [one.measurement for one in latest_of_gpus(entries)]
        for from_gpu, to_gpu in itertools.permutations(measurements, 2):
            times = to_gpu.times
            if from_gpu.aten is None or ATEN not in times or from_gpu.winner not in times:
                continue
            taken_ns = times[from_gpu.winner].time_ns
            found.append(
                Transfer(
                    problem=problem,
                    standing=standing,
                    is_bundled=from_gpu.winner != ATEN,
                    over_best=taken_ns / times[to_gpu.winner].time_ns,
                    over_aten=taken_ns / times[ATEN].time_ns,
                )
            )
    return found


@dataclass(frozen=True, kw_only=True)
class ThirdOpinion:
    """Third GPU's time for a bundled kernel that two others confirm.

    Attributes:
        problem: The problem.
        gain: Lesser gain over ATen on these two.
        over_aten: Time over ATen's on the third GPU.
    """

    problem: Problem
    gain: float
    over_aten: float


def find_third_opinions(rankings: Rankings) -> list[ThirdOpinion]:
    """Finds bundled kernels that two GPUs confirm, with a third GPU's times."""
    found = []
    for (problem, _), entries in rankings.groups.items():
        for third in latest_of_gpus(entries):
            others = [one for one in latest_of_gpus(entries) if one is not third]
            for pair in itertools.combinations(others, 2):
                confirmed = assess(pair)
                winner = confirmed.entry.measurement.winner
                known = [one.measurement.times for one in (*pair, third)]
                if not confirmed.confirmed_by or winner == ATEN:
                    continue
                if all({winner, ATEN} <= times.keys() for times in known):
                    ratios = [times[winner].time_ns / times[ATEN].time_ns for times in known]
                    gain = 1 - max(ratios[:2])
                    found.append(ThirdOpinion(problem=problem, gain=gain, over_aten=ratios[2]))
    return found


def latest_of_gpus(entries: Sequence[Entry]) -> list[Entry]:
    """Returns each known GPU's newest measurement; the newest entries come last."""
    latest = {one.origin.conditions.gpu_sha256: one for one in entries}
    return [one for gpu, one in latest.items() if gpu is not None]


def measured_with(rankings: Rankings) -> dict[str, str | None]:
    """Returns the GPU product and versions of the newest measurement."""
    origin = max((one.origin for one in rankings.entries), key=lambda one: one.conditions.date)
    return {
        "gpu": origin.gpu,
        "torch": origin.conditions.torch,
        "CUDA": origin.conditions.cuda,
        "driver": origin.conditions.driver,
    }


def gpus_cases(every: Sequence[Transfer]) -> Iterator[Case]:
    """Yields, for each standing, the mean over the fastest there, and winners slower than ATen."""
    for label in (*sorted({one.standing for one in every}), "all"):
        some = [one for one in every if label in (one.standing, "all")]
        bundled = [one.over_aten for one in some if one.is_bundled]
        yield Case(
            name=f"{label}/fastest on another GPU",
            figure=geomean([one.over_best for one in some]),
            unit="times the fastest there",
        )
        yield Case(
            name=f"{label}/slower than ATen on another GPU",
            figure=sum(ratio > SLOWER for ratio in bundled),
            unit="pairs",
            baseline=Baseline(name="pairs with a bundled winner", value=len(bundled)),
        )


def gpus_table(every: Sequence[Transfer]) -> Iterator[str]:
    """Returns a row for each standing, one for all, and the five worst."""
    yield (
        f"{'':<14} {'':>5} {'over the fastest there':>27}   {'bundled':>7} {'over ATen there':>27}"
    )
    yield (
        f"{'standing':<14} {'count':>5} {'mean':>9} {'worst':>8} {'slower':>8}   {'count':>7} "
        f"{'mean':>9} {'worst':>8} {'slower':>8}"
    )
    standings = sorted({one.standing for one in every})
    for label in (*standings, "all"):
        yield _row(label, [one for one in every if label in (one.standing, "all")])
    yield f"mean: geometric; slower: by over {SLOWER - 1:.0%}"
    for one in sorted(every, key=lambda one: -one.over_best)[:5]:
        yield f"{one.over_best:.3f}: {one.problem.key}, {one.standing}"


def _row(label: str, some: Sequence[Transfer]) -> str:
    bundled = [one for one in some if one.is_bundled]
    return (
        f"{label:<14} {len(some):>5} {_figures(one.over_best for one in some)}   "
        f"{len(bundled):>7} {_figures(one.over_aten for one in bundled)}"
    )


def _figures(ratios: Iterable[float]) -> str:
    known = list(ratios)
    if not known:
        return f"{'-':>9} {'-':>8} {'-':>8}"
    slower = sum(one > SLOWER for one in known)
    return f"{geomean(known):9.4f} {max(known):8.3f} {slower:>8}"


def third_opinions_table(every: Sequence[ThirdOpinion]) -> Iterator[str]:
    """Returns a row for each range of gains, with the kernels that are slower on the third GPU."""
    yield "bundled kernels that two GPUs confirm, on a third"
    yield f"{'gain on ATen, of two':<24} {'count':>5} {'over ATen':>9} {'worst':>8} {'slower':>8}"
    for least, most in itertools.zip_longest(GAINS, GAINS[1:]):
        some = [one for one in every if least <= one.gain and (most is None or one.gain < most)]
        label = f"from {least:.0%}" if most is None else f"{least:.0%} to {most:.0%}"
        yield f"{label:<24} {len(some):>5} {_figures(one.over_aten for one in some)}"
    yield "count: comparisons of two GPUs with a third, of which a problem may have several"
    for one in sorted(every, key=lambda one: -one.over_aten):
        if one.over_aten > SLOWER:
            yield f"{one.over_aten:.3f}: {one.problem.key}, gain {one.gain:.3f}"
