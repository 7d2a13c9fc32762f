"""Splits a bundle into parts that each serve alone.

A dispatch table needs all m of a signature, n, k and batch or groups, so such a row is never torn
apart. Signatures share no kernels, so a signature is torn only if it does not fit. A kernel that
rows in two parts rank is in both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nvgemm_runtime.bundle.format import PREFIX, Header
from nvgemm_runtime.bundle.ranking_entries import UnservedReason
from nvgemm_runtime.errors import PackagingError, count_text
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX
from nvgemm_runtime.matching.index import all_but_m

from ..content import BundleContent, ProblemRanking
from ..writer import encode_bundle
from .build_keys import with_own_key
from .copied_frames import OpenedBundle, as_is, pack_by_copying

_ENTRY_BYTES = 600
"""Assumed size of a kernel's header entry, before the first try at a division."""

_MOST_TRIES = 12
"""Most divisions that are tried to meet a size."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part, not yet written.

    Attributes:
        data: Its bytes.
        header: Its header.
    """

    data: bytes
    header: Header


@dataclass(kw_only=True)
class _Row:
    """Problems that differ in m alone, which stay together.

    Attributes:
        signature: Their signature.
        rankings: Their rankings, for all products.
        unserved: Those without a kernel.
        kernels: Ids of their kernels.
    """

    signature: Signature
    rankings: list[ProblemRanking] = field(default_factory=list)
    unserved: dict[Problem, UnservedReason] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The row's first problem, for messages."""
        problems = [*(ranking.problem for ranking in self.rankings), *self.unserved]
        return min(problems).key if problems else self.signature.key


@dataclass(kw_only=True)
class _Bin:
    """Rows of one part, with the bytes that they take."""

    rows: list[_Row]
    size_bytes: int


def split_into(opened: OpenedBundle, count: int) -> list[Part]:
    """Splits a bundle into ``count`` parts of about equal size.

    Raises:
        PackagingError: If the bundle has fewer rows than that.
    """
    rows = _rows(opened.content)
    if count > len(rows):
        raise PackagingError(
            f"{opened.bundle.path}: has {count_text(len(rows), 'row')}, at most as many parts are "
            f"possible (got {count}), since all m of one signature, n and k stay together; ask for "
            "fewer parts"
        )
    if count == 1:
        return [Part(data=opened.data, header=opened.header)]
    sizes = _Sizes(opened)
    low, high = max(sizes.of([row]) for row in rows), sizes.of(rows)
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if len(sizes.divide(rows, middle)) <= count else (middle + 1, high)
        )
    bins = sizes.divide(rows, high)
    while len(bins) < count:
        largest = max((one for one in bins if len(one.rows) > 1), key=lambda one: one.size_bytes)
        bins.remove(largest)
        bins += sizes.halves(largest)
    return _encode(opened, bins)


