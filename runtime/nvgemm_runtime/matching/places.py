"""Declared problems and what can be launched of their rankings, as matching looks them up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..bundle.format import Header, Kernel, Ranking
from ..bundle.left_out import doubt_about
from ..gemm.problem import Problem, Signature
from .nearest import NearestSizes


@dataclass(frozen=True, kw_only=True)
class Served:
    """One kernel that serves a problem.

    Attributes:
        bundle: Position of its bundle in the index.
        kernel: Its entry.
        rank: Its position in the ranking that it was taken from.
        time_ns: Time that a ranking gives it for the declared problem it was taken from, if any.
    """

    bundle: int
    kernel: Kernel
    rank: int
    time_ns: int | None


def launchable(
    bundle: int, header: Header, ranking: Ranking, reasons: Sequence[str | None]
) -> tuple[Served, ...]:
    """The kernels of a ranking but for those that there are reasons against, by their position."""
    return tuple(
        Served(bundle=bundle, kernel=header.kernels[one.kernel], rank=rank, time_ns=one.time_ns)
        for rank, one in enumerate(ranking.kernels)
        if reasons[one.kernel] is None
    )


def with_doubt(ranking: Ranking, gone: int) -> Ranking:
    """A ranking of which some kernels cannot be launched: one that was measured is in doubt.

    Its places stay as they are, and `Served.rank` counts them.
    """
    if ranking.measured is None or not gone:
        return ranking
    doubt = doubt_about(gone, len(ranking.kernels), "cannot be launched here")
    measured = replace(ranking.measured, doubts=(*ranking.measured.doubts, doubt))
    return replace(ranking, measured=measured)


class Place:
    """A declared problem: which bundle ranks it, and what can be launched of its ranking.

    ``with_gaps`` are those kernels that need no compact operands.
    """

    __slots__ = ("bundle", "ranking", "served", "with_gaps")

    def __init__(
        self,
        bundle: int,
        ranking: Ranking,
        served: tuple[Served, ...],
        with_gaps: tuple[Served, ...],
    ) -> None:
        self.bundle = bundle
        self.ranking = ranking
        self.served = served
        self.with_gaps = with_gaps

    def able(self, is_compact: bool) -> tuple[Served, ...]:
        """The kernels for operands that are compact, or are not."""
        return self.served if is_compact else self.with_gaps

    def aligned(self, alignment_bytes: int, is_compact: bool) -> tuple[Served, ...]:
        """Those of them that take operands that are so aligned."""
        served = self.able(is_compact)
        if all(one.kernel.alignment_bytes <= alignment_bytes for one in served):
            return served
        return tuple(one for one in served if one.kernel.alignment_bytes <= alignment_bytes)


SizesByAlignment = list[tuple[int, NearestSizes[Place]]]
"""Alignments in bytes, the largest first, and for each the problems with a kernel that needs no
more. Kernels of a signature mostly agree, so that there is one."""


def by_alignment(
    declared: Mapping[Problem, Sequence[Place]], *, is_compact: bool
) -> dict[Signature, SizesByAlignment]:
    """Declared problems by signature and alignment, for operands that are compact, or are not."""
    of_signature: dict[Signature, list[tuple[Problem, Sequence[Place]]]] = {}
    for problem, places in declared.items():
        of_signature.setdefault(problem.signature, []).append((problem, places))
    indexed: dict[Signature, SizesByAlignment] = {}
    for signature, problems in of_signature.items():
        least = [
            (problem, place, min(one.kernel.alignment_bytes for one in place.able(is_compact)))
            for problem, places in problems
            for place in places
            if place.able(is_compact)
        ]
        if not least:
            continue
        indexed[signature] = [
            (needed, NearestSizes(_first_able(least, needed)))
            for needed in sorted({alignment for _, _, alignment in least}, reverse=True)
        ]
    return indexed


def _first_able(
    least: Iterable[tuple[Problem, Place, int]], alignment_bytes: int
) -> Iterator[tuple[Problem, Place]]:
    """For each problem the first place that has a kernel for such an alignment."""
    seen: Problem | None = None
    for problem, place, needed in least:  # places of a problem one after the other
        if needed <= alignment_bytes and problem is not seen:
            seen = problem
            yield problem, place
