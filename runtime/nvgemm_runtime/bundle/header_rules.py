"""Rules of FORMAT.md that hold between the values of a bundle's header."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import NoReturn

from ..errors import BundleFormatError
from ..gemm.problem import Problem
from .format import (
    ESTIMATE,
    MEASUREMENT,
    CompileFailure,
    Dictionary,
    Kernel,
    Measured,
    Ranking,
    RankingSource,
    UnknownEntry,
    UnknownKernel,
    UnservedReason,
)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a header that refer to each other, with what is not understood in its place.

    Attributes:
        dictionary, kernels, rankings, failures: As in the header. Rankings name kernels and
            failures by their positions here.
        sources: Each source, or why it is not understood.
        unserved: Entries in the order of the file: a problem with the reason.
    """

    dictionary: Dictionary | None
    kernels: tuple[Kernel | UnknownKernel, ...]
    sources: tuple[RankingSource | str, ...]
    rankings: tuple[Ranking | UnknownEntry, ...]
    unserved: tuple[tuple[Problem, UnservedReason] | UnknownEntry, ...]
    failures: tuple[CompileFailure, ...]


def check_header(header: Parts, *, where: str, body_offset: int, file_bytes: int) -> None:
    """Check every rule between values that needs no byte of the body.

    Args:
        header: Parts of the header, each of whose values is right.
        where: Name of the file, for messages.
        body_offset: First byte behind the header.
        file_bytes: Length of the file.

    Raises:
        BundleFormatError: Naming the broken rule, what was found, and what is allowed.
    """
    checker = _Checker(where)
    checker.check_spans(header, body_offset, file_bytes)
    checker.check_order(header)
    checker.check_unserved(header)
    checker.check_rankings(header)


class _Checker:
    """Holds the name of the file, for messages."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, rule: str, message: str) -> NoReturn:
        raise BundleFormatError(self.where, rule, message)

    def check_spans(self, header: Parts, body_offset: int, file_bytes: int) -> None:
        spans = [(f"kernels[{i}]", kernel.span) for i, kernel in enumerate(header.kernels)]
        if header.dictionary is not None:
            spans.insert(0, ("dictionary", header.dictionary.span))
        position = body_offset
        for name, span in spans:
            if span.offset != position:
                relation = "leaves a hole" if span.offset > position else "overlaps or is misplaced"
                self.fail(
                    "spans-tile",
                    f"{name} starts at byte {span.offset}, must be {position}: {relation}",
                )
            position = span.end
        if position != file_bytes:
            self.fail("spans-tile", f"spans end at byte {position}, the file at {file_bytes}")

    def check_order(self, header: Parts) -> None:
        if not header.kernels:
            self.fail("no-kernels", "a bundle must hold at least one kernel (got 0)")
        ids = [kernel.id for kernel in header.kernels]
        if any(a >= b for a, b in itertools.pairwise(ids)):
            self.fail("kernel-order", "kernel ids must be unique and sorted")
        problems = [one.problem for one in header.rankings if isinstance(one, Ranking)]
        if any(not a < b for a, b in itertools.pairwise(problems)):
            self.fail("ranking-order", "declared problems must be unique and sorted")
        others = Counter(one.problem for one in header.rankings if isinstance(one, UnknownEntry))
        twice = [key for key, count in others.items() if count > 1]
        if twice or not others.keys().isdisjoint(problem.key for problem in problems if others):
            self.fail("ranking-order", "declared problems must be unique")

    def check_unserved(self, header: Parts) -> None:
        known = [one[0] for one in header.unserved if isinstance(one, tuple)]
        for before, after in itertools.pairwise(known):
            if not before < after:
                self.fail(
                    "unserved-order",
                    f"unserved has {after.key} after {before.key}; its problems must be sorted, "
                    "each once",
                )
        others = Counter(one.problem for one in header.unserved if isinstance(one, UnknownEntry))
        twice = {key for key, count in others.items() if count > 1}
        twice |= others.keys() & {problem.key for problem in known}
        if twice:
            self.fail(
                "unserved-order",
                f"unserved must have each problem once (got {min(twice)} more than once)",
            )

    def check_rankings(self, header: Parts) -> None:
        unserved = {one[0] for one in header.unserved if isinstance(one, tuple)}
        for ranking in header.rankings:
            if isinstance(ranking, UnknownEntry):
                continue
            key = ranking.problem.key
            if ranking.problem in unserved:
                self.fail("ranking-unserved", f"{key} has a ranking, and is in unserved too")
            if ranking.source >= len(header.sources):
                self.fail(
                    "ranking-source",
                    f"{key} names source {ranking.source}, there are {len(header.sources)}",
                )
            places = [place.kernel for place in ranking.kernels]
            if not places or len(set(places)) != len(places):
                self.fail("ranking-kernels", f"{key} must rank at least one kernel, each once")
            for place in places:
                if place >= len(header.kernels):
                    self.fail(
                        "ranking-kernels",
                        f"{key} names kernel {place}, there are {len(header.kernels)}",
                    )
                kernel = header.kernels[place]
                if isinstance(kernel, UnknownKernel):
                    continue
                if kernel.signature != ranking.problem.signature:
                    self.fail(
                        "ranking-signature",
                        f"{key} ranks kernel {place}, whose signature is {kernel.signature.key}",
                    )
            for failure in ranking.missing:
                if failure >= len(header.failures):
                    self.fail(
                        "ranking-missing",
                        f"{key} names failure {failure}, there are {len(header.failures)}",
                    )
            source = header.sources[ranking.source]
            if (
                ranking.measured is not None
                and isinstance(source, RankingSource)
                and source.kind in (ESTIMATE, MEASUREMENT)
            ):
                self.check_measured(ranking, ranking.measured, source)

    def check_measured(self, ranking: Ranking, measured: Measured, source: RankingSource) -> None:
        key = ranking.problem.key
        if source.kind != MEASUREMENT or source.conditions is None:
            self.fail(
                "ranking-measured",
                f"{key} has measured times, and names source {ranking.source}, which must be a "
                "measurement with its conditions",
            )
        times = [place.time_ns for place in ranking.kernels]
        known = [time_ns for time_ns in times if time_ns is not None]
        if len(known) != len(times) or known != sorted(known):
            self.fail(
                "ranking-measured",
                f"{key} must give every kernel's time, the shortest first (got {times})",
            )
        if len(measured.spreads_ns) != len(times):
            self.fail(
                "ranking-measured",
                f"{key} has {len(measured.spreads_ns)} spreads for {len(times)} kernels",
            )
