"""Decides if a measurement holds here, which kernels to offer, and if they need timing again.

Pure functions over a match, its operands, the device and library versions. A measurement counts
only for its GPU product, its exact problem, and operands aligned as measured. Estimates, and times
from other GPUs or sizes, change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..bundle.format import KernelFacts
from ..bundle.ranking_entries import APART, Conditions, Measured, Ranking, RankingSource
from ..gemm.operands import Request
from ..gemm.roles import contiguous_bytes
from .device import DeviceFacts, TorchVersions, cuda_major
from .refusals import version_numbers

if TYPE_CHECKING:
    from .matches import Match, MatchedKernel

TRITON = "Triton"
"""Backend besides ATen that may have been measured."""

KNOWN_ALIGNMENT_BYTES = 32
"""Alignment from which operands count as aligned as measured: `tune` uses 256 or more, and
torch.compile never proves more than this."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Constraints on an offer of kernels for a GEMM.

    Attributes:
        limit: Most kernels to offer.
        trusts_measurements: True if measurements need not be repeated.
        needs_kernel: True if a kernel must be offered even if ATen was faster.
        is_precise: True if ATen must compute `aten.AtenGemm.is_precise` sums.
        aten_setting: Description of a setting that makes ATen differ from what `tune` measures; see
            `aten.unusual_setting`.
        other_backends: Competing backends other than ATen; `TRITON` for Triton.
    """

    limit: int
    trusts_measurements: bool = False
    needs_kernel: bool = False
    is_precise: bool = False
    aten_setting: str | None = None
    other_backends: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Kernels to offer for a GEMM.

    Attributes:
        kernels: Kernels to offer, best first; empty if ATen was measured fastest.
        is_final: True if nothing needs timing: the first kernel wins, or ATen without one.
        why: Description of what a measurement decided, or why it decided nothing, or the other
            product that an estimate is for; empty for an estimate for this product.
    """

    kernels: tuple[MatchedKernel, ...]
    is_final: bool
    why: str


def decide(
    match: Match, request: Request, facts: DeviceFacts, versions: TorchVersions, terms: Terms
) -> Decision:
    """Decides which kernels to offer for a GEMM."""
    measured, conditions = match.measured, match.source.conditions
    if measured is None or conditions is None:
        return _to_time(match.kernels, terms, why_another_gpu(match.source, facts) or "")
    kernels = [served.kernel for served in match.kernels]
    obstacle = why_order_is_open(measured, match.source, facts, kernels)
    obstacle = obstacle or why_unlike_measured(request) or _why_first_is_missing(match.kernels)
    if obstacle is not None:
        return _to_time(match.kernels, terms, obstacle)
    winner = match.kernels[0]
    assert winner.time_ns is not None  # measured rankings have times
    text = (
        f"{measured.standing} on {match.source.gpu}, {conditions.date}: "
        f"{winner.time_ns / 1e3:.1f} us"
    )
    obstacle = why_aten_is_open(measured, conditions, versions) or why_another_aten(request, terms)
    if measured.aten is None or obstacle is not None:
        return _to_time(_contending(match.kernels, measured), terms, f"{text}; {obstacle}")
    text += f", ATen {measured.aten.time_ns / 1e3:.1f} us"
    triton = measured.triton
    if triton is not None and triton.time_ns < min(winner.time_ns, measured.aten.time_ns):
        text += f", Triton {triton.time_ns / 1e3:.1f} us"
        return _to_time(_contending(match.kernels, measured), terms, text)
    kernel_wins = winner.time_ns < measured.aten.time_ns
    if not kernel_wins and terms.needs_kernel:
        return _to_time(_contending(match.kernels, measured), terms, text)
    is_final = terms.trusts_measurements
    unknown = terms.other_backends - {TRITON} if triton is not None else terms.other_backends
    if is_final and unknown:
        text += f"; not measured: {', '.join(sorted(unknown))}"
        is_final = False
    return Decision(kernels=(winner,) if kernel_wins else (), is_final=is_final, why=text)


def _to_time(kernels: tuple[MatchedKernel, ...], terms: Terms, why: str) -> Decision:
    return Decision(kernels=kernels[: terms.limit], is_final=False, why=why)


def _contending(
    kernels: tuple[MatchedKernel, ...], measured: Measured
) -> tuple[MatchedKernel, ...]:
    """Returns the kernels whose measured times are not clearly longer than the first's.

    If ATen or Triton wins, `tune` stops before it can distinguish kernels from each other.
    """

    def interval(served: MatchedKernel) -> tuple[int, int]:
        assert served.time_ns is not None
        spread = measured.spreads_ns[served.rank]
        return served.time_ns - spread, served.time_ns + spread

    _, latest_ns = interval(kernels[0])
    return tuple(served for served in kernels if interval(served)[0] <= latest_ns)


