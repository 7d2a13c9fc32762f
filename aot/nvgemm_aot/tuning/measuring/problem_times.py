"""Measures a problem: checks each contender's result, then races the correct ones."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.bundle.ranking_entries import BACK_TO_BACK, Timing
from nvgemm_runtime.errors import StorageError, ToolchainError, one_line
from nvgemm_runtime.gemm.problem import Problem

from ...rankings.agreement import ATEN, TRITON
from ...rankings.intervals import contending
from ..contenders import Run
from ..correctness.exact_operands import OperandCheck, make_checks
from ..correctness.judgement import agrees_roughly
from ..correctness.random_operands import make_sets
from ..outcome import UNSEEN_SLOWDOWNS, UNSEEN_WORK, TuningOutcome
from .gpu import Bench
from .race import LEAST_SAMPLES, MOST_ROUNDS, RaceResult, Sample, median_interval, race

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Most measurements per problem if each is disturbed."""

PAUSE_S = 5.0
"""Pause between attempts, in which other work may end and the GPU may cool down."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Thoroughness of a measurement.

    Attributes:
        attempts: Most races if each is disturbed.
        most_rounds: Limit for a race's rounds.
        unchecked: Contenders whose results are known to be right, by name.
        also_back_to_back: True to time launches back to back too.
        looks_once: True to look for slowdowns once a race, not after each round.
    """

    attempts: int = ATTEMPTS
    most_rounds: int = MOST_ROUNDS
    unchecked: Collection[str] = ()
    also_back_to_back: bool = True
    looks_once: bool = False


BUSY_PERCENT = 5
"""Utilization from which an otherwise idle GPU counts as used by other processes."""

IDLE_S = 1.5
"""Idle time before utilization is read, as the driver averages it over up to a second."""

UNDECIDED = "the fastest were not told apart, and their times vary"


class BrokenDeviceError(Exception):
    """Names a contender that left the device unusable for this process, and the error."""

    def __init__(self, contender: str, reason: str) -> None:
        super().__init__(f"{contender}: {reason}")
        self.contender = contender
        self.reason = reason


def wait_until_idle(bench: Bench) -> str | None:
    """Waits for other work on the GPU to end; returns the doubt to note if it does not end."""
    for _ in range(ATTEMPTS):
        busy = look_for_others(bench)
        if busy is None or busy == UNSEEN_WORK:
            if busy is not None:
                _log.warning("%s; measurements are uncertain", busy)
            return busy
        _log.warning("%s; waiting until it ends", busy)
        bench.sleep(PAUSE_S)
    return look_for_others(bench)


def look_for_others(bench: Bench) -> str | None:
    """Stays idle for a moment; returns the doubt to note if the GPU is busy nevertheless."""
    bench.sleep(IDLE_S)
    percent = bench.watch.look().utilization_percent
    if percent is None:
        return UNSEEN_WORK
    if percent < BUSY_PERCENT:
        return None
    return f"the GPU was {percent} % busy with other work"


def measure(
    problem: Problem,
    contenders: Mapping[str, Run],
    bench: Bench,
    trying: Callable[[str], AbstractContextManager[None]],
    running: Callable[[str], AbstractContextManager[None]],
    effort: Effort,
) -> TuningOutcome:
    """Times the contenders that compute a problem correctly.

    Args:
        problem: Problem to compute.
        contenders: Kernels by id, and `contenders.ATEN` and `contenders.TRITON`.
        bench: GPU and timer.
        trying: Context entered with a contender's name during its first run.
        running: Context entered with a contender's name during every run.
        effort: Thoroughness.

    Returns:
        Times, without contenders that fail or compute a wrong result.

    Raises:
        BrokenDeviceError: If a contender leaves the device unusable.
        torch.OutOfMemoryError: If operands do not fit.
        StorageError: If a bundle cannot be read.
        ToolchainError: If the native launcher is missing.
    """
    import torch

    seed = int(sha256_hex(problem.key.encode())[:8], 16)
    checks = []
    if not contenders.keys() <= set(effort.unchecked):
        checks = make_checks(problem, bench.device, seed=seed)
    sets = make_sets(problem, bench.device, seed=seed, total_bytes=bench.buffer_bytes)
    bench.timer.check()  # an earlier failure must not be blamed on a contender
    ready: dict[str, Sample] = {}
    calls: dict[str, list[Callable[[], object]]] = {}
    faults: dict[str, str] = {}
    for name, run in contenders.items():
        try:
            with trying(name), running(name):
                fault = None
                if name not in effort.unchecked:
                    fault = _find_contender_fault(name, run, checks)
                if fault is None:
                    calls[name] = [functools.partial(run, *operands) for operands in sets]
                    ready[name] = _blaming_sample(name, bench.timer.prepare(calls[name]), running)
        except (torch.OutOfMemoryError, StorageError, ToolchainError):
            raise  # not the contender's fault
        except Exception as error:  # from a kernel, torch's operator or its compiler
            fault = _in_one_line(error)
            try:
                with running(name):
                    bench.timer.check()
            except Exception as broken:
                raise BrokenDeviceError(name, _in_one_line(broken)) from error
        if fault is not None:
            _log.warning("%s: %s is dropped: %s", problem.key, name, fault)
            faults[name] = fault
    checks.clear()  # frees memory
    doubts: tuple[str, ...] = ()
    result = RaceResult(intervals={}, is_decided=True)
    if ready:
        result, doubts = _race_undisturbed(ready, bench, random.Random(seed), effort)
    back_to_back: dict[str, Timing] = {}
    try:
        if effort.also_back_to_back:
            back_to_back = _time_back_to_back(result, calls, bench, random.Random(seed), running)
    except torch.OutOfMemoryError as error:
        # The ranking itself has been measured.
        _log.warning("%s: not timed back to back: %s", problem.key, one_line(str(error)))
    timings = {name: interval.timing for name, interval in result.intervals.items()}
    aten, triton = timings.pop(ATEN, None), timings.pop(TRITON, None)
    ranked = sorted(timings, key=lambda id_: (timings[id_].time_ns, id_))
    return TuningOutcome(
        kernels={id_: timings[id_] for id_ in ranked},
        aten=aten,
        triton=triton,
        wrong={name: text for name, text in faults.items() if name not in (ATEN, TRITON)},
        doubts=doubts,
        conditions=bench.conditions,
        back_to_back=back_to_back,
    )


