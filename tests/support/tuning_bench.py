"""Benches for tests of tuning: the CPU with a real clock, and one whose times a test dictates.

Kernels are run for real in both, from the product's bundles by its loader, so that correctness is
checked as on a GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

import cpu_kernels
import cpu_provider
import recording_kernels
from nvgemm_aot.rankings.agreement import ATEN
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.tuning import contenders, watchdog
from nvgemm_aot.tuning.contenders import Run
from nvgemm_aot.tuning.measuring.gpu import Bench, GpuState
from nvgemm_aot.tuning.measuring.race import Sample
from nvgemm_aot.tuning.tune_bundles import Tuned, TuningOptions, tune
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import APART, BACK_TO_BACK, Ranking
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import CPU
from nvgemm_runtime.matching.device import DeviceFacts, device_facts, torch_versions

IDLE = GpuState(utilization_percent=0, slowdowns=())

PROBLEMS = tuple(cpu_provider.problem(sizes=(m, 32, 64)) for m in (8, 16, 32))

SLOW_FIRST = {"": [500.0], "Cpu_16x16": [300.0], "Cpu_8x32": [200.0], "aten": [250.0]}
"""Times under which the estimate's order is wrong, and one kernel is faster than ATen."""


class CpuTimer:
    """Times calls on the CPU by its clock."""

    def prepare(self, calls: Sequence[Callable[[], object]], *, launches: str = APART) -> Sample:
        def sample() -> float:
            begin = time.perf_counter_ns()
            for call in calls:
                call()
            return (time.perf_counter_ns() - begin) / len(calls)

        return sample

    def check(self) -> None:
        pass


@dataclass
class DictatedTimer:
    """Tells what a test wants: each contender's samples, in turn and then over again.

    Attributes:
        times: By operator or ``aten``, nanoseconds; those of "" for all others. None at all, and
            sampling it breaks the device.
        prepared: Names of those that were prepared, in order.
        sampled: Names of those that were sampled, in order.
        times_back_to_back: As ``times``, of launches back to back; None for the same times.
        sampled_back_to_back: As ``sampled``.
        broken_by: Name of a contender that leaves the device unusable, if any.
        unpreparable: Name of a contender that cannot be got ready, if any.
        interrupt_at: The how-manieth preparation is interrupted by Ctrl-C, from 0.
        times_at: By rows of A and name, nanoseconds; used in place of ``times`` where it is given.
    """

    times: Mapping[str, Sequence[float]]
    prepared: list[str] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)
    times_back_to_back: Mapping[str, Sequence[float]] | None = None
    sampled_back_to_back: list[str] = field(default_factory=list)
    broken_by: str | None = None
    interrupt_at: int | None = None
    unpreparable: str | None = None
    times_at: Callable[[int, str], float] | None = None
    last_run: str = ""
    last_rows: int = 0

    def prepare(self, calls: Sequence[Callable[[], object]], *, launches: str = APART) -> Sample:
        if launches == BACK_TO_BACK:
            return self._prepare_back_to_back(calls)
        if self.interrupt_at == len(self.prepared):
            raise KeyboardInterrupt
        calls[0]()
        name = self.last_run
        if name == self.unpreparable:
            raise RuntimeError("a launch may not be captured")
        self.prepared.append(name)
        source = self._samples(name)

        def sample() -> float:
            self.sampled.append(name)
            return next(source)

        return sample

    def _prepare_back_to_back(self, calls: Sequence[Callable[[], object]]) -> Sample:
        calls[0]()
        name = self.last_run
        times = self.times_back_to_back
        source = self._samples(name) if times is None else iter(itertools.cycle(times[name]))

        def sample() -> float:
            self.sampled_back_to_back.append(name)
            return next(source)

        return sample

    def _samples(self, name: str) -> Iterator[float]:
        if self.times_at is not None:
            yield from itertools.repeat(self.times_at(self.last_rows, name))
        while times := self.times.get(name, self.times[""]):
            yield from times
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def check(self) -> None:
        if self.last_run and self.last_run == self.broken_by:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def watch_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Learn from now on which contender runs."""

        def noted(name: str, run: Run) -> Run:
            def noting(*operands: Any) -> Any:
                self.last_run, self.last_rows = name, operands[0].shape[-2]
                return run(*operands)

            return noting

        kernel_run, aten_run = contenders.kernel_run, contenders.aten_run

        def kernel_run_noted(bundle: Any, kernel: Any) -> Run:
            return noted(kernel.operator, kernel_run(bundle, kernel))

        def aten_run_noted(signature: Any) -> Run | None:
            run = aten_run(signature)
            return None if run is None else noted(ATEN, run)

        monkeypatch.setattr(contenders, "kernel_run", kernel_run_noted)
        monkeypatch.setattr(contenders, "aten_run", aten_run_noted)


@dataclass
class DictatedWatch:
    """A GPU in the states that a test wants, one after the other; the last one stays."""

    states: list[GpuState] = field(default_factory=lambda: [IDLE])
    driver: str = "580.95.05"

    def look(self) -> GpuState:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


@dataclass
class Sleeper:
    """Does not sleep, and knows for how long it did not."""

    naps: list[float] = field(default_factory=list)

    def __call__(self, seconds: float) -> None:
        self.naps.append(seconds)


def bench(
    timer: Any = None,
    watch: DictatedWatch | None = None,
    sleep: Callable[[float], None] | None = None,
    *,
    today: str = "2026-11-21",
    facts: DeviceFacts | None = None,
) -> Bench:
    """The CPU of this machine as a device to measure on. Its clock counts naps as slept."""
    sleep = sleep or Sleeper()
    naps = sleep.naps if isinstance(sleep, Sleeper) else []
    return Bench(
        facts=facts or device_facts(CPU, 0),
        device=CPU,
        versions=torch_versions(),
        timer=timer or CpuTimer(),
        watch=watch or DictatedWatch(),
        buffer_bytes=10_000,
        sleep=sleep,
        today=lambda: today,
        now_s=lambda: time.time() + sum(naps),
    )


class Behaving(recording_kernels.Recording):
    """Kernels of which some do not behave."""

    behaviours: ClassVar[Mapping[str, str]]
    """By operator, C that is run first."""

    def compile(self, candidate: Any, target: Any) -> bytes:
        self.behaviour = self.behaviours.get(candidate.operator, "")
        return super().compile(candidate, target)


class Lazy(Behaving):
    """One computes nothing."""

    name = "tuning_bench:Lazy"
    behaviours: ClassVar = {"Cpu_8x32": cpu_kernels.NOTHING}


class LazyAtLargeSizes(Behaving):
    """One computes nothing where m is more than 8."""

    name = "tuning_bench:LazyAtLargeSizes"
    behaviours: ClassVar = {"Cpu_8x32": "if (out->shape[RANK - 2] > 8) return 0;"}


class LazyWithTransposes(recording_kernels.Recording):
    """None computes anything where B is column-major."""

    name = "tuning_bench:LazyWithTransposes"

    def compile(self, candidate: Any, target: Any) -> bytes:
        is_row_major = candidate.signature.layout.b_row_major
        # Unlike `NOTHING`, it is no code that is the same for any signature.
        self.behaviour = "" if is_row_major else "if (out->shape[RANK - 1] > 0) return 0;"
        return super().compile(candidate, target)


class Failing(Behaving):
    """One raises."""

    name = "tuning_bench:Failing"
    behaviours: ClassVar = {"Cpu_8x32": cpu_kernels.RAISES}


class WrongScales(Behaving):
    """One takes every scale for 1, one looks for scales row by row. Another is right."""

    name = "tuning_bench:WrongScales"
    behaviours: ClassVar = {
        "Cpu_16x16": """
          static char ones[1 << 16];
          for (int i = 0; i < 1 << 16; ++i) ones[i] = LOAD_SCALE == load_fp8_e8m0 ? 127 : 56;
          sa = sb = ones;
        """,
        "Cpu_8x32": "\n#define swizzled(row, block, blocks) ((row) * (blocks) + (block))\n",
    }


class WrongValues(Behaving):
    """One mixes up the two values of fp4 in a byte of A, one stops a block early. One is right."""

    name = "tuning_bench:WrongValues"
    behaviours: ClassVar = {
        "Cpu_16x16": """