def why_unlike_measured(request: Request) -> str | None:
    """Returns why times do not hold for these operands, or None.

    `tune` measures compact, aligned operands.
    """
    if not request.is_compact:
        return "measured without gaps between rows or matrices, but these operands have gaps"
    least = contiguous_bytes(request.problem) | KNOWN_ALIGNMENT_BYTES
    if request.alignment_bytes < least & -least:
        return (
            f"measured with operands aligned to {least & -least} bytes or more, but these "
            f"are aligned to {request.alignment_bytes}"
        )
    return None


def why_another_aten(request: Request, terms: Terms) -> str | None:
    """Returns why ATen's time differs from the measured one, or None."""
    scales = request.problem.signature.scales
    if terms.is_precise and (scales is None or scales.block is None):
        return "ATen was measured with use_fast_accum, which is off here"
    if terms.aten_setting is not None:
        return f"ATen was measured with default settings: {terms.aten_setting}"
    return None


def _why_first_is_missing(kernels: Sequence[MatchedKernel]) -> str | None:
    """Returns why the usable kernels cannot inherit the ranking's verdict, or None."""
    if not kernels or kernels[0].rank:
        return "the kernel that was measured fastest cannot be used here"
    return None


def why_times_are_open(
    measured: Measured,
    source: RankingSource,
    kernels: Sequence[MatchedKernel],
    facts: DeviceFacts,
    versions: TorchVersions,
) -> str | None:
    """Returns why these kernels' and ATen's times do not hold here, or None."""
    assert source.conditions is not None
    reason = why_order_is_open(measured, source, facts, (served.kernel for served in kernels))
    reason = reason or _why_first_is_missing(kernels)
    return reason or why_aten_is_open(measured, source.conditions, versions)


def why_another_gpu(source: RankingSource, facts: DeviceFacts) -> str | None:
    """Returns why a ranking is for another product than this device, or None.

    The bundle then has no ranking for this product; its first product's order serves as an
    estimate.
    """
    if source.gpu == facts.name or facts.capability is None:
        return None
    return f"ranked for {source.gpu}, this is {facts.name}: the order is a guess here"


def why_order_is_open(
    measured: Measured, source: RankingSource, facts: DeviceFacts, kernels: Iterable[KernelFacts]
) -> str | None:
    """Returns why a measured kernel order does not hold on a device, or None."""
    assert source.conditions is not None
    if source.gpu != facts.name:
        return f"measured on {source.gpu}, this is {facts.name}"
    then = source.conditions.cuda
    if cuda_major(then) != facts.cuda:
        return f"measured with CUDA {then}, torch uses {facts.cuda or 'no CUDA'}"
    if measured.doubts:
        return f"measured with doubts: {'; '.join(measured.doubts)}"
    launches = source.conditions.launches
    if launches != APART and any(kernel.design.dependent_launch for kernel in kernels):
        return (
            f"measured with launches {launches}, not {APART}: kernels of programmatic dependent "
            "launch may have overlapped with themselves"
        )
    return None


def holds_here(
    ranking: Ranking, source: RankingSource, facts: DeviceFacts, kernels: Iterable[KernelFacts]
) -> bool:
    """Returns True if a ranking is a measurement whose kernel order holds on a device."""
    measured = ranking.measured
    if measured is None or source.conditions is None:
        return False
    return why_order_is_open(measured, source, facts, kernels) is None


def why_aten_is_open(
    measured: Measured, conditions: Conditions, versions: TorchVersions
) -> str | None:
    """Returns why ATen's time does not hold here, or None.

    ATen's kernels are torch's and cuBLAS's. A minor torch version decides what it asks cuBLAS for
    and, with torch's CUDA version, which cuBLAS is installed. The cuBLAS version alone is not
    enough: torch releases with the same one call it differently (docs/guide/tuning.md).
    """
    if measured.aten is None:
        return "ATen was not measured"
    return why_another_release(conditions.torch, conditions.cuda, versions)


def why_another_release(torch: str, cuda: str, versions: TorchVersions) -> str | None:
    """Returns why a measurement with some torch and CUDA does not hold here, or None."""
    if version_numbers(torch)[:2] != version_numbers(versions.torch)[:2]:
        return f"ATen was measured with torch {torch}, this is {versions.torch}"
    if cuda != versions.cuda:
        return f"ATen was measured with CUDA {cuda}, torch uses {versions.cuda}"
    return None
