"""Tunes bundles for the CPU by the times that a test dictates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import recording_kernels
from nvgemm_aot.bundle.content import BundleContent, ProblemRanking, read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning.measuring.gpu import Bench, GpuState
from nvgemm_aot.tuning.tune_bundles import Tuned
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import Conditions, Measured, RankingSource
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem
from tuning_bench import (
    PROBLEMS,
    DictatedTimer,
    DictatedWatch,
    bench,
    build,
    doubts,
    header_of,
    operators,
    run,
)


@dataclass
class Tuner:
    """Tunes ``tunable`` into ``path``, unless told otherwise, by times that ``timer`` dictates."""

    tunable: Path
    path: Path
    timer: DictatedTimer
    cache: Cache

    def __call__(
        self,
        given: Path | Sequence[Path] | None = None,
        output: Path | None = None,
        *,
        on: Bench | None = None,
        ticks: Iterable[float] = (),
        **options: Any,
    ) -> Tuned:
        """Tune; the budget's clock says ``ticks``. The timer forgets what it prepared before."""
        self.timer.prepared.clear()
        if ticks:
            options["clock"] = iter(ticks).__next__
        return run(given or self.tunable, output or self.path, on or bench(self.timer), **options)

    def interrupt(self, after: int, **options: Any) -> None:
        """Tune, and press Ctrl-C when so many contenders were prepared."""
        self.timer.interrupt_at = after
        with pytest.raises(KeyboardInterrupt):
            self(**options)
        self.timer.interrupt_at = None

    def at(self, *states: GpuState, **options: Any) -> Bench:
        """A bench whose GPU is in these states, one after the other."""
        return bench(self.timer, DictatedWatch([*states]), **options)

    def beside(self, name: str) -> Path:
        """A path beside the output."""
        return self.path.with_name(name)

    def build(
        self,
        problems: Iterable[Problem] = PROBLEMS,
        provider: recording_kernels.Recording | None = None,
        name: str = "built",
    ) -> Path:
        return build(problems, self.beside(name), self.cache, provider, name=name)

    def change(self, make: Callable[[BundleContent], BundleContent]) -> Path:
        """A bundle beside the output: the tunable one with another content."""
        with Bundle(self.tunable) as bundle:
            content = read_content(bundle)
        write_bundle(self.beside("changed.nvgemm"), make(content))
        return self.beside("changed.nvgemm")

    def rerank(self, make: Callable[[ProblemRanking], ProblemRanking]) -> Path:
        """The same with other rankings."""
        return self.change(lambda c: replace(c, rankings=tuple(map(make, c.rankings))))

    @property
    def header(self) -> Header:
        return header_of(self.path)

    @property
    def kernels(self) -> set[str]:
        return {kernel.operator for kernel in self.header.kernels}

    @property
    def orders(self) -> list[list[str]]:
        """By ranking, its operators."""
        header = self.header
        return [operators(header, ranking) for ranking in header.rankings]

    @property
    def doubts(self) -> dict[int, tuple[str, ...]]:
        return doubts(self.path)

    @property
    def all_doubts(self) -> set[tuple[str, ...]]:
        return set(self.doubts.values())


def measured(
    ranking: ProblemRanking, times: Mapping[str, tuple[int, int]], *doubts: str
) -> ProblemRanking:
    """A ranking with such times and spreads by kernel."""
    conditions = Conditions(driver="1", torch="2", cuda="13.0", date="2026-11-21")
    spreads_ns = tuple(spread for _, spread in times.values())
    return replace(
        ranking,
        source=RankingSource(kind="measurement", by="x", gpu="cpu", conditions=conditions),
        kernels=tuple((id_, time) for id_, (time, _) in times.items()),
        measured=Measured(spreads_ns=spreads_ns, aten=None, triton=None, doubts=doubts),
    )


def by_operator(content: BundleContent) -> dict[str, str]:
    """Ids of a bundle's kernels by operator."""
    return {kernel.operator: kernel.id for kernel in content.kernels}
