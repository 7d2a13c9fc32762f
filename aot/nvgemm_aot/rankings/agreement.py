"""Compares two measurements: they confirm, repeat or contradict each other."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nvgemm_runtime.bundle.ranking_entries import Conditions, Timing
from nvgemm_runtime.matching.evidence import REPEATED_GAIN
from nvgemm_runtime.matching.refusals import version_numbers
from nvgemm_runtime.matching.thresholds import MIN_GAIN, gains_enough

from .intervals import RESOLUTION

ATEN, TRITON = "aten", "triton"
"""Names for torch's own contenders."""

SLACK = 0.05
"""Largest relative difference between two runs' times, in addition to their spreads. GPUs that are
the same product differ by a few percent, and so does one GPU from day to day."""

DISAGREEMENT = "two runs disagree: "
"""Prefix for doubts about two runs that disagree."""

CONFIRMING = 0.01
"""Largest relative lag at which two measurements agree: each one's fastest contender may be this
far behind the other's fastest, in the other measurement. Two GPUs then confirm each other; on one
GPU, the second measurement repeats the first."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One problem's measurement on one GPU.

    Attributes:
        kernels: Each kernel's time, by a name that another measurement shares.
        aten: ATen's time, or None if ATen has no operator for the problem.
        triton: The best Triton kernel's time, or None if Triton was not measured or has no kernel.
        doubts: Reasons not to rely on the order.
        conditions: Measuring conditions, with the GPU.
    """

    kernels: Mapping[str, Timing]
    aten: Timing | None
    triton: Timing | None
    doubts: tuple[str, ...]
    conditions: Conditions

    @property
    def times(self) -> dict[str, Timing]:
        """Times by contender: the kernels, and ATen if measured."""
        return {**self.kernels, **({} if self.aten is None else {ATEN: self.aten})}

    @property
    def winner(self) -> str:
        """The fastest among the kernels and ATen; ATen wins a tie."""
        times = self.times
        return min(times, key=lambda name: (times[name].time_ns, name != ATEN, name))


class Relation(enum.Enum):
    """Relation between two measurements."""

    CONFIRMS = "confirms"
    REPEATS = "repeats"
    CONTRADICTS = "contradicts"
    NEITHER = "neither"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Relation between two measurements, with the reason for a contradiction or for neither."""

    relation: Relation
    reason: str = ""


def compare(before: Measurement, now: Measurement) -> Comparison:
    """Compares two measurements for one problem, taken on the same GPU product.

    They confirm each other if all these conditions hold: they come from two GPUs that are known to
    be distinct, they were taken the same way, they have the same verdict (a bundled kernel or
    ATen), and the fastest on each GPU is within `CONFIRMING` of the fastest on the other GPU,
    measured there. On two GPUs, they contradict each other if the fastest on one is behind on the
    other beyond the spreads and `RESOLUTION`. For one GPU, or unknown ones, see `disagreement`.
    """
    if before.conditions.launches != now.conditions.launches:
        return _neither(
            f"one timed launches {before.conditions.launches}, the other {now.conditions.launches}"
        )
    gpus = {before.conditions.gpu_sha256, now.conditions.gpu_sha256}
    if None in gpus or len(gpus) == 1:
        reason = disagreement(before, now)
        if reason is not None:
            return Comparison(relation=Relation.CONTRADICTS, reason=reason)
        if None in gpus:
            return _neither("the GPU of at least one is unknown")
        return _neither(f"both were measured on one GPU, {gpu_name(before.conditions)}")
    if before.doubts or now.doubts:
        return _neither("at least one has doubts")
    if not before.times or not now.times:
        return _neither("one measured nothing")
    if _aten_version(before.conditions) != _aten_version(now.conditions):
        return _neither("ATen's torch or CUDA differs")
    if (before.aten is None) != (now.aten is None):
        return _neither("only one GPU measured ATen")
    return _compare_gpus(before, now)


def _compare_gpus(before: Measurement, now: Measurement) -> Comparison:
    first_before, first_now = before.winner, now.winner
    for first, measurement in ((first_before, now), (first_now, before)):
        if first not in measurement.times:
            return _neither(f"only one GPU measured {contender_name(first)}")
    for first, measurement in ((first_before, now), (first_now, before)):
        best = measurement.times[measurement.winner]
        if _is_behind(measurement.times, first, measurement.winner):
            return Comparison(
                relation=Relation.CONTRADICTS,
                reason=f"{DISAGREEMENT}{contender_name(first)} was fastest on one GPU, and took "
                f"{measurement.times[first].time_ns} ns on GPU {gpu_name(measurement.conditions)}, "
                f"where {contender_name(measurement.winner)} took {best.time_ns} ns",
            )
    if _same_fastest(before, now):
        return Comparison(relation=Relation.CONFIRMS)
    return _neither("the fastest differ, within the noise")


def _same_fastest(before: Measurement, now: Measurement) -> bool:
    """Returns True if the verdicts are equal and each fastest is near the other's fastest."""
    return (before.winner == ATEN) == (now.winner == ATEN) and all(
        first in measurement.times
        and measurement.times[first].time_ns
        <= (1 + CONFIRMING) * measurement.times[measurement.winner].time_ns
        for first, measurement in ((before.winner, now), (now.winner, before))
    )


