"""Making a bundle's content anew from what was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.format import (
    Measured,
    RankingSource,
    Timing,
    canonical_json,
    measured_json,
    sha256_hex,
    source_json,
)

from ..bundle import BundleContent, ProblemRanking
from ..bundle_content import read_content
from .outcome import Outcome


def read_together(bundles: Sequence[Bundle]) -> BundleContent:
    """What several bundles of one target and toolchain hold together.

    A problem that several rank has the kernels of all, in the order of the first; what only one of
    them measured of it comes before an estimate.

    Raises:
        BundleFormatError: If one is damaged.
        TuningError: If they are for different targets, or differ in toolchain.
    """
    for bundle in bundles:
        bundle.check_body()
    first, *others = contents = [read_content(bundle) for bundle in bundles]
    for bundle, other in zip(bundles[1:], others):
        for what in ("target", "toolchain"):
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
            rankings[key] = _joined(rankings[key], ranking) if key in rankings else ranking
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


def _joined(one: ProblemRanking, other: ProblemRanking) -> ProblemRanking:
    if one.measured is None and other.measured is not None:
        one, other = other, one
    known = {id_ for id_, _ in one.kernels}
    added = tuple((id_, None) for id_, _ in other.kernels if id_ not in known)
    if not added:
        return one
    # Times of two sources do not compare, and what one has not measured has no place in its order.
    return replace(one, kernels=(*one.kernels, *added), measured=None)


def tuned_content(
    content: BundleContent,
    outcomes: Mapping[str, Outcome],
    *,
    broken: Collection[str],
    by: str,
    gpu: str,
    generator: str,
) -> BundleContent:
    """A content whose rankings are those that were measured, without kernels that are wrong.

    A kernel that is wrong for one problem is in no ranking any more, and not in the bundle. A
    problem of which no kernel is left is among those without one.

    Args:
        content: The bundle as it was.
        outcomes: By problem key; problems without one keep their ranking.
        broken: Ids of kernels that left the GPU unusable.
        by: The measuring program, with its version.
        gpu: The GPU, as its driver names it.
        generator: Program and version that writes the new bundle.

    Raises:
        TuningError: If no right kernel is left.
    """
    wrong = {*broken, *(id_ for outcome in outcomes.values() for id_ in outcome.wrong)}
    rankings, unserved = [], dict(content.unserved)
    for ranking in content.rankings:
        outcome = outcomes.get(ranking.problem.key)
        made = ranking if outcome is None else _measured(ranking, outcome, by=by, gpu=gpu)
        made = _without(made, wrong)
        if made.kernels:
            rankings.append(made)
        else:
            unserved[made.problem] = "all kernels that were made for it compute wrong results"
    kernels = tuple(kernel for kernel in content.kernels if kernel.id not in wrong)
    if not kernels or not rankings:
        raise TuningError(f"all kernels are wrong ({len(wrong)} of {len(content.kernels)})")
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


def _without(ranking: ProblemRanking, wrong: Collection[str]) -> ProblemRanking:
    kept = [place for place, (id_, _) in enumerate(ranking.kernels) if id_ not in wrong]
    measured = ranking.measured
    return replace(
        ranking,
        kernels=tuple(ranking.kernels[place] for place in kept),
        measured=measured
        and replace(measured, spreads_ns=tuple(measured.spreads_ns[place] for place in kept)),
    )


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
            ]
            for ranking in content.rankings
        ),
        "unserved": {problem.key: reason for problem, reason in content.unserved.items()},
    }
    return replace(content, build_key=sha256_hex(canonical_json(document)))


def previous_outcome(ranking: ProblemRanking, gpu: str) -> Outcome | None:
    """What an earlier tuning on the same product of GPU has measured, or None."""
    measured, source = ranking.measured, ranking.source
    if measured is None or source.conditions is None or source.gpu != gpu:
        return None
    return Outcome(
        kernels={
            id_: Timing(time_ns=time_ns, spread_ns=spread_ns)
            for (id_, time_ns), spread_ns in zip(ranking.kernels, measured.spreads_ns)
            if time_ns is not None
        },
        aten=measured.aten,
        triton=measured.triton,
        wrong={},
        doubts=measured.doubts,
        conditions=source.conditions,
    )
