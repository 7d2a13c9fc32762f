"""Chooses the kernels to time beside ATen: those that dispatch tables would use here."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.operands import Request
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.matching.device import DeviceFacts, TorchVersions
from nvgemm_runtime.matching.dispatch import decide_dispatch
from nvgemm_runtime.matching.evidence import Evidence
from nvgemm_runtime.matching.index import all_but_m
from nvgemm_runtime.matching.matches import BundleView, MatchedKernel
from nvgemm_runtime.matching.refusals import refusal
from nvgemm_runtime.matching.trust import KNOWN_ALIGNMENT_BYTES, Terms
from nvgemm_runtime.matching.usable_rankings import UsableRanking, usable_rankings
from nvgemm_runtime.settings import fuses_gates

from ..contenders import aten_run

MOST_KERNELS = 3
"""Most kernels that are timed for a problem."""

_Line = Mapping[int, UsableRanking]
"""One bundle's rankings by m, for problems that are equal in all else."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Problem to measure.

    Attributes:
        problem: Problem.
        kernel_ids: Kernels to time beside ATen; at least one, at most `MOST_KERNELS`.
        is_measured: True if a measurement on this GPU product ranks the problem.
    """

    problem: Problem
    kernel_ids: tuple[str, ...]
    is_measured: bool


def find_contests(bundles: Sequence[Bundle], facts: DeviceFacts) -> list[Contest]:
    """Returns the problems to measure on a device, one dispatch table after the other.

    An m that was measured on this GPU product gets the kernels that its table uses there and on
    both sides, or the fastest if that is ATen throughout: without times there, a table could bridge
    over it, and mode ``required`` would miss it. Any other m gets the first kernels in its ranking.
    Problems that default mode leaves alone are left out, among them gated products unless fusing is
    allowed, and so are kernels whose results depend on timing.
    """
    contests: dict[Problem, Contest] = {}
    for bundle in bundles:
        if refusal(bundle.header, facts) is not None:
            continue
        view = BundleView(name=str(bundle.path), header=bundle.header, opened=bundle)
        rankings, _ = usable_rankings(view, facts)
        for line in _lines(rankings):
            for contest in _line_contests(line, facts):
                other = contests.get(contest.problem)
                contests[contest.problem] = contest if other is None else _merged(other, contest)
    by_line: dict[Hashable, list[Contest]] = {}
    for contest in contests.values():
        by_line.setdefault(all_but_m(contest.problem), []).append(contest)
    return [
        contest
        for line_contests in by_line.values()
        for contest in sorted(line_contests, key=lambda one: one.problem.m)
    ]


def _lines(rankings: Iterable[UsableRanking]) -> Iterable[_Line]:
    lines: dict[Hashable, dict[int, UsableRanking]] = {}
    for usable in rankings:
        problem = usable.ranking.problem
        if _is_in_default_mode(problem):
            lines.setdefault(all_but_m(problem), {})[problem.m] = usable
    return lines.values()


def _is_in_default_mode(problem: Problem) -> bool:
    """Returns True if default mode may use kernels for a problem instead of torch's operators.

    Gated products count if the user allows fusing: Inductor compiles what they are timed against.
    """
    if problem.signature.is_gated and not fuses_gates():
        return False
    return aten_run(problem.signature) is not None


def _line_contests(line: _Line, facts: DeviceFacts) -> Iterator[Contest]:
    measured = {m: usable for m, usable in line.items() if usable.holds_on(facts)}
    around = _kernels_around(measured, facts)
    for m, usable in line.items():
        kernels = [served.kernel for served in usable.kernels if served.kernel.is_deterministic]
        ids = [kernel.id for kernel in kernels]
        if m in measured:
            ids = [id_ for id_ in ids if id_ in around[m]] or ids[:1]
        if ids:
            yield Contest(
                problem=usable.ranking.problem,
                kernel_ids=tuple(ids[:MOST_KERNELS]),
                is_measured=m in measured,
            )


def _kernels_around(measured: _Line, facts: DeviceFacts) -> Mapping[int, set[str]]:
    """Returns the kernels that a line's table would use at each m and on both sides of it.

    The table is that of the torch that the line was measured with.
    """
    around: dict[int, set[str]] = {m: set() for m in measured}
    conditions = {usable.source.conditions for usable in measured.values()}
    for condition in filter(None, conditions):
        problem = next(iter(measured.values())).ranking.problem
        table = decide_dispatch(
            {m: [usable] for m, usable in measured.items()},
            Request(problem=problem, alignment_bytes=_alignment_bytes(measured)),
            facts,
            TorchVersions(torch=condition.torch, cuda=condition.cuda),
            Terms(limit=1),
            evidence=Evidence.ONCE,
        ).table
        for m, ids in around.items():
            ids.update(table.at(near) for near in (m - 1, m, m + 1))
    return around


def _alignment_bytes(line: _Line) -> int:
    kernels: Iterable[MatchedKernel] = (one for usable in line.values() for one in usable.kernels)
    return max(KNOWN_ALIGNMENT_BYTES, *(one.kernel.alignment_bytes for one in kernels))


def _merged(first: Contest, second: Contest) -> Contest:
    """Returns a contest between two bundles' kernels for a problem, in turn."""
    pairs = zip((*first.kernel_ids, *second.kernel_ids), (*second.kernel_ids, *first.kernel_ids))
    ids = dict.fromkeys(id_ for pair in pairs for id_ in pair)
    return Contest(
        problem=first.problem,
        kernel_ids=tuple(ids)[:MOST_KERNELS],
        is_measured=first.is_measured and second.is_measured,
    )


def known_right(bundles: Sequence[Bundle]) -> frozenset[str]:
    """Returns ids of the kernels whose results a measurement without doubts has checked."""
    return frozenset(
        bundle.header.kernels[ranked.kernel].id
        for bundle in bundles
        for ranking in bundle.header.rankings
        if ranking.measured is not None and not ranking.measured.doubts
        for ranked in ranking.kernels
    )
