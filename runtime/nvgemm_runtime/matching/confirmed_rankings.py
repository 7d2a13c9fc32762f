"""Rankings of bundled kernels by times that ``nvgemm-aot confirm`` measured with this torch.

A bundle's own measurement holds ATen's time for one torch. Confirmations hold it for another, on
the same GPU product or on one that nobody measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..bundle.confirmations import Confirmations, ConfirmedTimes
from ..bundle.ranking_entries import MEASUREMENT, Measured, Ranked, RankingSource
from ..gemm.problem import Problem
from .device import DeviceFacts, TorchVersions
from .matches import BundleView
from .refusals import kernel_refusals, needs_compact
from .trust import why_another_release
from .usable_rankings import UsableRanking, launchable


@dataclass(frozen=True, kw_only=True)
class ConfirmedMeasured(Measured):
    """Measurement by ``nvgemm-aot confirm``: a few kernels beside ATen, timed twice.

    Attributes:
        is_vouched: True if a measurement on this GPU product ranked the same kernels, so that the
            confirmation adds only ATen's time.
        has_first: True if the kernel that the bundle ranks first is among them.
    """

    is_vouched: bool
    has_first: bool

    @property
    def decides_alone(self) -> bool:
        """True if kernels that were not timed need not compete under max-autotune."""
        return self.is_confirmed and self.has_first

    @property
    def is_confirmed(self) -> bool:
        """True if the bundle's measurement on this GPU product vouches for the kernels."""
        return self.is_vouched and not self.doubts

    @property
    def is_repeated(self) -> bool:
        """True without doubts: each confirmation is measured twice."""
        return not self.doubts

    @property
    def standing(self) -> str:
        """Reliability of the times, in words."""
        if self.doubts:
            return "doubtful"
        return "confirmed with this torch" if self.is_vouched else "repeated with this torch"


def why_elsewhere(
    confirmations: Confirmations, gpus: Iterable[str], versions: TorchVersions
) -> str | None:
    """Returns why confirmations do not count on these GPU products with this torch, or None."""
    if confirmations.gpu not in set(gpus):
        return f"measured on {confirmations.gpu}"
    conditions = confirmations.conditions
    return why_another_release(conditions.torch, conditions.cuda, versions)


def confirmed_times(
    all_confirmations: Iterable[Confirmations],
    facts: DeviceFacts,
    versions: TorchVersions,
    kernel_ids: Collection[str],
) -> dict[str, tuple[ConfirmedTimes, RankingSource]]:
    """Returns the times that count on a device with this torch, by problem key.

    Args:
        all_confirmations: Preferred ones first: a problem uses its first times without doubts, or
            its first ones if all have some.
        facts: Device.
        versions: Versions of torch.
        kernel_ids: Ids of the kernels that bundles hold; times of others alone are ignored.
    """
    chosen: dict[str, tuple[ConfirmedTimes, RankingSource]] = {}
    for confirmations in all_confirmations:
        if why_elsewhere(confirmations, [facts.name], versions) is not None:
            continue
        source = RankingSource(
            kind=MEASUREMENT,
            by=confirmations.by,
            gpu=confirmations.gpu,
            conditions=confirmations.conditions,
        )
        for key, times in confirmations.problems.items():
            if not any(id_ in kernel_ids for id_ in times.kernels):
                continue
            if key not in chosen or (chosen[key][0].doubts and not times.doubts):
                chosen[key] = times, source
    return chosen


def confirmed_rankings(
    bundles: Iterable[BundleView],
    facts: DeviceFacts,
    times_by_key: Mapping[str, tuple[ConfirmedTimes, RankingSource]],
) -> dict[Problem, UsableRanking]:
    """Returns confirmed rankings for the problems that bundles rank, with the bundles' kernels.

    Kernels that no bundle holds any more are left out: each kernel's time holds without the others.
    If several bundles hold a problem's kernels, the one with the fastest counts.

    Args:
        bundles: Bundles that can serve the device.
        facts: Device.
        times_by_key: Times by problem key; see `confirmed_times`.
    """
    confirmed: dict[Problem, UsableRanking] = {}
    for bundle in bundles:
        for usable in _confirmed_in(bundle, facts, times_by_key):
            current = confirmed.get(usable.ranking.problem)
            if current is None or _first_ns(usable) < _first_ns(current):
                confirmed[usable.ranking.problem] = usable
    return confirmed


def _first_ns(usable: UsableRanking) -> int:
    time_ns = usable.kernels[0].time_ns
    assert time_ns is not None  # confirmed rankings have times
    return time_ns


def _confirmed_in(
    bundle: BundleView,
    facts: DeviceFacts,
    times_by_key: Mapping[str, tuple[ConfirmedTimes, RankingSource]],
) -> Iterator[UsableRanking]:
    """Yields the confirmed rankings of one bundle's launchable kernels."""
    reasons = kernel_refusals(bundle.header, facts)
    kernels = bundle.header.kernels
    indices = {kernel.id: index for index, kernel in enumerate(kernels) if reasons[index] is None}
    for own in bundle.header.rankings_on(facts.name):
        found = times_by_key.get(own.problem.key)
        if found is None:
            continue
        times, source = found
        timed = {
            indices[id_]: timing
            for id_, timing in times.kernels.items()
            # A file may name any kernel, and a wrong signature would compute nonsense.
            if id_ in indices and kernels[indices[id_]].signature == own.problem.signature
        }
        if not timed:
            continue
        own_usable = UsableRanking(bundle, own, launchable(bundle, own, reasons), ())
        ranking = replace(
            own,
            kernels=tuple(
                Ranked(kernel=index, time_ns=timing.time_ns) for index, timing in timed.items()
            ),
            measured=ConfirmedMeasured(
                spreads_ns=tuple(timing.spread_ns for timing in timed.values()),
                aten=times.aten,
                triton=None,
                doubts=times.doubts,
                is_vouched=own_usable.holds_on(facts),
                has_first=own.kernels[0].kernel in timed,
            ),
        )
        served = launchable(bundle, ranking, reasons)
        for_gaps = tuple(one for one in served if not needs_compact(one.kernel.calling_convention))
        yield UsableRanking(bundle, ranking, served, for_gaps, source=source)
