"""Making a bundle's content anew from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from nvgemm_runtime.bundle.encode import measured_json, source_json, unserved_json
from nvgemm_runtime.bundle.format import (
    Measured,
    RankingSource,
    Scope,
    Timing,
    UnservedReason,
    canonical_json,
    sha256_hex,
)
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.matching.device import DeviceFacts
from nvgemm_runtime.matching.trust import why_order_is_open

from ..bundle.content import BundleContent, ProblemRanking, read_content
from .contenders import ATEN, TRITON
from .outcome import Outcome, contender_name, disagreement
from .separation import Interval, contending, is_decided
from .suspicion import thrown_out

LEFT_UNDECIDED = "one of the fastest was thrown out later, and those left were not told apart"


def read_together(bundles: Sequence[Bundle], facts: DeviceFacts) -> BundleContent:
    """What several bundles of one target, device profile and toolchain hold together.

    A problem that several rank has the kernels of all, in the order of the one that says most about
    this device: measured on it without doubts, then with doubts, then on another, then estimated;
    of equals the first. What two certain measurements on one product of GPU disagree about makes
    the ranking uncertain. Kernels that were not measured for it have no time and stand behind all
    others: `tuned_content` leaves them out again if they still have none.

    Args:
        bundles: At least one.
        facts: The device that they are tuned on.

    Raises:
        BundleFormatError: If one is damaged.
        TuningError: If they differ in target, device profile or toolchain.
    """
    for bundle in bundles:
        bundle.check_body()
    first, *others = contents = [read_content(bundle) for bundle in bundles]
    for bundle, other in zip(bundles[1:], others):
        for what in ("target", "device", "toolchain"):
            here, there = getattr(first, what), getattr(other, what)
            if here != there:
                raise TuningError(
                    f"{bundle.path}: {what} is {_text(there)}, that of {bundles[0].path} is "
                    f"{_text(here)}; tune them one by one"
                )
    kernels = {kernel.id: kernel for content in reversed(contents) for kernel in content.kernels}
    rankings: dict[str, ProblemRanking] = {}
    for content in contents:
        for ranking in content.rankings:
            key = ranking.problem.key
            rankings[key] = _joined(rankings[key], ranking, facts) if key in rankings else ranking
    ranked = {ranking.problem for ranking in rankings.values()}
    return replace(
        first,
        kernels=tuple(kernels.values()),
        rankings=tuple(rankings.values()),
        unserved={
            problem: reason
            for content in reversed(contents)
            for problem, reason in content.unserved.items()
            if problem not in ranked
        },
    )


def _text(value: object) -> str:
    return str(getattr(value, "key", value))


def _joined(one: ProblemRanking, other: ProblemRanking, facts: DeviceFacts) -> ProblemRanking:
    if _weakness(other, facts) < _weakness(one, facts):
        one, other = other, one
    known = {id_ for id_, _ in one.kernels}
    # Times of two sources do not compare, and what one has not measured has no place in its order.
    added = tuple((id_, None) for id_, _ in other.kernels if id_ not in known)
    joined = replace(one, kernels=(*one.kernels, *added))
    differs = _disagreement(other, one)
    if joined.measured is None or differs is None:
        return joined
    doubts = (*joined.measured.doubts, differs)
    return replace(joined, measured=replace(joined.measured, doubts=doubts))


def _weakness(ranking: ProblemRanking, facts: DeviceFacts) -> int:
    """How little a ranking says about a device."""
    measured, source = ranking.measured, ranking.source
    if measured is None or source.conditions is None:
        return 3
    if why_order_is_open(replace(measured, doubts=()), source, facts) is not None:
        return 2
    return 1 if measured.doubts else 0


def _disagreement(before: ProblemRanking, now: ProblemRanking) -> str | None:
    """What two measurements on one product of GPU disagree about, if they are both that."""
    gpu = now.source.gpu
    old, new = previous_outcome(before, gpu), previous_outcome(now, gpu)
    return None if old is None or new is None else disagreement(old, new)


def tuned_content(
    content: BundleContent,
    outcomes: Mapping[str, Outcome],
    *,
    broken: Mapping[str, str],
    by: str,
    gpu: str,
    generator: str,
) -> BundleContent:
    """A content whose rankings are those that were measured, without kernels that are wrong.

    A kernel that is wrong, or fails, for one problem is in no ranking any more, and not in the
    bundle. A problem of which no kernel is left is among those without one, with the reason.

    Args:
        content: The bundle as it was.
        outcomes: By problem key; problems without one keep their ranking.
        broken: By name, contenders that left the GPU unusable, and how.
        by: The measuring program, with its version.
        gpu: The GPU, as its driver names it.
        generator: Program and version that writes the new bundle.

    Raises:
        TuningError: If no right kernel is left.
    """
    wrong = thrown_out(outcomes, broken)
    rankings, unserved = [], dict(content.unserved)
    for ranking in content.rankings:
        outcome = outcomes.get(ranking.problem.key)
        made = _as_before(ranking)
        if outcome is not None:
            made = _measured(ranking, outcome, by=by, gpu=gpu)
        made = _without(made, wrong)
        if made.kernels:
            rankings.append(made)
        else:
            unserved[made.problem] = UnservedReason(
                text=_why_unserved(ranking, wrong), scope=Scope.PROBLEM
            )
    kernels = tuple(kernel for kernel in content.kernels if kernel.id not in wrong)
    if not kernels or not rankings:
        reasons = "; ".join(_why_unserved(ranking, wrong) for ranking in content.rankings[:1])
        raise TuningError(
            f"{len(content.kernels) - len(kernels)} of {len(content.kernels)} kernels were thrown "
            f"out, and no problem has one left, so no bundle is written; {reasons}"
        )
    return replace(
        content,
        generator=generator,
        kernels=kernels,
        rankings=tuple(rankings),
        unserved=unserved,
    )


def _measured(ranking: ProblemRanking, outcome: Outcome, *, by: str, gpu: str) -> ProblemRanking:
    return replace(
        ranking,
        source=RankingSource(kind="measurement", by=by, gpu=gpu, conditions=outcome.conditions),
        kernels=tuple((id_, timing.time_ns) for id_, timing in outcome.kernels.items()),
        measured=Measured(
            spreads_ns=tuple(timing.spread_ns for timing in outcome.kernels.values()),
            aten=outcome.aten,
            triton=outcome.triton,
            doubts=outcome.doubts,
        ),
    )


def _as_before(ranking: ProblemRanking) -> ProblemRanking:
    """A ranking as its source has it: of a measurement, without what that has not measured."""
    if ranking.source.kind != "measurement":
        return ranking
    timed = tuple(place for place in ranking.kernels if place[1] is not None)
    return replace(ranking, kernels=timed)


def _why_unserved(ranking: ProblemRanking, wrong: Mapping[str, str]) -> str:
    ids = [id_ for id_, _ in ranking.kernels if id_ in wrong]
    if not ids:
        return "none of its kernels was measured"
    example = f"{contender_name(ids[0])}: {wrong[ids[0]]}"
    return f"all {len(ids)} kernels that were made for it were thrown out when tuned, {example}"


def _without(ranking: ProblemRanking, wrong: Mapping[str, str]) -> ProblemRanking:
    """A ranking without kernels that are wrong; doubted if these had kept others from the race."""
    kept = [place for place, (id_, _) in enumerate(ranking.kernels) if id_ not in wrong]
    kernels = tuple(ranking.kernels[place] for place in kept)
    measured = ranking.measured
    if measured is None or len(kept) == len(ranking.kernels):
        return replace(ranking, kernels=kernels)
    before = _intervals(ranking, measured)
    gone = {id_ for id_, _ in ranking.kernels if id_ in wrong}
    left = {name: interval for name, interval in before.items() if name not in gone}
    doubts = measured.doubts
    if kept and not gone.isdisjoint(contending(before)) and not is_decided(left):
        doubts = (*doubts, LEFT_UNDECIDED)
    spreads_ns = tuple(measured.spreads_ns[place] for place in kept)
    return replace(
        ranking, kernels=kernels, measured=replace(measured, spreads_ns=spreads_ns, doubts=doubts)
    )


def _intervals(ranking: ProblemRanking, measured: Measured) -> dict[str, Interval]:
    """By contender, what the race went by."""
    torchs_own = {ATEN: measured.aten, TRITON: measured.triton}
    timings = {**torchs_own, **_timings(ranking, measured)}
    return {
        name: Interval(
            median=timing.time_ns,
            low=timing.time_ns - timing.spread_ns,
            high=timing.time_ns + timing.spread_ns,
        )
        for name, timing in timings.items()
        if timing is not None
    }


def _timings(ranking: ProblemRanking, measured: Measured) -> dict[str, Timing]:
    """By id, the kernels that were measured."""
    return {
        id_: Timing(time_ns=time_ns, spread_ns=spread_ns)
        for (id_, time_ns), spread_ns in zip(ranking.kernels, measured.spreads_ns)
        if time_ns is not None
    }


def with_build_key(content: BundleContent, made_from: str) -> BundleContent:
    """A content under a key of its own: a digest of what it was made from and of its rankings."""
    document = {
        "tuned": made_from,
        "generator": content.generator,
        "target": content.target.key,
        "toolchain": content.toolchain,
        "kernels": sorted(kernel.id for kernel in content.kernels),
        "rankings": sorted(
            [
                ranking.problem.key,
                source_json(ranking.source),
                ranking.kernels,
                ranking.measured and measured_json(ranking.measured),
                [asdict(failure) for failure in ranking.missing],
            ]
            for ranking in content.rankings
        ),
        "unserved": unserved_json(content.unserved),
    }
    return replace(content, build_key=sha256_hex(canonical_json(document)))


def previous_outcome(ranking: ProblemRanking, gpu: str) -> Outcome | None:
    """What an earlier tuning on the same product of GPU has measured, or None."""
    measured, source = ranking.measured, ranking.source
    if measured is None or source.conditions is None or source.gpu != gpu:
        return None
    return Outcome(
        kernels=_timings(ranking, measured),
        aten=measured.aten,
        triton=measured.triton,
        wrong={},
        doubts=measured.doubts,
        conditions=source.conditions,
    )
