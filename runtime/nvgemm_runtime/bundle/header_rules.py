"""FORMAT.md's rules between values in a bundle's header."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..gemm.problem import Problem
from .format import Dictionary, Kernel, UnknownKernel
from .ranking_entries import (
    ESTIMATE,
    LEAST_CONFIRMING,
    MEASUREMENT,
    CompileFailure,
    Measured,
    Ranking,
    RankingSource,
    UnknownEntry,
    UnservedReason,
    entry_name,
)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Header parts that refer to each other, with placeholders for unknown entries.

    Attributes:
        dictionary, kernels, rankings, failures: As in the header. Rankings name kernels and
            failures by their positions here.
        sources: Sources; for an unknown source, the reason.
        unserved: Entries in file order: a problem with the reason.
    """

    dictionary: Dictionary | None
    kernels: tuple[Kernel | UnknownKernel, ...]
    sources: tuple[RankingSource | str, ...]
    rankings: tuple[Ranking | UnknownEntry, ...]
    unserved: tuple[tuple[Problem, UnservedReason] | UnknownEntry, ...]
    failures: tuple[CompileFailure, ...]


Fail = Callable[[str, str], NoReturn]
"""Raises `BundleFormatError` for a rule, with a message."""


def check_header(parts: Parts, fail: Fail, *, body_offset: int, file_bytes: int) -> None:
    """Checks every rule between values that needs no body byte."""
    _check_spans(parts, fail, body_offset, file_bytes)
    if not parts.kernels:
        fail("no-kernels", "a bundle must hold at least one kernel (got 0)")
    check_entries(parts, fail)


def check_entries(parts: Parts, fail: Fail) -> None:
    """Checks every rule between entries, which may be a part of a header's."""
    _check_order(parts, fail)
    _check_rankings(parts, fail)


def _check_spans(parts: Parts, fail: Fail, body_offset: int, file_bytes: int) -> None:
    spans = [(f"kernels[{i}]", kernel.span) for i, kernel in enumerate(parts.kernels)]
    if parts.dictionary is not None:
        spans.insert(0, ("dictionary", parts.dictionary.span))
    position = body_offset
    for name, span in spans:
        if span.offset != position:
            relation = "leaves a hole" if span.offset > position else "overlaps or is misplaced"
            fail(
                "spans-tile", f"{name} starts at byte {span.offset}, must be {position}: {relation}"
            )
        position = span.end
    if position != file_bytes:
        fail("spans-tile", f"spans end at byte {position}, the file at {file_bytes}")


def _check_order(parts: Parts, fail: Fail) -> None:
    ids = [kernel.id for kernel in parts.kernels]
    if any(a >= b for a, b in itertools.pairwise(ids)):
        fail("kernel-order", "kernel ids must be unique and sorted")
    ranked = [
        (ranking.problem, ranking.product or "")
        for ranking in parts.rankings
        if isinstance(ranking, Ranking)
    ]
    if fault := _order_fault("rankings", ranked, parts.rankings):
        fail("ranking-order", fault)
    unserved = [(entry[0], "") for entry in parts.unserved if isinstance(entry, tuple)]
    if fault := _order_fault("unserved", unserved, parts.unserved):
        fail("unserved-order", fault)


def _order_fault(
    name: str, known: Sequence[tuple[Problem, str]], entries: Sequence[object]
) -> str | None:
    """Describes an entry out of order; known entries are a problem and a further product."""
    for before, after in itertools.pairwise(known):
        if not before < after:
            entry, previous = entry_name(*after), entry_name(*before)
            return f"{name} has {entry} after {previous}; must be sorted, each once"
    counts = Counter(entry.problem for entry in entries if isinstance(entry, UnknownEntry))
    if counts:
        counts.update(entry_name(*entry) for entry in known)
    twice = [key for key, count in counts.items() if count > 1]
    return (
        f"{name} must have each problem once (got {min(twice)} more than once)" if twice else None
    )


def _check_rankings(parts: Parts, fail: Fail) -> None:
    unserved = {entry[0] for entry in parts.unserved if isinstance(entry, tuple)}
    first_products: dict[Problem, str] = {}
    for ranking in parts.rankings:
        if isinstance(ranking, UnknownEntry):
            continue
        key = ranking.name
        if ranking.problem in unserved:
            fail("ranking-unserved", f"{ranking.problem.key} has a ranking, and is in unserved too")
        if ranking.source >= len(parts.sources):
            fail(
                "ranking-source",
                f"{key} names source {ranking.source}, there are {len(parts.sources)}",
            )
        positions = [ranked.kernel for ranked in ranking.kernels]
        if not positions or len(set(positions)) != len(positions):
            fail("ranking-kernels", f"{key} must rank at least one kernel, each once")
        for position in positions:
            if position >= len(parts.kernels):
                fail(
                    "ranking-kernels",
                    f"{key} names kernel {position}, there are {len(parts.kernels)}",
                )
            kernel = parts.kernels[position]
            if isinstance(kernel, UnknownKernel):
                continue
            if kernel.signature != ranking.problem.signature:
                fail(
                    "ranking-signature",
                    f"{key} ranks kernel {position}, whose signature is {kernel.signature.key}",
                )
        for failure in ranking.missing:
            if failure >= len(parts.failures):
                fail(
                    "ranking-missing",
                    f"{key} names failure {failure}, there are {len(parts.failures)}",
                )
        source = parts.sources[ranking.source]
        if isinstance(source, RankingSource):
            _check_product(fail, ranking, source, first_products)
        if (
            ranking.measured is not None
            and isinstance(source, RankingSource)
            and source.kind in (ESTIMATE, MEASUREMENT)
        ):
            _check_measured(fail, ranking, ranking.measured, source)


def _check_product(
    fail: Fail, ranking: Ranking, source: RankingSource, first_products: dict[Problem, str]
) -> None:
    """Checks a further ranking's product; ``first_products`` has the first rankings'."""
    if ranking.product is None:
        first_products[ranking.problem] = source.gpu
    elif ranking.product != source.gpu:
        fail(
            "ranking-product",
            f"{ranking.name} names source {ranking.source}, which must be of that GPU (got "
            f"{source.gpu!r:.80})",
        )
    elif first_products.get(ranking.problem) == source.gpu:
        fail("ranking-product", f"{ranking.name}: the ranking before it is for that GPU too")


def _check_measured(
    fail: Fail, ranking: Ranking, measured: Measured, source: RankingSource
) -> None:
    key = ranking.name
    if source.kind != MEASUREMENT or source.conditions is None:
        fail(
            "ranking-measured",
            f"{key} has measured times, and names source {ranking.source}, which must be a "
            "measurement with its conditions",
        )
    times = [ranked.time_ns for ranked in ranking.kernels]
    known_times = [time_ns for time_ns in times if time_ns is not None]
    if len(known_times) != len(times) or known_times != sorted(known_times):
        fail(
            "ranking-measured",
            f"{key} must give every kernel's time, the shortest first (got {times})",
        )
    if len(measured.spreads_ns) != len(times):
        fail(
            "ranking-measured",
            f"{key} has {len(measured.spreads_ns)} spreads for {len(times)} kernels",
        )
    gpus = measured.confirmed_by
    if gpus and (len(gpus) < LEAST_CONFIRMING or list(gpus) != sorted(set(gpus))):
        fail(
            "ranking-measured",
            f"{key} is confirmed by {len(set(gpus))} distinct GPUs in a list of {len(gpus)}, must "
            f"be by {LEAST_CONFIRMING} or more, sorted, each once",
        )
