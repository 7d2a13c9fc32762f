"""Which kernels to offer for a GEMM that Inductor compiles: bundled ones, or compiled now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..bundle.format import Kernel
from ..bundle.reader import Bundle
from ..counters import COUNTERS
from ..errors import NoKernelError
from ..gemm.aten import OPERATORS, AtenGemm, product_of_sum, unusual_setting
from ..gemm.operands import Request, requests
from ..gemm.problem import Problem
from ..installed.jit_cache import mark_used
from ..installed.registry import INSTALLATION
from ..jit import client
from ..matching.device import DeviceFacts, device_facts, torch_versions
from ..matching.index import Basis, Match, Miss, first_served
from ..matching.trust import Terms, decide
from ..recording.declarable import declarable

LONGEST_WAIT_S = 600.0
"""From asking for a problem's kernels: what takes longer is there for other graphs."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A kernel that joins the choices.

    Attributes:
        kernel: Its entry.
        origin: The distribution and version that brought it, or what else names its bundle.
    """

    kernel: Kernel
    origin: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """What there is for a GEMM.

    Attributes:
        gemm: Its problem's key, or in words where no problem describes it.
        problem: The problem, if a manifest can declare it.
        basis: ``declared``, ``signature``, ``jit`` or ``miss``.
        offers: The kernels, best-ranked first; empty for a miss, and where ATen was measured to be
            faster.
        reasons: Why it is a miss.
        is_final: Whether nothing is to be timed: the first kernel wins, or ATen without one.
        measured: What a measured ranking says of it, in words; empty where there is none.
    """

    gemm: str
    problem: Problem | None
    basis: str
    offers: Sequence[Offer] = ()
    reasons: Sequence[str] = ()
    is_final: bool = False
    measured: str = ""


def find_offers(
    gemm: AtenGemm,
    limit: int,
    *,
    may_compile: bool,
    trusts: bool = False,
    needs_kernel: bool = False,
    beside: frozenset[str] = frozenset(),
) -> Found:
    """Find the kernels to offer.

    Args:
        gemm: The GEMM.
        limit: Most kernels to offer; 0 makes every GEMM a miss.
        may_compile: Whether to compile, and wait for, what no bundle covers.
        trusts: Whether what was measured need not be timed again; see `trust.decide`.
        needs_kernel: Whether to offer a kernel even where ATen was measured to be faster.
        beside: Which backends compete besides ATen's; see `trust.Terms`.
    """
    words = f"{gemm.op} of {gemm.a} and {gemm.b}"
    if gemm.obstacle is not None:
        return _miss(words, None, [gemm.obstacle])
    try:
        asked = _requests(gemm)
    except (NoKernelError, ValueError) as error:
        return _miss(words, None, [str(error)])
    if not limit:
        return _miss(asked[0].problem.key, None, ["at most 0 kernels are to be offered"])
    terms = Terms(
        limit=limit,
        trusts=trusts,
        needs_kernel=needs_kernel,
        is_precise=gemm.is_precise,
        aten_setting=unusual_setting(asked[0].problem.signature.a),
        beside=beside,
    )
    wanted = declarable(gemm)
    facts = _facts(gemm)
    known = _ask(asked, facts)
    if isinstance(wanted, str):
        return known.offer(terms, None)
    if not may_compile:
        return known.offer(terms, wanted)
    # What `start_compiling` asked for may be there by now, as if it had been declared.
    pending = client.asked(wanted, facts)
    if pending is None and known.is_uncovered:
        pending = client.request(wanted, facts)
    if pending is None:
        return known.offer(terms, wanted)
    if pending in _offered and (known.lacks_few or not known.is_uncovered):
        return known.offer(terms, wanted)
    if known.lacks_few and not pending.done():
        return known.offer(terms, wanted)
    with COUNTERS.spending("jit"):
        outcome = pending.result(LONGEST_WAIT_S)
    if outcome.bundle is None:
        # Kernels that the JIT cache has for other sizes still serve this one.
        return known.offer(terms, wanted, reasons=[f"nothing was compiled: {outcome.reason}"])
    _offered.add(pending)
    INSTALLATION.refresh_kept_bundles(outcome.bundle)
    return _ask(asked, facts).offer(terms, wanted, basis="jit")


_offered: set[client.Pending] = set()
"""Requests whose kernels have joined choices: from then on they are declared as any others."""


def start_compiling(gemms: Iterable[AtenGemm]) -> None:
    """Have kernels compiled, beside this process, for those of several GEMMs that need it."""
    for gemm in gemms:
        wanted = declarable(gemm)
        if isinstance(wanted, Problem):
            facts = _facts(gemm)
            if _ask(_requests(gemm), facts).is_uncovered:
                client.request(wanted, facts)


def find_split_offers(gemm: AtenGemm, limit: int) -> Found | None:
    """Find kernels for a sum's product alone, into fp32; None where the GEMM is no plain sum.

    Nothing is compiled for that: it is for what bundles hold. What was measured of the product says
    which kernel, and not whether ATen's sum is faster.
    """
    product = product_of_sum(gemm)
    if product is None:
        return None
    return find_offers(product, limit, may_compile=False, needs_kernel=True)


def _requests(gemm: AtenGemm) -> tuple[Request, ...]:
    op = OPERATORS[gemm.op].op
    return requests(op, gemm.a, gemm.b, out=gemm.out, extras=gemm.extras)


def _facts(gemm: AtenGemm) -> DeviceFacts:
    """The device that it is computed on."""
    return device_facts(gemm.out.device.type, gemm.out.device.index or 0)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What matching says of a GEMM.

    Attributes:
        facts: The device that it is computed on.
        request: The reading of its operands that is served, or the first of all.
        found: The kernels, or why there are none.
        bundles: By position, those that the kernels are in.
    """

    facts: DeviceFacts
    request: Request
    found: Match | Miss
    bundles: tuple[Bundle, ...]

    @property
    def is_uncovered(self) -> bool:
        """Whether kernels are worth compiling: none shipped for its like, nor all compiled here."""
        found = self.found
        if isinstance(found, Miss):
            return True
        return found.from_jit and (found.basis is not Basis.DECLARED or not found.is_complete)

    @property
    def lacks_few(self) -> bool:
        """Whether kernels were compiled here, and others lost: not worth waiting for."""
        return (
            isinstance(self.found, Match)
            and self.is_uncovered
            and self.found.basis is Basis.DECLARED
        )

    def offer(
        self,
        terms: Terms,
        wanted: Problem | None,
        *,
        reasons: Sequence[str] = (),
        basis: str | None = None,
    ) -> Found:
        """What to offer; for a miss, with these reasons before others."""
        found = self.found
        if isinstance(found, Miss):
            return _miss(self.request.problem.key, wanted, [*reasons, *found.reasons])
        if found.from_jit:
            mark_used(found.ranked_as)
        decision = decide(found, self.request, self.facts, torch_versions(), terms)
        return Found(
            gemm=self.request.problem.key,
            problem=wanted,
            basis=basis or found.basis.value,
            offers=[
                Offer(kernel=served.kernel, origin=INSTALLATION.origin(self.bundles[served.bundle]))
                for served in decision.kernels
            ],
            is_final=decision.is_final,
            measured=decision.why,
        )


def _ask(asked: tuple[Request, ...], facts: DeviceFacts) -> _Answer:
    with COUNTERS.spending("matching"):
        index, bundles = INSTALLATION.index(facts)
        request, found = first_served(index.match, asked)
        return _Answer(facts=facts, request=request, found=found, bundles=bundles)


def _miss(gemm: str, wanted: Problem | None, reasons: Sequence[str]) -> Found:
    return Found(gemm=gemm, problem=wanted, basis="miss", reasons=tuple(reasons))
