"""Compares one GPU's winners on another, by gain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.ranking.gpus import SLOWER, latest_of_gpus
from benchmarks.record import Baseline, Case
from nvgemm_aot.rankings.agreement import ATEN, DISAGREEMENT
from nvgemm_aot.rankings.entries import Entry, Rankings
from nvgemm_runtime.gemm.problem import Problem

GAINS = (0.02, 0.03, 0.05, 0.08)
"""Gains over ATen at which rows of the table begin."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One GPU's winner, called on another.

    Attributes:
        problem: The problem.
        gain: The winner's gain over ATen on the first GPU; it is a bundled kernel.
        is_repeated: True if a second process on the first GPU agreed.
        over_aten: The winner's time over ATen's on the other GPU.
    """

    problem: Problem
    gain: float
    is_repeated: bool
    over_aten: float


def find_pairs(rankings: Rankings) -> list[Pair]:
    """Finds each problem's winner on each GPU, with its time on each other GPU.

    What a second process on the same GPU contradicts was a winner too when it was measured first,
    so it is among them; other doubts leave a measurement out.
    """
    found = []
    for (problem, _), entries in rankings.groups.items():
        known = [one for one in latest_of_gpus(entries) if _is_undisturbed(one)]
        for here, there in itertools.permutations(known, 2):
            winner, times = here.measurement.winner, there.measurement.times
            if winner == ATEN or here.aten is None or not {winner, ATEN} <= times.keys():
                continue
            found.append(
                Pair(
                    problem=problem,
                    gain=1 - here.measurement.times[winner].time_ns / here.aten.time_ns,
                    is_repeated=here.repeated is not None and not here.doubts,
                    over_aten=times[winner].time_ns / times[ATEN].time_ns,
                )
            )
    return found


def _is_undisturbed(entry: Entry) -> bool:
    return all(doubt.startswith(DISAGREEMENT) for doubt in entry.doubts)


def gains_table(pairs: Sequence[Pair]) -> Iterator[str]:
    """Returns a row for each range of gains: all winners, and those that were repeated."""
    yield f"{'':<10} {'all winners':>26}   {'repeated':>26}"
    heads = f"{'pairs':>8} {'slower':>8} {'worst':>8}"
    yield f"{'gain':<10} {heads}   {heads}"
    for least, most in itertools.zip_longest(GAINS, GAINS[1:]):
        some = [one for one in pairs if least <= one.gain and (most is None or one.gain < most)]
        label = f"from {least:.0%}" if most is None else f"{least:.0%} to {most:.0%}"
        yield f"{label:<10} {_figures(some)}   {_figures([p for p in some if p.is_repeated])}"
    yield (
        "pairs: a problem's winner on one GPU, on another that measured it; slower: over "
        f"{SLOWER - 1:.0%} slower than ATen there"
    )
    worst = [one for one in pairs if one.gain >= GAINS[0] and one.over_aten > SLOWER]
    for one in sorted(worst, key=lambda one: -one.over_aten):
        kind = "repeated" if one.is_repeated else "not repeated"
        yield f"{one.over_aten:.3f}: {one.problem.key}, gain {one.gain:.3f}, {kind}"


def gains_cases(pairs: Sequence[Pair]) -> Iterator[Case]:
    """Yields slower winners among all, and among repeated ones, for each range of gains."""
    for least, most in itertools.zip_longest(GAINS, GAINS[1:]):
        some = [one for one in pairs if least <= one.gain and (most is None or one.gain < most)]
        label = f"from {least:.0%}" if most is None else f"{least:.0%} to {most:.0%}"
        for kind, those in (("all", some), ("repeated", [p for p in some if p.is_repeated])):
            yield Case(
                name=f"gain {label}/{kind} winners slower on another GPU",
                figure=sum(one.over_aten > SLOWER for one in those),
                unit="pairs",
                baseline=Baseline(name="pairs", value=len(those)),
            )


def _figures(pairs: Sequence[Pair]) -> str:
    slower = sum(one.over_aten > SLOWER for one in pairs)
    worst = f"{max(one.over_aten for one in pairs):.3f}" if pairs else "-"
    return f"{len(pairs):>8} {slower:>8} {worst:>8}"
