"""Rankings in a bundle's header: their kernels' times, measurements and sources."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..gemm.problem import Problem

ON = " on "
"""Separator between problem and further GPU product, in the text that names a ranking's problem."""

APART, BACK_TO_BACK = "apart", "back to back"
"""Spacing of timed launches. Apart: a small kernel precedes each launch; it waits for the previous
launch to end and lets none begin before its own end. Back to back: a kernel with programmatic
dependent launch may begin before the previous one has ended."""

ESTIMATE, MEASUREMENT = "estimate", "measurement"
"""Known source kinds."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Measurement conditions besides the GPU product.

    Attributes:
        driver: GPU driver version, e.g. ``580.95.05``.
        torch: torch version, whose ATen was measured too, e.g. ``2.11.0+cu130``.
        cuda: CUDA version that torch was built for, e.g. ``13.0``; it bounds cuBLAS's version.
        date: UTC date, e.g. ``2026-11-21``.
        launches: Launch spacing: `APART`, `BACK_TO_BACK`, or a text unknown to this release.
        gpu_sha256: Digest of the GPU's UUID, such as ``GPU-8b1c…``; None if unknown.
    """

    driver: str
    torch: str
    cuda: str
    date: str
    launches: str = BACK_TO_BACK
    gpu_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankingSource:
    """Source for a ranking's order.

    Attributes:
        kind: ``estimate`` or ``measurement``.
        by: Model and its version, or measuring program.
        gpu: Modelled or measured GPU product, as its driver names it.
        conditions: Measurement conditions, if recorded.
    """

    kind: str
    by: str
    gpu: str
    conditions: Conditions | None = None


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Entry in a ranking.

    Attributes:
        kernel: Position in ``Header.kernels``.
        time_ns: Estimated or measured runtime in nanoseconds; None if the source has no number.
    """

    kernel: int
    time_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Measured runtime.

    Attributes:
        time_ns: Median, in nanoseconds.
        spread_ns: The true median lies within ``time_ns`` ± this, with 95 % confidence for each
            timing alone.
    """

    time_ns: int
    spread_ns: int


LEAST_CONFIRMING = 2
"""Distinct GPUs that a confirmed measurement needs."""


LEAST_REPEAT_S = 120
"""Least seconds between two measurements on one GPU that count as a repetition.

Clocks and temperature settle in tens of seconds, and other programs' bursts end. After two minutes
the second measurement does not inherit the first one's state."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of a problem, except its kernels' times.

    Attributes:
        spreads_ns: Spread per ranking entry; see `Timing`.
        aten: ATen's time for the problem; None if it has no operator that computes the same.
        triton: Time for Inductor's best Triton kernel; None if not measured.
        doubts: Reasons not to rely on the order; empty for a reliable one.
        confirmed_by: UUID digests for the GPUs that confirm it: at least two, or none.
        repeated: Seconds after which another process measured the same on this GPU, at least
            `LEAST_REPEAT_S`; None if none did.
    """

    spreads_ns: tuple[int, ...]
    aten: Timing | None
    triton: Timing | None
    doubts: tuple[str, ...]
    confirmed_by: tuple[str, ...] = ()
    repeated: int | None = None

    @property
    def is_confirmed(self) -> bool:
        """True if two GPUs agree on the winner, without doubts."""
        return len(set(self.confirmed_by)) >= LEAST_CONFIRMING and not self.doubts

    @property
    def is_repeated(self) -> bool:
        """True if two processes on one GPU agree on the winner, without doubts."""
        return self.repeated is not None and not self.doubts

    @property
    def standing(self) -> str:
        """Reliability of the order, in words."""
        if self.doubts:
            return "doubtful"
        if self.is_confirmed:
            return f"confirmed by {len(set(self.confirmed_by))} GPUs"
        return "repeated" if self.is_repeated else "measured once"