def _time_back_to_back(
    result: RaceResult,
    calls: Mapping[str, Sequence[Callable[[], object]]],
    bench: Bench,
    source: random.Random,
    running: Callable[[str], AbstractContextManager[None]],
) -> dict[str, Timing]:
    """Times launches back to back for torch's contenders and those that may be the fastest."""
    if not result.intervals:
        return {}
    kernels = [name for name in result.intervals if name not in (ATEN, TRITON)]
    fastest_kernel = min(kernels, key=lambda name: result.intervals[name].median, default=None)
    timed = {*contending(result.intervals), ATEN, TRITON, fastest_kernel}
    samples: dict[str, Sample] = {}
    for name in (name for name in result.intervals if name in timed):
        with _blame(name), running(name):
            sample = bench.timer.prepare(calls[name], launches=BACK_TO_BACK)
        samples[name] = _blaming_sample(name, sample, running)
    times: dict[str, list[float]] = {name: [] for name in samples}
    order = list(samples)
    for _ in range(LEAST_SAMPLES):
        source.shuffle(order)
        for name in order:
            times[name].append(samples[name]())
    return {name: median_interval(times[name]).timing for name in samples}


def _find_contender_fault(name: str, run: Run, checks: Sequence[OperandCheck]) -> str | None:
    if name in (ATEN, TRITON):
        check = checks[-1]  # both may round partial sums, which matters little with few products
        check.prepare()
        result = run(*check.operands)
        return None if agrees_roughly(result, check.expected) else "its result is wrong"
    for check in checks:
        check.prepare()
        fault = check.fault(run(*check.operands))
        if fault is not None:
            return f"{fault} ({check.name})"
    return None


def _blaming_sample(
    name: str, sample: Sample, running: Callable[[str], AbstractContextManager[None]]
) -> Sample:
    """Blames a failing sample on its contender: graph launches fail only during replay."""

    def guarded() -> float:
        with _blame(name), running(name):
            return sample()

    return guarded


@contextlib.contextmanager
def _blame(name: str) -> Iterator[None]:
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, StorageError, ToolchainError):
        raise  # not the contender's fault
    except Exception as error:
        raise BrokenDeviceError(name, _in_one_line(error)) from error


def _in_one_line(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def _race_undisturbed(
    ready: Mapping[str, Sample], bench: Bench, source: random.Random, effort: Effort
) -> tuple[RaceResult, tuple[str, ...]]:
    """Races until undisturbed or the last attempt; returns the last result and its doubts."""
    seen: dict[str, None]  # in order, each once

    def look() -> None:
        slowdowns = bench.watch.look().slowdowns
        seen.update(dict.fromkeys((UNSEEN_SLOWDOWNS,) if slowdowns is None else slowdowns))

    for attempt in range(1, effort.attempts + 1):
        seen = {}
        if effort.looks_once:
            result = race(ready, source, most_rounds=effort.most_rounds)
            look()
        else:
            result = race(ready, source, look, effort.most_rounds)
        slowdowns = [slowdown for slowdown in seen if slowdown != UNSEEN_SLOWDOWNS]
        doubts = (*seen, *(() if result.is_decided else (UNDECIDED,)))
        if result.is_decided and not slowdowns:
            break
        _log.info("attempt %d was disturbed: %s", attempt, "; ".join(doubts))
        if slowdowns and attempt < effort.attempts:
            bench.sleep(PAUSE_S)
    return result, doubts
