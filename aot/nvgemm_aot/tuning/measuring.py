"""Measuring one problem: operands, correctness, then the race."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.errors import StorageError, ToolchainError, one_line
from nvgemm_runtime.gemm.problem import Problem

from .check_operands import OperandCheck, make_checks
from .contenders import ATEN, TRITON, Run
from .correctness import find_fault, is_like
from .gpu import Bench
from .operands import Operands, make_sets, poison
from .outcome import UNSEEN_SLOWDOWNS, UNSEEN_WORK, TuningOutcome
from .race import RaceResult, Sample, race

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a problem is measured anew where something disturbed that."""

PAUSE_S = 5.0
"""Between attempts, for what disturbed to end and the GPU to cool down."""

BUSY_PERCENT = 5
"""Utilisation from which on a GPU that we leave alone counts as used by others."""

IDLE_S = 1.5
"""The driver's utilisation speaks of up to the last second: we keep still so long before a look."""

UNDECIDED = "the fastest were not told apart, and their times vary"


class BrokenDeviceError(Exception):
    """A contender has left the device unusable for this process.

    Attributes:
        contender: Its name.
        reason: What the device answers.
    """

    def __init__(self, contender: str, reason: str) -> None:
        super().__init__(f"{contender}: {reason}")
        self.contender = contender
        self.reason = reason


def wait_until_idle(bench: Bench) -> str | None:
    """Wait for other work on the GPU to end, some times; what to say if it does not."""
    for _ in range(ATTEMPTS):
        busy = look_for_others(bench)
        if busy is None or busy == UNSEEN_WORK:
            if busy is not None:
                _log.warning("%s; what is measured is uncertain for that", busy)
            return busy
        _log.warning("%s; waiting for that to end", busy)
        bench.sleep(PAUSE_S)
    return look_for_others(bench)


def look_for_others(bench: Bench) -> str | None:
    """Keep still for a moment and say whether the GPU is busy nevertheless."""
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
) -> TuningOutcome:
    """Time those contenders that compute a problem right.

    Args:
        problem: The problem.
        contenders: Kernels by id, and `contenders.ATEN` and `contenders.TRITON`.
        bench: Where, and by what.
        trying: Entered, with a contender's name, while that runs for the first time.

    Returns:
        The times. Kernels that fail, or whose result is wrong, are not among them; where torch's
        own does, it has no time.

    Raises:
        BrokenDeviceError: If one leaves the device unusable.
        torch.OutOfMemoryError: If operands do not fit.
        StorageError: If a bundle cannot be read.
        ToolchainError: If the native launcher is missing.
    """
    import torch

    seed = int(sha256_hex(problem.key.encode())[:8], 16)
    checks = make_checks(problem, bench.device, seed=seed)
    sets = make_sets(problem, bench.device, seed=seed, total_bytes=bench.buffer_bytes)
    bench.timer.check()  # nothing of what came before is laid at a contender's door
    ready: dict[str, Sample] = {}
    faults: dict[str, str] = {}
    for name, run in contenders.items():
        try:
            with trying(name):
                fault = _fault(name, run, checks)
                if fault is None:
                    ready[name] = _guarded(name, bench.timer.prepare(_calls(run, sets)))
        except (torch.OutOfMemoryError, StorageError, ToolchainError):
            raise  # no fault of the contender's
        except Exception as error:  # of a kernel, of torch's operator, or of what compiles it
            fault = _in_one_line(error)
            try:
                bench.timer.check()
            except Exception as broken:
                raise BrokenDeviceError(name, _in_one_line(broken)) from error
        if fault is not None:
            _log.warning("%s: %s is thrown out: %s", problem.key, name, fault)
            faults[name] = fault
    checks.clear()  # its memory is no longer needed
    doubts: tuple[str, ...] = ()
    result = RaceResult(intervals={}, is_decided=True)
    if ready:
        result, doubts = _race_undisturbed(ready, bench, random.Random(seed))
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
    )


def _fault(name: str, run: Run, checks: Sequence[OperandCheck]) -> str | None:
    if name in (ATEN, TRITON):  # which may round parts of a sum: on few products that is little
        check = checks[-1]
        poison(check.operands[2])
        result = run(*check.operands)
        return None if is_like(result, check.expected) else "it computes something else"
    for check in checks:
        poison(check.operands[2])
        fault = find_fault(run(*check.operands), check.expected)
        if fault is not None:
            return f"{fault} ({check.name})"
    return None


def _guarded(name: str, sample: Sample) -> Sample:
    """A sample whose failure is the contender's: launches of a graph fail when it is replayed."""

    def guarded() -> float:
        try:
            return sample()
        except Exception as error:
            raise BrokenDeviceError(name, _in_one_line(error)) from error

    return guarded


def _in_one_line(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def _calls(run: Run, sets: Sequence[Operands]) -> list[Callable[[], object]]:
    def call(operands: Operands) -> Callable[[], object]:
        return lambda: run(*operands)

    return [call(operands) for operands in sets]


def _race_undisturbed(
    ready: Mapping[str, Sample], bench: Bench, source: random.Random
) -> tuple[RaceResult, tuple[str, ...]]:
    """Race, anew where that was disturbed; the last result, and what disturbed even that."""
    seen: dict[str, None]  # in order, each once

    def look() -> None:
        slowdowns = bench.watch.look().slowdowns
        seen.update(dict.fromkeys((UNSEEN_SLOWDOWNS,) if slowdowns is None else slowdowns))

    for attempt in range(1, ATTEMPTS + 1):
        seen = {}
        result = race(ready, source, look)
        slowdowns = [one for one in seen if one != UNSEEN_SLOWDOWNS]
        doubts = (*seen, *(() if result.is_decided else (UNDECIDED,)))
        if result.is_decided and not slowdowns:
            break
        _log.info("attempt %d was disturbed: %s", attempt, "; ".join(doubts))
        if slowdowns and attempt < ATTEMPTS:
            bench.sleep(PAUSE_S)
    return result, doubts