@dataclass(frozen=True, kw_only=True)
class CompileFailure:
    """Kernel that was chosen for a problem and did not compile.

    Attributes:
        operator: Operator name.
        reason: Reason, on one line.
        is_transient: True if another attempt may succeed: the compiler was killed or timed out,
            which says nothing about the kernel.
    """

    operator: str
    reason: str
    is_transient: bool


def entry_name(problem: Problem, product: str | None = None) -> str:
    """Returns the text that names a header entry: its problem, and its product if it is further."""
    return f"{problem.key}{ON}{product}" if product else problem.key


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Kernels for a problem, best first, and their order's source.

    Attributes:
        problem: Ranked problem.
        source: Position in ``Header.sources``.
        kernels: Entries, best first.
        measured: Measurement; None if the order is an estimate.
        missing: Positions in ``Header.failures``: kernels that should be ranked too.
        is_declared: True if a manifest declares the problem. Others were only measured, for
            dispatch by m.
        product: GPU product for a further ranking, as its driver names it; None for a problem's
            first ranking, whose product is its source's ``gpu``.
    """

    problem: Problem
    source: int
    kernels: tuple[Ranked, ...]
    measured: Measured | None = None
    missing: tuple[int, ...] = ()
    is_declared: bool = True
    product: str | None = None

    @property
    def is_further(self) -> bool:
        """True if the bundle has, or could have, another ranking for the problem before it."""
        return self.product is not None

    @property
    def name(self) -> str:
        """Text that names it in a header."""
        return entry_name(self.problem, self.product)


@dataclass(frozen=True, kw_only=True)
class UnknownEntry:
    """Ranking, or entry in ``unserved``, that this release leaves out.

    Attributes:
        problem: Text that names its problem.
        why: Reason that it is unknown, in words.
    """

    problem: str
    why: str


class Scope(str, enum.Enum):
    """Scope of the reason for a missing kernel."""

    SIGNATURE = "signature"
    """Every problem with the signature, whatever its sizes."""

    PROBLEM = "problem"
    """This problem alone; others with its signature may have kernels."""


@dataclass(frozen=True, kw_only=True)
class UnservedReason:
    """Reason that a declared problem has no kernel.

    Attributes:
        text: Reason, on one line.
        scope: Problems that it holds for; None if unknown, as in bundles of version 1.
    """

    text: str
    scope: Scope | None


class _Entry(Protocol):
    """Ranking, in a header or on its way into one."""

    @property
    def problem(self) -> Problem:
        """Ranked problem."""

    @property
    def is_declared(self) -> bool:
        """True if a manifest declares it."""

    @property
    def is_further(self) -> bool:
        """True if another ranking for the problem may precede it."""


_E = TypeVar("_E", bound=_Entry)


def choose_rankings(
    rankings: Sequence[_E],
    gpu: str,
    *,
    gpu_of: Callable[[_E], str],
    has_own: bool | None = None,
) -> tuple[_E, ...]:
    """Chooses a ranking per problem for a GPU product: its own, else the first product's.

    A product with its own rankings does not use another product's measurements at undeclared sizes.
    If no ranking is further, all are used.

    Args:
        rankings: Rankings, in header order.
        gpu: GPU product.
        gpu_of: Returns a ranking's product.
        has_own: True if the bundle has rankings for the product; None if ``rankings`` are all.
    """
    if has_own is None and not any(ranking.is_further for ranking in rankings):
        return tuple(rankings)
    own_problems = {ranking.problem for ranking in rankings if gpu_of(ranking) == gpu}
    if has_own is None:
        has_own = bool(own_problems)
    chosen: dict[Problem, _E] = {}
    for ranking in rankings:
        if gpu_of(ranking) == gpu:
            chosen[ranking.problem] = ranking
        elif ranking.problem not in own_problems and (ranking.is_declared or not has_own):
            current = chosen.get(ranking.problem)
            if current is None or (current.is_further and not ranking.is_further):
                chosen[ranking.problem] = ranking
    return tuple(chosen.values())