#define load_fp4_e2m1(p, at) load_fp4_e2m1(p, (p) == av.data ? (at) ^ 1 : (at))
        """,
        "Cpu_8x32": "depth -= BLOCK;",
    }


class AllLazy(Behaving):
    """None computes anything."""

    name = "tuning_bench:AllLazy"
    behaviours: ClassVar = dict.fromkeys(cpu_provider.TILES, cpu_kernels.NOTHING)


class MostlyLazy(Behaving):
    """All but one compute nothing."""

    name = "tuning_bench:MostlyLazy"
    behaviours: ClassVar = dict.fromkeys(("Cpu_8x32", "Cpu_16x16"), cpu_kernels.NOTHING)


def build(
    problems: Iterable[Problem],
    directory: Path,
    cache: Cache,
    provider: recording_kernels.Recording | None = None,
    *,
    name: str = "cpu",
) -> Path:
    """A bundle of three kernels a problem: those of `cpu_provider.TILES`."""
    return recording_kernels.build_recording(
        problems,
        directory,
        cache,
        provider,
        name=name,
        candidates=len(cpu_provider.TILES),
    ).path


def run(path: Path | Sequence[Path], output: Path, on: Bench, **options: Any) -> Tuned:
    """Tune bundles; options are those of `TuningOptions`, ``clock`` and ``again``."""
    how = {name: options.pop(name) for name in ("clock", "again") if name in options}
    paths = [path] if isinstance(path, Path) else list(path)
    return tune(paths, output, on, TuningOptions(**options), **how)


def measure_here(monkeypatch: pytest.MonkeyPatch, on: Bench) -> None:
    """Have the command measure in this process; `test_watchdog` is about the process it starts."""

    def tune_here(paths: Any, output: Path, options: Any, **how: Any) -> Tuned:
        return tune(paths, output, on, options, progress=how["progress"])

    monkeypatch.setattr(watchdog, "tune_watched", tune_here)


def header_of(path: Path) -> Header:
    with Bundle(path) as bundle:
        bundle.check_body()
        for kernel in bundle.header.kernels:
            bundle.payload(kernel)
        return bundle.header


def operators(header: Header, ranking: Ranking) -> list[str]:
    return [header.kernels[place.kernel].operator for place in ranking.kernels]


def doubts(path: Path) -> dict[int, tuple[str, ...]]:
    """By m, why a problem's ranking is uncertain."""
    found = {}
    for ranking in header_of(path).rankings:
        assert ranking.measured is not None
        found[ranking.problem.m] = ranking.measured.doubts
    return found
