"""Index over bundles of which at least one has its header in pages.

Reads the rankings for a problem's row when it is asked for, and gives the answers that an `Index`
over all rankings gives.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...bundle.confirmations import Confirmations
from ...bundle.format import Header
from ...bundle.paging.grouped_header import GroupedHeader
from ...bundle.paging.paged_header import PagedHeader
from ...bundle.paging.tables import Sizes, row_sizes
from ...errors import StorageError
from ...gemm.problem import Problem, Signature
from ..confirmed_rankings import why_elsewhere
from ..device import DeviceFacts, TorchVersions
from ..index import (
    Index,
    why_gaps,
    why_misaligned,
    why_no_bundle,
    why_not_bundled,
)
from ..matches import BundleView, Match, Miss
from ..refusals import describe_fault, refusal
from ..usable_rankings import UsableRanking
from .nearest_rows import nearest_rows

_log = logging.getLogger(__name__)

MAX_ROWS_TRIED = 8
"""Rows to try for an undeclared problem, before all rankings for its signature are read at once.
The nearest row serves it, unless none of its kernels fits the device or the operands."""

MAX_ROWS_KEPT = 1024
"""Rows whose rankings stay in memory. More are read again."""

LookUps = PagedHeader | GroupedHeader
RowKey = tuple[Signature, Sizes]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Bundle, with look-ups in its header.

    Attributes:
        view: Bundle with its facts.
        look_ups: Look-ups.
        refusal: Reason why the device can use none of its kernels, or None.
    """

    view: BundleView
    look_ups: LookUps
    refusal: str | None