def split_below(
    opened: OpenedBundle, max_bytes: int, size_of: Callable[[Part], int] | None = None
) -> list[Part]:
    """Splits a bundle into few parts of at most ``max_bytes`` each; one if it fits.

    Args:
        opened: The bundle.
        max_bytes: Largest size of a part.
        size_of: Size of a part that counts; by default its file's.

    Raises:
        PackagingError: If a row alone is larger.
    """
    size = size_of or (lambda part: len(part.data))
    one_part = Part(data=opened.data, header=opened.header)
    if size(one_part) <= max_bytes:
        return [one_part]
    rows = _rows(opened.content)
    sizes = _Sizes(opened)
    budget = max_bytes
    for number in range(1, _MOST_TRIES + 1):
        least = max(sizes.of([row]) for row in rows)
        bins = sizes.divide(rows, max(budget, least))
        parts = _encode(opened, bins)
        largest_bytes = max(map(size, parts))
        if largest_bytes <= max_bytes:
            return parts
        is_corrected = number > 1
        if len(bins) == len(rows) or (is_corrected and budget <= least):
            break
        sizes.correct(bins, parts)
        estimated = max(sizes.of(one.rows) for one in bins)
        budget = min(max_bytes, max_bytes * estimated // largest_bytes) * 15**number // 16**number
    parts = _torn_below(opened, bins, max_bytes, size)
    largest = max(parts, key=size)
    if size(largest) <= max_bytes:
        return parts
    problems = [ranking.problem.key for ranking in largest.header.rankings[:1]]
    dictionary_bytes = len(opened.dictionary_frame)
    dictionary = f", {dictionary_bytes} of them for the dictionary" if dictionary_bytes else ""
    raise PackagingError(
        f"{opened.bundle.path}: a part with {', '.join(problems) or 'one kernel'} and all other m "
        f"of its row has {size(largest)} bytes{dictionary}, at most {max_bytes} are allowed, and a "
        "row stays together; allow more, or declare fewer candidates or m"
    )


def _torn_below(
    opened: OpenedBundle, bins: Sequence[_Bin], max_bytes: int, size: Callable[[Part], int]
) -> list[Part]:
    """Encodes parts, and divides those above a size into a part for each of their rows."""
    torn: list[_Bin] = []
    for one in bins:
        [part] = _encode(opened, [one])
        is_small = size(part) <= max_bytes
        torn += [one] if is_small else [_Bin(rows=[row], size_bytes=0) for row in one.rows]
    return _encode(opened, torn)


def part_name(path: Path, target: str, number: int, count: int) -> str:
    """Returns a part's file name: ``NAME-1of3-TARGET.nvgemm``."""
    return f"{split_name(path, target)}-{number}of{count}-{target}{BUNDLE_SUFFIX}"


def split_name(path: Path, target: str) -> str:
    """Returns a bundle's name without its target."""
    stem = path.name.removesuffix(BUNDLE_SUFFIX)
    return stem.removesuffix(f"-{target}") or stem


class _Sizes:
    """Sizes of parts, estimated from the whole's frames and header."""

    def __init__(self, opened: OpenedBundle) -> None:
        header = opened.header
        header_bytes = header.kernels[0].span.offset - PREFIX.size
        if header.dictionary is not None:
            header_bytes -= header.dictionary.span.stored_bytes
        ranked = sum(len(ranking.kernels) for ranking in header.rankings)
        kernels_bytes = min(_ENTRY_BYTES * len(header.kernels), header_bytes // 2)
        self._entry_bytes = kernels_bytes // len(header.kernels)
        rankings = len(header.rankings) + len(header.unserved)
        weight = ranked + 8 * rankings
        self._weight_bytes = (header_bytes - kernels_bytes) / weight if weight else 0.0
        self._frames = {
            kernel.id: kernel.span.stored_bytes + self._entry_bytes for kernel in header.kernels
        }
        self._fixed = PREFIX.size + len(opened.dictionary_frame) + 1000

    def of(self, rows: Iterable[_Row]) -> int:
        """Returns the size of a part with these rows, in bytes."""
        kernels: set[str] = set()
        weight = 0
        for row in rows:
            kernels |= row.kernels
            weight += self._weight(row)
        return self._fixed + self._kernel_bytes(kernels) + int(weight * self._weight_bytes)

    def correct(self, bins: Sequence[_Bin], parts: Sequence[Part]) -> None:
        """Corrects the size of rankings by that of encoded parts.

        The whole's pages are compressed, and a part's header may not be.
        """
        observed = sum(len(part.data) for part in parts)
        estimated = sum(self.of(one.rows) for one in bins)
        weight = sum(self._weight(row) for one in bins for row in one.rows)
        if weight:
            self._weight_bytes = max(0.0, self._weight_bytes + (observed - estimated) / weight)

    def _weight(self, row: _Row) -> int:
        ranked = sum(len(ranking.kernels) for ranking in row.rankings)
        return ranked + 8 * (len(row.rankings) + len(row.unserved))

    def _kernel_bytes(self, ids: Iterable[str]) -> int:
        return sum(self._frames[id_] for id_ in ids)

    def divide(self, rows: Sequence[_Row], budget: int) -> list[_Bin]:
        """Divides rows into parts of at most ``budget`` bytes, first fit, the largest first."""
        pieces: list[_Bin] = []
        by_signature: dict[Signature, list[_Row]] = {}
        for row in rows:
            by_signature.setdefault(row.signature, []).append(row)
        for own in by_signature.values():
            whole = _Bin(rows=own, size_bytes=self.of(own))
            pieces += [whole] if whole.size_bytes <= budget else self._tear(own, budget)
        pieces.sort(key=lambda piece: piece.size_bytes, reverse=True)  # stable
        bins: list[_Bin] = []
        for piece in pieces:
            added = piece.size_bytes - self._fixed  # pieces of one signature may share kernels
            for other in bins:
                if other.size_bytes + added <= budget:
                    other.rows += piece.rows
                    other.size_bytes += added
                    break
            else:
                bins.append(_Bin(rows=list(piece.rows), size_bytes=piece.size_bytes))
        return bins

    def _tear(self, rows: Sequence[_Row], budget: int) -> list[_Bin]:
        """Tears a signature into pieces, in order of n and k."""
        pieces: list[_Bin] = []
        kernels: set[str] = set()
        for row in rows:
            rankings_bytes = int(self._weight(row) * self._weight_bytes)
            added = self._kernel_bytes(row.kernels - kernels) + rankings_bytes
            if pieces and pieces[-1].size_bytes + added <= budget:
                pieces[-1].rows.append(row)
                pieces[-1].size_bytes += added
                kernels |= row.kernels
            else:
                pieces.append(_Bin(rows=[row], size_bytes=self.of([row])))
                kernels = set(row.kernels)
        return pieces

    def halves(self, one: _Bin) -> list[_Bin]:
        """Divides a part with several rows in two, between signatures if it has several."""
        ends = [0]
        for row in one.rows:
            ends.append(ends[-1] + self.of([row]))
        cuts = range(1, len(one.rows))
        between = [cut for cut in cuts if one.rows[cut - 1].signature != one.rows[cut].signature]
        cut = min(between or cuts, key=lambda cut: abs(2 * ends[cut] - ends[-1]))
        return [
            _Bin(rows=rows, size_bytes=self.of(rows)) for rows in (one.rows[:cut], one.rows[cut:])
        ]


def _rows(content: BundleContent) -> list[_Row]:
    """Returns a content's rows, sorted; each kernel and unserved problem is in one."""
    by_key: dict[Hashable, _Row] = {}
    rankings = sorted(content.rankings, key=lambda r: (r.problem, r.is_further, r.gpu))
    for ranking in rankings:
        problem = ranking.problem
        row = by_key.setdefault(all_but_m(problem), _Row(signature=problem.signature))
        row.rankings.append(ranking)
        row.kernels |= {id_ for id_, _ in ranking.kernels}
    firsts: dict[Signature, _Row] = {}
    for row in by_key.values():
        firsts.setdefault(row.signature, row)
    rows = list(by_key.values())
    ranked = {id_ for row in rows for id_ in row.kernels}
    for kernel in sorted(content.kernels, key=lambda kernel: kernel.id):
        if kernel.id not in ranked:
            if kernel.signature not in firsts:
                firsts[kernel.signature] = _Row(signature=kernel.signature)
                rows.append(firsts[kernel.signature])
            firsts[kernel.signature].kernels.add(kernel.id)
    for problem, reason in content.unserved.items():
        row = by_key.get(all_but_m(problem)) or firsts.get(problem.signature) or rows[0]
        row.unserved[problem] = reason
    return rows


def _encode(opened: OpenedBundle, bins: Sequence[_Bin]) -> list[Part]:
    """Encodes parts, in the order of their rows in the whole."""
    content = opened.content
    order = {id(row): position for position, row in enumerate(_ordered_rows(bins))}
    ordered = sorted(bins, key=lambda one: min(order[id(row)] for row in one.rows))
    wholes = (opened.whole, *opened.header.part_of)
    parts = []
    for one in ordered:
        ids = {id_ for row in one.rows for id_ in row.kernels}
        part = replace(
            content,
            kernels=tuple(kernel for kernel in content.kernels if kernel.id in ids),
            rankings=tuple(ranking for row in one.rows for ranking in row.rankings),
            unserved={problem: why for row in one.rows for problem, why in row.unserved.items()},
            part_of=wholes,
        )
        packed = pack_by_copying([opened], part, are_parts=True)
        data, header = encode_bundle(with_own_key(part, packed), as_is(packed))
        parts.append(Part(data=data, header=header))
    return parts


def _ordered_rows(bins: Sequence[_Bin]) -> list[_Row]:
    return sorted((row for one in bins for row in one.rows), key=lambda row: row.name)
