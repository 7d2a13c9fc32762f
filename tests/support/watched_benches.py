"""Benches that `nvgemm_aot.tuning.watchdog` creates by name in tests."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvgemm_aot.rankings.agreement import ATEN
from nvgemm_aot.tuning import contenders
from nvgemm_aot.tuning.measuring.gpu import Bench
from nvgemm_aot.tuning.measuring.race import Sample
from nvgemm_runtime.bundle.ranking_entries import APART
from nvgemm_runtime.errors import TuningError
from tuning_bench import SLOW_FIRST, DictatedTimer, bench

HANGING = "Cpu_8x32"
"""The operator that would win by `SLOW_FIRST`."""


def sound() -> Bench:
    """All contenders return; the environment says which GPU it is."""
    made = _bench(DictatedTimer(SLOW_FIRST))
    return replace(made, uuid=os.environ.get("WATCHED_BENCH_UUID"))


def gpu_of_its_name() -> Bench:
    """All contenders return; the GPU is the visible one, which the environment may let fail.

    ``WATCHED_BENCH_TIMES`` gives GPUs times of their own, as JSON by GPU and operator. On the GPU
    of ``WATCHED_BENCH_DIES_ON``, the first process dies when it times, and leaves the file that
    ``WATCHED_BENCH_DEATH`` names.
    """
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    if os.environ.get("WATCHED_BENCH_FAILS_ON") == gpu:
        raise TuningError(f"GPU {gpu} is broken")
    times = json.loads(os.environ.get("WATCHED_BENCH_TIMES", "{}")).get(gpu, {})
    timer = DictatedTimer({**SLOW_FIRST, **times})
    if "WATCHED_BENCH_PAUSE_S" in os.environ:
        timer = _PausingTimer(timer.times)
    if os.environ.get("WATCHED_BENCH_DIES_ON") == gpu:
        timer = _HangingTimer(timer.times, hanging=HANGING, by=_die_once)
    made = _bench(timer)
    if os.environ.get("WATCHED_BENCH_DRIVERS"):
        made = replace(made, watch=replace(made.watch, driver=f"580.{gpu}"))
    if os.environ.get("WATCHED_BENCH_PRODUCTS"):
        made = replace(made, facts=replace(made.facts, name=f"NVIDIA H{gpu}00"))
    return replace(made, uuid=os.environ.get("WATCHED_BENCH_UUID", f"GPU-{gpu}") or None)


def hangs_when_timed() -> Bench:
    """A kernel whose results are right hangs in the second round."""
    return _bench(_HangingTimer(SLOW_FIRST, hanging=HANGING))


def hangs_back_to_back() -> Bench:
    """A kernel hangs where launches follow each other without a kernel between."""
    timer = _HangingTimer(SLOW_FIRST, hanging=HANGING)
    timer.rounds_before = 10**6
    timer.hangs_back_to_back = True
    return _bench(timer)


def aten_hangs() -> Bench:
    """ATen hangs in its first run, for m = 8 alone."""
    made = _bench(DictatedTimer(SLOW_FIRST))
    aten_run = contenders.aten_run

    def hanging(signature: Any) -> Any:
        run = aten_run(signature)

        def running(a: Any, b: Any, out: Any) -> Any:
            if a.shape[0] == 8:
                _hang()
            return run and run(a, b, out)

        return running

    contenders.aten_run = hanging
    return made


def everything_hangs() -> Bench:
    """Every kernel and ATen hang when they are timed."""
    return _bench(_HangingTimer(SLOW_FIRST, hanging=None))


def dies_when_timed() -> Bench:
    """The process ends by a signal whenever a kernel whose results are right is timed."""
    return _bench(_HangingTimer(SLOW_FIRST, hanging=HANGING, by=_die))


def always_dies() -> Bench:
    """The process ends by a signal whenever anything is timed."""
    return _bench(_HangingTimer(SLOW_FIRST, hanging=None, by=_die))


def silent() -> Bench:
    """No bench: the driver does not answer."""
    _hang()
    raise AssertionError


def breaks_the_device() -> Bench:
    """A kernel leaves the device unusable."""
    return _bench(DictatedTimer({**SLOW_FIRST, HANGING: []}))


def raises() -> Bench:
    """No bench: a mistake of the program."""
    raise ZeroDivisionError("made by a test")


def _bench(timer: DictatedTimer) -> Bench:
    timer.watch_runs(pytest.MonkeyPatch())
    return bench(timer)


def _hang() -> None:
    while True:
        time.sleep(3600)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _PausingTimer(DictatedTimer):
    """Takes a while for each problem, so that a test can act meanwhile."""

    def prepare(self, calls: Sequence[Callable[[], object]], *, launches: str = APART) -> Sample:
        if not self.prepared or self.last_run == ATEN:
            time.sleep(float(os.environ["WATCHED_BENCH_PAUSE_S"]))
        return super().prepare(calls, launches=launches)


def _die_once() -> None:
    death = Path(os.environ["WATCHED_BENCH_DEATH"])
    if not death.exists():
        death.touch()
        _die()


class _HangingTimer(DictatedTimer):
    rounds_before = 1
    hangs_back_to_back = False

    def __init__(self, times: Any, *, hanging: str | None, by: Callable[[], None] = _hang) -> None:
        super().__init__(times)
        self.hanging = hanging
        self.hang = by

    def prepare(self, calls: Sequence[Callable[[], object]], *, launches: str = APART) -> Sample:
        sample = super().prepare(calls, launches=launches)
        name, count = self.last_run, 0

        def sampling() -> float:
            nonlocal count
            count += 1
            is_beside = self.hangs_back_to_back and launches != APART
            if self.hanging in (None, name) and (count > self.rounds_before or is_beside):
                self.hang()
            return sample()

        return sampling
