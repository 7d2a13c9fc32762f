"""What a measured ranking is good for: which kernels to offer, and whether to time them again.

A pure function of a match, the device, and the versions at hand. Only a measurement on this very
product of GPU counts, and only of the declared problem itself: an estimate, another GPU's times or
those of other sizes change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from .facts import DeviceFacts, TorchVersions
from .format import Conditions, Measured
from .match import Match
from .places import Served
from .refusals import version_numbers


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to offer for a GEMM.

    Attributes:
        kernels: The kernels to offer, best first; empty where ATen was measured to be faster.
        is_final: Whether nothing needs timing: the first kernel wins, or ATen where there is none.
        why: In words, what a measurement decided, or why it decided nothing; empty where the
            ranking is no measurement.
    """

    kernels: tuple[Served, ...]
    is_final: bool
    why: str


def decide(
    match: Match,
    facts: DeviceFacts,
    versions: TorchVersions,
    *,
    limit: int,
    trusts: bool,
    needs_kernel: bool,
) -> Decision:
    """Say what to offer.

    Args:
        match: The kernels that serve the GEMM.
        facts: The device that it is computed on.
        versions: Of the torch at hand.
        limit: Most kernels to offer.
        trusts: Whether what was measured need not be measured again.
        needs_kernel: Whether a kernel must be offered even where ATen was faster.
    """
    measured, conditions = match.measured, match.source.conditions
    if measured is None or conditions is None:
        return _undecided(match, limit, "")
    obstacle = _why_not_here(match, measured, conditions, facts, versions)
    if obstacle is not None:
        return _undecided(match, limit, obstacle)
    winner = match.kernels[0]
    assert winner.time_ns is not None  # of a measured ranking
    told = f"measured on {match.source.gpu}, {conditions.date}: {winner.time_ns / 1e3:.1f} us"
    obstacle = _why_aten_is_open(measured, conditions, versions)
    if measured.aten is None or obstacle is not None:
        return Decision(kernels=(winner,), is_final=False, why=f"{told}; {obstacle}")
    told += f", ATen {measured.aten.time_ns / 1e3:.1f} us"
    fastest = min(winner.time_ns, measured.aten.time_ns)
    beaten = measured.triton is not None and measured.triton.time_ns < fastest
    if beaten:
        assert measured.triton is not None
        told += f", Triton {measured.triton.time_ns / 1e3:.1f} us"
    is_final = trusts and not beaten
    if winner.time_ns < measured.aten.time_ns:
        return Decision(kernels=(winner,), is_final=is_final, why=told)
    if needs_kernel:
        return Decision(kernels=(winner,), is_final=False, why=told)
    return Decision(kernels=(), is_final=is_final, why=told)


def _undecided(match: Match, limit: int, why: str) -> Decision:
    return Decision(kernels=match.kernels[:limit], is_final=False, why=why)


def _why_not_here(
    match: Match,
    measured: Measured,
    conditions: Conditions,
    facts: DeviceFacts,
    versions: TorchVersions,
) -> str | None:
    """Why the order of our own kernels is open on this device, or None."""
    if match.source.gpu != facts.name:
        return f"measured on {match.source.gpu}, this is {facts.name}"
    if conditions.cuda.split(".")[0] != versions.cuda.split(".")[0]:
        return f"measured with CUDA {conditions.cuda}, torch uses {versions.cuda}"
    if measured.doubts:
        return f"measured, and uncertain: {'; '.join(measured.doubts)}"
    return None


def _why_aten_is_open(
    measured: Measured, conditions: Conditions, versions: TorchVersions
) -> str | None:
    """Why ATen must be timed again, or None: its kernels come with torch and CUDA's cuBLAS."""
    if measured.aten is None:
        return "ATen was not measured"
    then, now = version_numbers(conditions.torch), version_numbers(versions.torch)
    if then[:2] != now[:2]:
        return f"ATen was measured with torch {conditions.torch}, this is {versions.torch}"
    if conditions.cuda != versions.cuda:
        return f"ATen was measured with CUDA {conditions.cuda}, torch uses {versions.cuda}"
    return None
