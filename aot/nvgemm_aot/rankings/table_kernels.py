"""Kernels in dispatch tables: those that programs call at each m, as measured.

The runtime's own code makes the tables here as on a GPU, for each torch version that measured a
bundle's rankings.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Mapping

from nvgemm_runtime.bundle.ranking_entries import RankingSource
from nvgemm_runtime.gemm.operands import Request
from nvgemm_runtime.matching.device import DeviceFacts, TorchVersions, cuda_major
from nvgemm_runtime.matching.dispatch import decide_dispatch
from nvgemm_runtime.matching.evidence import Evidence
from nvgemm_runtime.matching.index import all_but_m
from nvgemm_runtime.matching.matches import BundleView
from nvgemm_runtime.matching.thresholds import FEW_ROWS
from nvgemm_runtime.matching.trust import KNOWN_ALIGNMENT_BYTES, Terms
from nvgemm_runtime.matching.usable_rankings import UsableRanking, launchable

from ..bundle.content import BundleContent, ProblemRanking
from ..bundle.writer import header_without_offsets
from ..targets.profile import load_profile, profile_names

_Row = Mapping[int, UsableRanking]
"""One product's rankings, by m, for problems that are equal in all else."""


class DispatchTables:
    """Dispatch tables for a bundle's content, with all its kernels available."""

    def __init__(self, content: BundleContent) -> None:
        self._platform = content.target.platform
        header = header_without_offsets(content)
        view = BundleView(name="the bundle", header=header)
        serving = [None] * len(header.kernels)
        rows: dict[Hashable, dict[int, UsableRanking]] = {}
        for ranking in header.rankings:
            kernels = launchable(view, ranking, serving)
            usable = UsableRanking(view, ranking, kernels, kernels)
            key = all_but_m(ranking.problem), usable.source.gpu
            rows.setdefault(key, {})[ranking.problem.m] = usable
        self._rows = rows

    def needed(self, without: ProblemRanking | None = None) -> frozenset[str]:
        """Returns ids for the kernels without which some table would change.

        Args:
            without: A ranking to ignore.
        """
        if without is None:
            return frozenset().union(*self._needed_by_row.values())
        key = all_but_m(without.problem), without.gpu
        others = [needed for row, needed in self._needed_by_row.items() if row != key]
        remaining = {m: usable for m, usable in self._rows[key].items() if m != without.problem.m}
        return frozenset().union(*others, self._needed(remaining))

    @functools.cached_property
    def _needed_by_row(self) -> dict[Hashable, frozenset[str]]:
        return {key: self._needed(row) for key, row in self._rows.items()}

    def _needed(self, row: _Row) -> frozenset[str]:
        """Returns ids for the kernels that any table in a row needs.

        Programs have different tables if they ask for other evidence, allow nondeterministic
        kernels, use another torch, or align their operands less.
        """
        sources = {usable.source for usable in row.values() if usable.source.conditions is not None}
        alignments = {
            max(KNOWN_ALIGNMENT_BYTES, usable_kernel.kernel.alignment_bytes)
            for usable in row.values()
            for usable_kernel in usable.kernels
        }
        rankings = {m: (usable,) for m, usable in row.items()}
        needed: set[str] = set()
        for source, alignment_bytes, evidence, only_deterministic in itertools.product(
            sources, alignments, Evidence, (False, True)
        ):
            assert source.conditions is not None
            device = _device_of(source, self._platform)
            if device.multiprocessors is None and max(row) > FEW_ROWS:
                # A table's choice depends on the kernels' waves, which are unknown here.
                needed.update(
                    usable_kernel.kernel.id
                    for usable in row.values()
                    for usable_kernel in usable.kernels
                )
            decided = decide_dispatch(
                rankings,
                Request(
                    problem=next(iter(row.values())).ranking.problem,
                    alignment_bytes=alignment_bytes,
                ),
                device,
                TorchVersions(torch=source.conditions.torch, cuda=source.conditions.cuda),
                Terms(limit=1),
                evidence=evidence,
                only_deterministic=only_deterministic,
            )
            needed |= decided.needed
        return frozenset(needed)


@functools.cache
def _multiprocessors_by_name() -> Mapping[str, int]:
    """Returns SM counts by driver name, for GPUs that have a profile."""
    profiles = map(load_profile, profile_names())
    return {profile.driver_name: profile.sm_count.value for profile in profiles}


def _device_of(source: RankingSource, platform: str) -> DeviceFacts:
    """Returns a device that matches the product a ranking was measured on."""
    assert source.conditions is not None
    return DeviceFacts(
        kind="cuda",
        name=source.gpu,
        capability=None,
        multiprocessors=_multiprocessors_by_name().get(source.gpu),
        platform=platform,
        cuda=cuda_major(source.conditions.cuda),
        runtime_library=None,
    )