class PagedIndex:
    """Kernels that one device can run, read when a problem needs them; see `Index`.

    Safe to use from several threads, which may read a row twice.

    Attributes:
        refusals: Reasons why bundles cannot serve this device. Kernels that are left out have
            theirs in a row's answers alone.
    """

    def __init__(
        self,
        bundles: Sequence[BundleView],
        facts: DeviceFacts,
        unusable: Sequence[str] = (),
        *,
        from_jit: bool = False,
        versions: TorchVersions | None = None,
        confirmations: Sequence[Confirmations] = (),
    ) -> None:
        self.bundles = tuple(bundles)
        self.facts = facts
        self._unusable = tuple(unusable)
        self._from_jit = from_jit
        self._versions = versions
        self._all_confirmations = tuple(confirmations)
        self._sources = [_source(view, facts) for view in self.bundles]
        refusals = (
            f"{source.view.name}: {source.refusal}"
            for source in self._sources
            if source.refusal is not None
        )
        self.refusals = (*refusals, *unusable)
        self._rows: dict[RowKey, Index] = {}
        self._signatures: dict[Signature, Index] = {}
        self._warned: set[str] = set()

    def match(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Finds the kernels for a problem; see `Index.match`."""
        arguments = problem, alignment_bytes, is_compact
        return self.match_ranked(*arguments) or self.match_signature(*arguments)

    def match_ranked(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | None:
        """Returns the match from a problem's own ranking; None without one."""
        return self._row_of(problem).match_ranked(problem, alignment_bytes, is_compact)

    def match_signature(
        self, problem: Problem, alignment_bytes: int, is_compact: bool = True
    ) -> Match | Miss:
        """Finds kernels with a problem's signature, as ranked for the nearest ranked problem."""
        arguments = problem, alignment_bytes, is_compact
        signature = problem.signature
        least = self._least_alignment(signature, is_compact)
        if least is None and self._least_alignment(signature, True) is not None:
            unserved, _ = self._index(lambda look_ups, _: look_ups.unserved(signature), {})
            reasons = (*unserved.why_unserved(problem), why_gaps(signature))
            return Miss(reasons=(*reasons, *self.refusals))
        if least is not None and least > alignment_bytes:
            reason = why_misaligned(signature, alignment_bytes, least)
            return Miss(reasons=(reason, *self.refusals))
        if least is not None:
            for sizes in itertools.islice(self._nearest(problem), MAX_ROWS_TRIED):
                result = self._row(signature, sizes).match_signature(*arguments)
                if isinstance(result, Match):
                    return result
        whole = self._signature(signature)
        result = whole.match_signature(*arguments)
        if isinstance(result, Match) or whole.serves(signature):
            return result
        reasons = (*whole.why_unserved(problem), self._why_no_signature(signature))
        return Miss(reasons=(*reasons, *whole.refusals))

    def ranked_sizes(self, problem: Problem) -> Mapping[int, Sequence[UsableRanking]]:
        """Returns the rankings by m for problems that otherwise equal ``problem``."""
        return self._row_of(problem).ranked_sizes(problem)

    def missing_sizes(self, problem: Problem) -> Mapping[int, str]:
        """Returns the reasons for missing kernels by m; see `Index.missing_sizes`."""
        return self._row_of(problem).missing_sizes(problem)

    def _row_of(self, problem: Problem) -> Index:
        """Returns the index of the problems that differ from ``problem`` in m alone."""
        return self._row(problem.signature, row_sizes(problem))

    def _row(self, signature: Signature, sizes: Sizes) -> Index:
        key = signature, sizes
        index = self._rows.get(key)
        if index is None:
            index, is_final = self._index(
                lambda look_ups, ids: look_ups.row(signature, sizes, ids),
                self._confirmations.get(key, {}),
            )
            if is_final:
                if len(self._rows) >= MAX_ROWS_KEPT:
                    self._rows.clear()
                self._rows[key] = index
        return index

    def _signature(self, signature: Signature) -> Index:
        """Returns the index of a signature's problems."""
        index = self._signatures.get(signature)
        if index is None:
            confirmations: dict[int, Confirmations] = {}
            for (confirmed_signature, _), by_place in self._confirmations.items():
                if confirmed_signature == signature:
                    for place, confirmed in by_place.items():
                        others = confirmations[place].problems if place in confirmations else {}
                        problems = {**others, **confirmed.problems}
                        confirmations[place] = replace(confirmed, problems=problems)
            index, is_final = self._index(
                lambda look_ups, ids: look_ups.signature(signature, ids), confirmations
            )
            if is_final:
                self._signatures[signature] = index
        return index

    @functools.cached_property
    def _confirmations(self) -> dict[RowKey, dict[int, Confirmations]]:
        """Confirmations that count here, by row and by order of preference."""
        by_row: dict[RowKey, dict[int, Confirmations]] = {}
        if self._versions is None:
            return by_row
        for place, confirmed in enumerate(self._all_confirmations):
            if why_elsewhere(confirmed, [self.facts.name], self._versions) is not None:
                continue
            for key, times in confirmed.problems.items():
                try:
                    problem = Problem.parse(key)
                except ValueError:
                    continue
                row = by_row.setdefault((problem.signature, row_sizes(problem)), {})
                others = row[place].problems if place in row else {}
                row[place] = replace(confirmed, problems={**others, key: times})
        return by_row

    def _index(
        self,
        read: Callable[[LookUps, Collection[str]], Header],
        confirmations: Mapping[int, Confirmations],
    ) -> tuple[Index, bool]:
        """Returns an index over one part of each header, and False if a bundle was unreadable."""
        kernel_ids = {
            kernel_id
            for confirmed in confirmations.values()
            for times in confirmed.problems.values()
            for kernel_id in times.kernels
        }
        views: list[BundleView] = []
        unusable = list(self._unusable)
        is_final = True
        for source in self._sources:
            try:
                header = read(source.look_ups, kernel_ids)
            except Exception as error:  # A faulty bundle must not prevent use of the others.
                is_final = self._leave_out(source, error) and is_final
                unusable.append(f"{source.view.name}: {describe_fault(error)}")
            else:
                views.append(replace(source.view, header=header))
        index = Index(
            views,
            self.facts,
            unusable,
            from_jit=self._from_jit,
            versions=self._versions,
            confirmations=[confirmations[place] for place in sorted(confirmations)],
        )
        return index, is_final

    def _serving(self) -> Iterator[LookUps]:
        return (source.look_ups for source in self._sources if source.refusal is None)

    def _least_alignment(self, signature: Signature, is_compact: bool) -> int | None:
        alignments = (
            look_ups.least_alignment(signature, is_compact) for look_ups in self._serving()
        )
        return min((one for one in alignments if one is not None), default=None)

    def _nearest(self, problem: Problem) -> Iterator[Sizes]:
        """Yields the sizes of the signature's ranked rows, nearest first."""
        signature, n = problem.signature, problem.n
        below = self._merged(lambda look_ups: look_ups.rows_below(signature, n), reverse=True)
        above = self._merged(lambda look_ups: look_ups.rows_above(signature, n))
        return nearest_rows(row_sizes(problem), below=below, above=above)

    def _merged(
        self, read: Callable[[LookUps], Iterator[Sizes]], *, reverse: bool = False
    ) -> Iterator[Sizes]:
        """Yields the rows of all bundles, each once."""
        rows = (
            self._rows_of(source, read(source.look_ups))
            for source in self._sources
            if source.refusal is None
        )
        return (sizes for sizes, _ in itertools.groupby(heapq.merge(*rows, reverse=reverse)))

    def _rows_of(self, source: _Source, rows: Iterator[Sizes]) -> Iterator[Sizes]:
        """Yields rows until one cannot be read."""
        try:
            yield from rows
        except Exception as error:  # A faulty bundle must not prevent use of the others.
            self._leave_out(source, error)

    def _leave_out(self, source: _Source, error: Exception) -> bool:
        """Logs once why parts of a bundle are left out; returns True if the error is permanent."""
        if source.view.name not in self._warned:
            self._warned.add(source.view.name)
            _log.warning(
                "bundle left out where its pages are damaged (%s): %s",
                source.view.origin,
                describe_fault(error),
            )
        return not isinstance(error, StorageError)

    def _why_no_signature(self, signature: Signature) -> str:
        bundled = {known.key for look_ups in self._serving() for known in look_ups.signatures()}
        bundled.discard(signature.key)  # if its kernels are left out
        if bundled:
            return why_not_bundled(signature, ", ".join(sorted(bundled)))
        return why_no_bundle(self.facts, has_bundles=bool(self.refusals or self.bundles))


def _source(view: BundleView, facts: DeviceFacts) -> _Source:
    look_ups = view.pages or GroupedHeader(view.header)
    try:
        reason = refusal(view.header, facts)
    except Exception as error:  # A faulty bundle must not prevent use of the others.
        reason = describe_fault(error)
    return _Source(view=view, look_ups=look_ups, refusal=reason)
