"""Look-ups in a whole header, by row and signature, as `PagedHeader` offers them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...gemm.problem import Problem, Signature
from ..calling_convention import parse_calling_convention
from ..format import Header, Kernel
from .tables import Sizes, row_sizes


@dataclass(kw_only=True)
class _Row:
    """Positions of the rankings, and the unserved problems, that differ in m alone."""

    rankings: list[int] = field(default_factory=list)
    unserved: list[Problem] = field(default_factory=list)


class GroupedHeader:
    """Look-ups in a whole header, with the methods of `PagedHeader` that matching uses.

    Attributes:
        facts: Header without entries.
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._rows: dict[Signature, dict[Sizes, _Row]] = {}
        for position, ranking in enumerate(header.rankings):
            self._row(ranking.problem).rankings.append(position)
        for problem in header.unserved:
            self._row(problem).unserved.append(problem)
        self._alignments: dict[tuple[Signature, bool], int | None] = {}
        self._sizes: dict[Signature, list[Sizes]] = {}
        self._positions = {kernel.id: place for place, kernel in enumerate(header.kernels)}
        products = None
        if any(ranking.is_further for ranking in header.rankings):
            products = frozenset(map(header.gpu_of, header.rankings))
        self.facts = replace(
            header,
            kernels=(),
            rankings=(),
            unserved={},
            failures=(),
            unknown_kernels=(),
            unknown_rankings=(),
            unknown_unserved=(),
            ranked_products=products,
        )

    def _row(self, problem: Problem) -> _Row:
        rows = self._rows.setdefault(problem.signature, {})
        return rows.setdefault(row_sizes(problem), _Row())

    def signatures(self) -> tuple[Signature, ...]:
        """Returns the ranked signatures."""
        return tuple(signature for signature in self._rows if self._ranked_rows(signature))

    def least_alignment(self, signature: Signature, is_compact: bool) -> int | None:
        """Returns an alignment in bytes that every ranked kernel with a signature needs."""
        key = signature, is_compact
        if key not in self._alignments:
            self._alignments[key] = min(
                (
                    kernel.alignment_bytes
                    for kernel in self._ranked(signature)
                    if is_compact or takes_gaps(kernel.calling_convention)
                ),
                default=None,
            )
        return self._alignments[key]

    def rows_below(self, signature: Signature, n: int) -> Iterator[Sizes]:
        """Yields the sizes of a signature's ranked rows with smaller n, the largest first."""
        return (sizes for sizes in reversed(self._ranked_rows(signature)) if sizes[0] < n)

    def rows_above(self, signature: Signature, n: int) -> Iterator[Sizes]:
        """Yields the sizes of a signature's ranked rows with n or more, the smallest first."""
        return (sizes for sizes in self._ranked_rows(signature) if sizes[0] >= n)

    def _ranked_rows(self, signature: Signature) -> list[Sizes]:
        if signature not in self._sizes:
            rows = self._rows.get(signature, {})
            self._sizes[signature] = sorted(sizes for sizes, row in rows.items() if row.rankings)
        return self._sizes[signature]

    def row(self, signature: Signature, sizes: Sizes, kernel_ids: Iterable[str] = ()) -> Header:
        """Returns the part of the header for a signature's problems with these sizes and any m."""
        row = self._rows.get(signature, {}).get(sizes)
        return self._part([] if row is None else [row], signature, kernel_ids)

    def signature(self, signature: Signature, kernel_ids: Iterable[str] = ()) -> Header:
        """Returns the part of the header for a signature's problems."""
        return self._part(self._signature_rows(signature), signature, kernel_ids)

    def unserved(self, signature: Signature) -> Header:
        """Returns the part of the header for a signature's problems without a kernel."""
        rows = self._signature_rows(signature)
        return self._part([_Row(unserved=row.unserved) for row in rows], signature, ())

    def _signature_rows(self, signature: Signature) -> list[_Row]:
        return [row for _, row in sorted(self._rows.get(signature, {}).items())]

    def _ranked(self, signature: Signature) -> list[Kernel]:
        positions = {
            ranked.kernel
            for row in self._rows.get(signature, {}).values()
            for ranking in row.rankings
            for ranked in self._header.rankings[ranking].kernels
        }
        return [self._header.kernels[position] for position in positions]

    def _part(
        self, rows: Sequence[_Row], signature: Signature, kernel_ids: Iterable[str]
    ) -> Header:
        header = self._header
        rankings = [header.rankings[position] for row in rows for position in row.rankings]
        ids = (self._positions.get(kernel_id) for kernel_id in kernel_ids)
        kernels = sorted(
            {ranked.kernel for ranking in rankings for ranked in ranking.kernels}
            | {position for position in ids if position is not None}
        )
        failures = sorted({failure for ranking in rankings for failure in ranking.missing})
        kernel_places = {position: place for place, position in enumerate(kernels)}
        failure_places = {position: place for place, position in enumerate(failures)}
        return replace(
            self.facts,
            kernels=tuple(header.kernels[position] for position in kernels),
            unknown_kernels=tuple(
                kernel for kernel in header.unknown_kernels if kernel.signature == signature.key
            ),
            failures=tuple(header.failures[position] for position in failures),
            rankings=tuple(
                replace(
                    ranking,
                    kernels=tuple(
                        replace(ranked, kernel=kernel_places[ranked.kernel])
                        for ranked in ranking.kernels
                    ),
                    missing=tuple(failure_places[failure] for failure in ranking.missing),
                )
                for ranking in rankings
            ),
            unserved={
                problem: header.unserved[problem] for row in rows for problem in row.unserved
            },
        )


def takes_gaps(calling_convention: str) -> bool:
    """Returns True if a calling convention passes strides, or is unknown."""
    convention = parse_calling_convention(calling_convention)
    return convention is None or not convention.needs_compact