def compare_repeat(before: Measurement, now: Measurement) -> Comparison:
    """Compares two measurements for one problem by two processes on one GPU, minutes apart.

    The second repeats the first if neither has doubts, both were taken the same way, the verdicts
    are equal, and each one's fastest is within `CONFIRMING` of the other's. A gain that lets a
    ranking count (`matching.evidence`) must occur both times. `disagreement` decides if they
    contradict each other.
    """
    reason = disagreement(before, now)
    if reason is not None:
        return Comparison(relation=Relation.CONTRADICTS, reason=reason)
    gpu = before.conditions.gpu_sha256
    if gpu is None or gpu != now.conditions.gpu_sha256:
        return _neither("they are not known to come from one GPU")
    if before.conditions.launches != now.conditions.launches:
        return _neither("they timed launches differently")
    if _aten_version(before.conditions) != _aten_version(now.conditions):
        return _neither("ATen's torch or CUDA differs")
    if before.doubts or now.doubts:
        return _neither("at least one has doubts")
    if not before.times or not now.times or (before.aten is None) != (now.aten is None):
        return _neither("they measured different contenders")
    if not _same_fastest(before, now):
        return _neither("the fastest differ, within the noise")
    for least_gain in (MIN_GAIN, REPEATED_GAIN):
        if _gains(before, before.winner, least_gain) and not _gains(now, before.winner, least_gain):
            return _neither(f"only the first gained {least_gain:.0%}")
    return Comparison(relation=Relation.REPEATS)


def _gains(measurement: Measurement, name: str, least_gain: float) -> bool:
    """Returns True if a contender's gain over ATen is at least ``least_gain``, as a share."""
    aten = measurement.aten
    return aten is not None and gains_enough(measurement.times[name].time_ns, aten, least_gain)


