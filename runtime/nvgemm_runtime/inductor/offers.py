"""Chooses the kernels to offer for a GEMM: bundled ones, or ones compiled now.

The operands are read once, into requests: every way to see them as a problem. Matching finds the
kernels that serve a request, and `trust` decides which of those to offer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..bundle.format import Kernel
from ..gemm.aten import AtenGemm, product_of_sum, unusual_setting
from ..gemm.operands import Request
from ..gemm.problem import Problem
from ..installed.jit_cache import mark_used
from ..installed.registry import INSTALLATION
from ..jit import client
from ..matching.device import DeviceFacts, device_facts, torch_versions
from ..matching.dispatch import TunedTogether
from ..matching.index import match_first_reading
from ..matching.matches import Basis, Match, MatchedKernel, Miss
from ..matching.trust import Terms, decide, why_unlike_measured
from ..recording.declarable import declarable, read_requests
from ..reporting.counters import COUNTERS
from ..settings import MAX_CHOICES_VARIABLE

LONGEST_WAIT_S = 600.0
"""Longest wait for a problem's kernels, in seconds. Kernels that take longer serve later graphs."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Kernel that joins the choices.

    Attributes:
        kernel: Bundle entry.
        origin: Distribution and version that ship it, or another name for its bundle.
    """

    kernel: Kernel
    origin: str

    @classmethod
    def of(cls, served: MatchedKernel) -> Offer:
        """Builds the offer for a matched kernel."""
        return cls(kernel=served.kernel, origin=served.bundle.origin)


@dataclass(frozen=True, kw_only=True)
class Offers:
    """Kernels offered for a GEMM, or the reasons for a miss.

    Attributes:
        gemm: Problem key, or operator and operands if no problem describes the GEMM.
        basis: ``declared``, ``signature``, ``jit`` or ``miss``.
        problem: Problem, if a manifest can declare it.
        kernels: Kernels, best-ranked first. Empty for a miss, and if ATen was measured to be
            faster.
        reasons: Reasons for a miss.
        is_final: True if nothing needs timing: the first kernel wins, or ATen if there is none.
        measured: Decision of a measured ranking as text, or empty.
        is_split: True if the kernels compute only a sum's product, into fp32, and torch adds.
        doubtful: Files of the bundle whose measured ranking is used but in doubt; see `report.met`.
    """

    gemm: str
    basis: str
    problem: Problem | None = None
    kernels: Sequence[Offer] = ()
    reasons: Sequence[str] = ()
    is_final: bool = False
    measured: str = ""
    is_split: bool = False
    doubtful: Sequence[TunedTogether] = ()

    @property
    def is_miss(self) -> bool:
        """True if no kernel serves the GEMM."""
        return self.basis == "miss"


def find_offers(
    gemm: AtenGemm,
    limit: int,
    *,
    may_compile: bool = False,
    may_split: bool = False,
    trusts_measurements: bool = False,
    needs_kernel: bool = False,
    other_backends: frozenset[str] = frozenset(),
) -> Offers:
    """Finds the kernels to offer.

    Args:
        gemm: The GEMM.
        limit: Largest number of kernels; 0 makes every GEMM a miss.
        may_compile: Compile kernels that bundles lack, and wait for them.
        may_split: Allow kernels for only a sum's product, if none computes both.
        trusts_measurements: Use measured rankings without timing again; see `trust.decide`.
        needs_kernel: Offer a kernel even if ATen was measured to be faster.
        other_backends: Backends that compete, without ATen's; see `trust.Terms`.
    """
    requests = read_requests(gemm)
    if isinstance(requests, str):
        offers = Offers(
            gemm=f"{gemm.op} of {gemm.a} and {gemm.b}", basis="miss", reasons=(requests,)
        )
    elif not limit:
        reason = f"{MAX_CHOICES_VARIABLE}=0 allows no kernels"
        offers = Offers(gemm=requests[0].problem.key, basis="miss", reasons=(reason,))
    else:
        terms = Terms(
            limit=limit,
            trusts_measurements=trusts_measurements,
            needs_kernel=needs_kernel,
            is_precise=gemm.is_precise,
            aten_setting=unusual_setting(requests[0].problem.signature.a),
            other_backends=other_backends,
        )
        offers = _match_or_compile(gemm, requests, terms, may_compile)
    product = product_of_sum(gemm) if may_split and offers.is_miss else None
    return offers if product is None else _offer_product_only(offers, product, limit)


def _match_or_compile(
    gemm: AtenGemm, requests: tuple[Request, ...], terms: Terms, may_compile: bool
) -> Offers:
    declaration = declarable(gemm, requests)
    problem = declaration if isinstance(declaration, Problem) else None
    facts = facts_for(gemm)
    make_offers = functools.partial(_make_offers, facts, problem, terms)
    matched = _match(requests, facts)
    pending = None
    if may_compile and problem is not None:
        pending = _find_pending(problem, facts, matched[1])
    if pending is None:
        return make_offers(matched)
    with COUNTERS.spending("jit"):
        result = pending.result(LONGEST_WAIT_S)
    if result.bundle is None:
        # The JIT cache's kernels for other sizes still serve this one.
        return make_offers(matched, reasons=(f"nothing was compiled: {result.reason}",))
    _offered.add(pending)
    INSTALLATION.refresh_user_bundles(result.bundle)
    return make_offers(_match(requests, facts), basis="jit")


_offered: set[client.Pending] = set()
"""Requests whose kernels have joined choices. Their problems now count as declared."""


def _find_pending(
    problem: Problem, facts: DeviceFacts, match: Match | Miss
) -> client.Pending | None:
    """Returns the JIT request to wait for, or None if the matched kernels are enough."""
    # `start_compiling` may have made the request.
    pending = client.find_request(problem, facts)
    if pending is None and _is_uncovered(match):
        pending = client.request(problem, facts)
    if pending is None:
        return None
    # Some kernels compiled here and others failed for now. Those are not worth a wait.
    lacks_few = isinstance(match, Match) and match.basis is Basis.DECLARED and _is_uncovered(match)
    if pending in _offered and (lacks_few or not _is_uncovered(match)):
        return None
    return None if lacks_few and not pending.done() else pending


def _is_uncovered(match: Match | Miss) -> bool:
    """Returns True if kernels are worth compiling.

    They are if no shipped kernel fits, and the JIT cache lacks some for this problem.
    """
    if isinstance(match, Miss):
        return True
    return match.from_jit and (match.basis is not Basis.DECLARED or not match.is_complete)


def start_compiling(gemms: Iterable[AtenGemm]) -> None:
    """Starts compiling kernels in the JIT server for those GEMMs that need it."""
    for gemm in gemms:
        requests = read_requests(gemm)
        problem = declarable(gemm, requests)
        if isinstance(requests, tuple) and isinstance(problem, Problem):
            facts = facts_for(gemm)
            if _is_uncovered(_match(requests, facts)[1]):
                client.request(problem, facts)


def _offer_product_only(offers: Offers, product: AtenGemm, limit: int) -> Offers:
    """Offers kernels that compute only the product, into fp32, for a sum that no kernel computes.

    Compiles nothing for that. A measurement of the product gives the fastest kernel, but does not
    tell if ATen's sum is faster.
    """
    split = find_offers(product, limit, needs_kernel=True)
    if split.kernels:
        # The sum itself is not declared, even if its product is.
        basis = Basis.SIGNATURE.value
        return replace(offers, kernels=split.kernels, reasons=(), basis=basis, is_split=True)
    new_reasons = [reason for reason in split.reasons if reason not in offers.reasons]
    additions = (f"for the product alone, {split.gemm}: {reason}" for reason in new_reasons)
    return replace(offers, reasons=(*offers.reasons, *additions))


def facts_for(gemm: AtenGemm) -> DeviceFacts:
    """Returns the facts of the GEMM's device, and whether results may depend on timing."""
    from torch._inductor import config

    facts = device_facts(gemm.out.device.type, gemm.out.device.index or 0)
    if getattr(config, "deterministic", False):  # Inductor's own setting
        return replace(facts, wants_determinism=True)
    return facts


