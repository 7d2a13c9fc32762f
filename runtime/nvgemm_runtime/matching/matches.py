"""Results of matching, and the bundles that it reads."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from ..bundle.format import Header, Kernel
from ..bundle.paging.paged_header import PagedHeader
from ..bundle.ranking_entries import Measured, RankingSource
from ..bundle.reader import Bundle
from ..gemm.problem import Problem
from .refusals import version_numbers


@dataclass(frozen=True, kw_only=True)
class BundleView:
    """Bundle with the facts that matching needs.

    Attributes:
        name: Name in messages.
        header: Bundle header; without kernels and rankings if there are ``pages``.
        origin: Source of the bundle: installed, named by the user or cached.
        opened: Open bundle, if its kernels are to be loaded.
        pages: Look-ups in a header in pages; None for a whole header.
    """

    name: str
    header: Header
    origin: str = ""
    opened: Bundle | None = None
    pages: PagedHeader | None = None


@dataclass(frozen=True, kw_only=True)
class MatchedKernel:
    """Kernel that serves a problem.

    Attributes:
        bundle: Bundle that holds it.
        kernel: Header entry.
        rank: Position in its ranking.
        time_ns: Time in its ranking, if any.
    """

    bundle: BundleView
    kernel: Kernel
    rank: int
    time_ns: int | None


class Basis(str, enum.Enum):
    """Basis for a match: the declared problem or only its signature."""

    DECLARED = "declared"
    SIGNATURE = "signature"


@dataclass(frozen=True, kw_only=True)
class Match:
    """Kernels that serve a problem.

    Attributes:
        basis: Declared problem, or other problem with the same signature; a measured but undeclared
            problem counts as the latter.
        ranked_as: Problem whose ranking is used.
        source: Source of that ranking.
        kernels: Kernels, best first; at least one.
        from_jit: True if they come from the JIT cache and no wheel serves the problem equally well.
        measured: Measurement of exactly this problem; None without one.
        is_complete: True if rebuilding the ranking would find no further kernel; see
            `Header.is_complete`.
    """

    basis: Basis
    ranked_as: Problem
    source: RankingSource
    kernels: tuple[MatchedKernel, ...]
    from_jit: bool = False
    measured: Measured | None = None
    is_complete: bool = True


@dataclass(frozen=True, kw_only=True)
class Miss:
    """Miss: every reason why no kernel serves a problem, most specific first."""

    reasons: tuple[str, ...]


def newest_compiler_first(bundles: Iterable[BundleView]) -> list[BundleView]:
    """Orders bundles by compiler version, newest first, then by name."""
    by_name = sorted(bundles, key=lambda bundle: (bundle.name, bundle.header.build_key))
    return sorted(by_name, key=_compiler_version, reverse=True)  # stable: equals stay as they are


def _compiler_version(bundle: BundleView) -> tuple[int, ...]:
    return version_numbers(bundle.header.toolchain.get("nvidia-cutlass-dsl", ""))