class Agreement:
    """Measurements that all confirm each other, by `compare` for each pair.

    Adding a measurement takes constant time, however many there are.
    """

    def __init__(self, first: Measurement) -> None:
        self._first = first
        self._gpus = {first.conditions.gpu_sha256}
        self._winners = {first.winner} if first.times else set()
        self._as_fast = _as_fast_as_winner(first)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Sorted GPU UUID digests."""
        return tuple(sorted(gpu for gpu in self._gpus if gpu is not None))

    def add(self, measurement: Measurement) -> bool:
        """Adds a measurement if it confirms all others; returns True if so."""
        # All members were taken the same way with the same verdict, so the first represents the
        # others.
        if compare(self._first, measurement).relation is not Relation.CONFIRMS:
            return False
        as_fast = _as_fast_as_winner(measurement)
        if (
            measurement.conditions.gpu_sha256 in self._gpus
            or measurement.winner not in self._as_fast
            or not self._winners <= as_fast
        ):
            return False
        self._gpus.add(measurement.conditions.gpu_sha256)
        self._winners.add(measurement.winner)
        self._as_fast &= as_fast
        return True


def _as_fast_as_winner(measurement: Measurement) -> set[str]:
    """Returns the contenders that would confirm a measurement, had they won on another GPU."""
    times = measurement.times
    if not times:
        return set()
    winner = measurement.winner
    most = (1 + CONFIRMING) * times[winner].time_ns
    return {
        name
        for name in times
        if times[name].time_ns <= most and not _is_behind(times, name, winner)
    }


def _neither(reason: str) -> Comparison:
    return Comparison(relation=Relation.NEITHER, reason=reason)


def confirming_gpus(*measurements: Measurement) -> tuple[str, ...]:
    """Returns the sorted GPU UUID digests behind measurements that confirm each other."""
    gpus = {measurement.conditions.gpu_sha256 for measurement in measurements}
    return tuple(sorted(gpu for gpu in gpus if gpu is not None))


def gpu_name(conditions: Conditions) -> str:
    """Returns a GPU's name for messages: its UUID digest's first digits."""
    return "unknown" if conditions.gpu_sha256 is None else conditions.gpu_sha256[:12]


def disagreement(before: Measurement, now: Measurement) -> str | None:
    """Returns why two runs contradict each other about the fastest contender, or None.

    They do if each run has the other's fastest clearly behind, or if either fastest contender's
    time has changed beyond the spreads. Only contenders in both runs count, and ATen only for equal
    CUDA versions and equal minor torch versions. A disturbed run contradicts nothing, nor does one
    that timed its launches differently.
    """
    if before.conditions.launches != now.conditions.launches:
        return None
    if not all(doubt.startswith(DISAGREEMENT) for doubt in before.doubts):
        return None
    old, new = before.times, now.times
    common = old.keys() & new.keys()
    if _aten_version(before.conditions) != _aten_version(now.conditions):
        common -= {ATEN}
    if not common:
        return None
    first_old, first_new = (
        min(sorted(common), key=lambda name: times[name].time_ns) for times in (old, new)
    )
    date = before.conditions.date
    if _is_behind(new, first_old, first_new) and _is_behind(old, first_new, first_old):
        return (
            f"{DISAGREEMENT}{contender_name(first_new)} was fastest, and "
            f"{contender_name(first_old)} in the run of {date}, each beyond the spread"
        )
    for name in dict.fromkeys((first_new, first_old)):
        apart = abs(new[name].time_ns - old[name].time_ns)
        allowed = new[name].spread_ns + old[name].spread_ns + SLACK * old[name].time_ns
        if apart > allowed:
            return (
                f"{DISAGREEMENT}{contender_name(name)} took {new[name].time_ns} ns, and "
                f"{old[name].time_ns} ns in the run of {date}: at most {allowed:.0f} ns apart is "
                "noise"
            )
    return None


def _aten_version(conditions: Conditions) -> tuple[tuple[int, ...], str]:
    return version_numbers(conditions.torch)[:2], conditions.cuda


def _is_behind(times: Mapping[str, Timing], slower: str, faster: str) -> bool:
    slow, fast = times[slower], times[faster]
    noise = slow.spread_ns + fast.spread_ns + RESOLUTION * fast.time_ns
    return slow.time_ns - fast.time_ns > noise


def contender_name(contender: str) -> str:
    """Returns a contender's name for messages."""
    torchs_own = {ATEN: "ATen", TRITON: "Triton"}
    is_id = re.fullmatch("[0-9a-f]{64}", contender) is not None
    return torchs_own.get(contender, f"kernel {contender[:12] if is_id else contender}")