_Matched = tuple[Request, Match | Miss]
"""The served request, or the first if none is served, and its match."""


def _match(requests: tuple[Request, ...], facts: DeviceFacts) -> _Matched:
    with COUNTERS.spending("matching"):
        return match_first_reading(INSTALLATION.index(facts).match, requests)


def _make_offers(
    facts: DeviceFacts,
    problem: Problem | None,
    terms: Terms,
    matched: _Matched,
    *,
    reasons: tuple[str, ...] = (),
    basis: str | None = None,
) -> Offers:
    """Decides which matched kernels to offer. Puts ``reasons`` first in a miss."""
    request, match = matched
    gemm = request.problem.key
    if isinstance(match, Miss):
        reasons = (*reasons, *match.reasons)
        return Offers(gemm=gemm, basis="miss", problem=problem, reasons=reasons)
    if match.from_jit:
        mark_used(match.ranked_as)
    decision = decide(match, request, facts, torch_versions(), terms)
    return Offers(
        gemm=gemm,
        basis=basis or match.basis.value,
        problem=problem,
        kernels=[Offer.of(kernel) for kernel in decision.kernels],
        is_final=decision.is_final,
        measured=decision.why,
        doubtful=_doubtful_files(match, request),
    )


def _doubtful_files(match: Match, request: Request) -> list[TunedTogether]:
    """Returns the file of the bundle that measured this problem with doubts, or an empty list.

    Also empty if no measurement is valid for these operands.
    """
    opened = match.kernels[0].bundle.opened
    has_doubts = match.measured is not None and bool(match.measured.doubts)
    if not has_doubts or opened is None or why_unlike_measured(request):
        return []
    return [(str(opened.path),)]
