"""Where a measurement holds: on which GPU, and with which torch what it says of ATen."""

from __future__ import annotations

from ..bundle.format import Conditions, Measured, Ranking, RankingSource
from .device import NO_CUDA, DeviceFacts, TorchVersions
from .refusals import version_numbers


def why_not_here(measured: Measured, source: RankingSource, facts: DeviceFacts) -> str | None:
    """Why the order of our own kernels is open on a device, or None.

    Args:
        measured: What was measured.
        source: Where; with its conditions.
        facts: The device.
    """
    assert source.conditions is not None
    if source.gpu != facts.name:
        return f"measured on {source.gpu}, this is {facts.name}"
    then = source.conditions.cuda
    if (None if then == NO_CUDA else f"cu{then.split('.')[0]}") != facts.cuda:
        return f"measured with CUDA {then}, torch uses {facts.cuda or 'no CUDA'}"
    if measured.doubts:
        return f"measured, and uncertain: {'; '.join(measured.doubts)}"
    return None


def holds_here(ranking: Ranking, source: RankingSource, facts: DeviceFacts) -> bool:
    """Whether a ranking is a measurement whose order of our own kernels counts on a device."""
    measured = ranking.measured
    if measured is None or source.conditions is None:
        return False
    return why_not_here(measured, source, facts) is None


def why_aten_is_open(
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


def preference(
    ranking: Ranking, source: RankingSource, facts: DeviceFacts, versions: TorchVersions | None
) -> int:
    """How little a ranking says here; of several for one problem the one with the least counts.

    Returns:
        0 for one that was measured on this product of GPU, beside the ATen of this torch; 1 where
        ATen is another; 2 for any other.
    """
    measured, conditions = ranking.measured, source.conditions
    if measured is None or conditions is None or not holds_here(ranking, source, facts):
        return 2
    if versions is None or why_aten_is_open(measured, conditions, versions) is not None:
        return 1
    return 0
