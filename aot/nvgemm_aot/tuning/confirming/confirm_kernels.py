"""Confirms bundled kernels: times each twice beside ATen, on this GPU with this torch."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.confirmations import Confirmations, ConfirmedTimes
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import TuningError, one_line
from nvgemm_runtime.launch.loading.loader import require_libraries
from nvgemm_runtime.matching.evidence import REPEATED_GAIN
from nvgemm_runtime.matching.index import all_but_m
from nvgemm_runtime.matching.refusals import refusal
from nvgemm_runtime.matching.thresholds import MIN_GAIN
from nvgemm_runtime.settings import counts_repeated_rankings

from ...rankings.agreement import ATEN, contender_name, disagreement
from ..contenders import Contenders, refuse_unusual_aten
from ..measuring.gpu import Bench, GpuTimer, gpu_bench
from ..measuring.problem_times import (
    UNDECIDED,
    BrokenDeviceError,
    Effort,
    look_for_others,
    measure,
    wait_until_idle,
)
from ..outcome import TuningOutcome
from ..session import Progress, Running, unwatched
from .contests import Contest, find_contests, known_right

PROGRAM = f"nvgemm-aot {__version__}"

GRAPH_NS = 500_000
"""Target runtime of a graph's launches. A quarter of `tune`'s: starting a graph and reading events
takes some microseconds, for ATen as for kernels."""

MOST_ROUNDS = 12
"""Limit for a race's rounds. More samples would tell kernels apart that gain the same."""

REPEATS = 2
"""Measurements that each problem needs without doubts or disagreement."""

MOST_PASSES = 3
"""Most passes over the problems; the last takes those that were disturbed or disagree."""

OUT_OF_BUDGET = "the budget is spent"


class BrokenByError(TuningError):
    """A contender left the GPU unusable for this process.

    Attributes:
        contender: Contender name.
    """

    def __init__(self, message: str, contender: str) -> None:
        super().__init__(message)
        self.contender = contender

    def __reduce__(self) -> tuple[type[BrokenByError], tuple[str, str]]:
        return type(self), (str(self), self.contender)


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """Result.

    Attributes:
        confirmations: Times to write.
        gains: Each problem's best gain on ATen, by key, as a fraction; negative if ATen is faster.
        used: Problems in which a kernel gains enough to run, by key.
        left_out: Problems without times, by key, with the reason.
        rejected: Kernels that failed or computed a wrong result, by id, with the fault.
        elapsed_s: Seconds that measuring took.
    """

    confirmations: Confirmations
    gains: Mapping[str, float]
    used: tuple[str, ...]
    left_out: Mapping[str, str]
    rejected: Mapping[str, str]
    elapsed_s: float


def confirm_bench() -> Bench:
    """Returns the bench for torch's current CUDA device, with a quick timer.

    Raises:
        TuningError: If torch sees no GPU.
    """
    return replace(gpu_bench(), timer=GpuTimer(GRAPH_NS))


def confirm(
    bundles: Sequence[Bundle],
    bench: Bench,
    *,
    budget_s: float | None = None,
    without: Collection[str] = (),
    progress: Progress | None = None,
    running: Running = unwatched,
    clock: Callable[[], float] = time.monotonic,
) -> Confirmed:
    """Times the kernels that dispatch tables would use on this GPU beside ATen, each twice.

    Args:
        bundles: Installed bundles.
        bench: GPU and timer.
        budget_s: Seconds that measuring may take; None for no limit. After half of it, no further
            table is begun, as the others are measured a second time.
        without: Contenders to leave out, by name.
        progress: Called before the first measurement and after each.
        running: Context entered with a contender and a problem key during each contender's run.
        clock: Returns seconds.

    Raises:
        TuningError: If no bundle serves the device, there is nothing to measure, ATen has unusual
            settings, or a contender leaves the GPU unusable.
        DriverError: If a library that kernels need is missing or does not fit.
        StorageError: If a bundle cannot be read.
    """
    begin = clock()
    serving = _serving(bundles, bench)
    contests = find_contests(serving, bench.facts)
    if not contests:
        names = ", ".join(str(bundle.path) for bundle in serving)
        raise TuningError(
            f"nothing to confirm: {names} rank no problem that plain torch.compile may leave to a "
            "kernel; fused products compete under max-autotune"
        )
    refuse_unusual_aten(contest.problem for contest in contests)
    session = _Session(
        contenders=Contenders(serving, all_kernels=False, triton=False, without=without),
        bench=bench,
        running=running,
        is_over=lambda: budget_s is not None and clock() - begin >= budget_s / REPEATS,
        known_right=known_right(serving),
        progress=progress or (lambda done, total: None),
    )
    session.measure_all(contests)
    problems = {
        contest.problem.key: times
        for contest in contests
        if (times := session.times_of(contest)) is not None
    }
    gains = {key: _gain(times) for key, times in problems.items()}
    unvouched = MIN_GAIN if counts_repeated_rankings() else REPEATED_GAIN
    least_gains = {
        contest.problem.key: MIN_GAIN if contest.is_measured else unvouched for contest in contests
    }
    return Confirmed(
        confirmations=Confirmations(
            gpu=bench.facts.name, by=PROGRAM, conditions=bench.conditions, problems=problems
        ),
        gains=gains,
        used=tuple(
            key
            for key, times in problems.items()
            if not times.doubts and gains[key] >= least_gains[key]
        ),
        left_out=session.left_out,
        rejected=session.rejected,
        elapsed_s=clock() - begin,
    )


def _serving(bundles: Sequence[Bundle], bench: Bench) -> list[Bundle]:
    """Returns the bundles that serve the device; there is at least one."""
    reasons = {bundle: refusal(bundle.header, bench.facts) for bundle in bundles}
    serving = [bundle for bundle, reason in reasons.items() if reason is None]
    if not serving:
        listed = "; ".join(f"{bundle.path}: {reason}" for bundle, reason in reasons.items())
        raise TuningError(
            f"no installed bundle serves this GPU ({listed or 'none is installed'}); install a "
            "kernel wheel, or name bundles in NVGEMM_AOT_BUNDLES; nvgemm-aot doctor shows more"
        )
    for bundle in serving:
        require_libraries(bundle.header)
    return serving


def _gain(times: ConfirmedTimes) -> float:
    first = next(iter(times.kernels.values()))
    return 1 - first.time_ns / times.aten.time_ns


@dataclass(kw_only=True)
class _Session:
    """Measurements so far.

    ``outcomes`` are by problem key; ``contenders``, ``bench`` and ``running`` as for `confirm`.
    """

    contenders: Contenders
    bench: Bench
    running: Running
    is_over: Callable[[], bool]
    known_right: frozenset[str]
    progress: Progress
    outcomes: dict[str, list[TuningOutcome]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)

    def measure_all(self, contests: Sequence[Contest]) -> None:
        """Measures each problem until it has `REPEATS` that agree, in `MOST_PASSES` passes.

        Other work on the GPU puts all measurements in doubt between two looks.
        """
        busy = wait_until_idle(self.bench)
        done, total = 0, REPEATS * len(contests)
        self.progress(done, total)
        for number in range(MOST_PASSES):
            remaining = [contest for contest in contests if not self._is_settled(contest)]
            total = max(total, done + len(remaining))
            line: object = None
            for contest in remaining:
                is_new_line = all_but_m(contest.problem) != line
                line = all_but_m(contest.problem)
                # A table is confirmed whole: ATen would compute the m that are left out.
                if number == 0 and is_new_line and self.is_over():
                    self._leave_out_from(contests, contest)
                    break
                self._measure(contest, busy)
                done += 1
                self.progress(done, total)
            contests = [one for one in contests if one.problem.key not in self.left_out]
        busy_after = look_for_others(self.bench)
        if busy is None and busy_after is not None:
            self._doubt_all(f"{busy_after} afterwards")

    def _leave_out_from(self, contests: Sequence[Contest], first: Contest) -> None:
        for contest in contests[contests.index(first) :]:
            self.left_out[contest.problem.key] = OUT_OF_BUDGET

    def _measure(self, contest: Contest, busy: str | None) -> None:
        """Measures a problem once."""
        import torch

        problem = contest.problem
        key = problem.key
        if key in self.left_out:
            return
        runs = self.contenders.runs_of_kernels(problem, contest.kernel_ids)
        if ATEN not in runs or len(runs) == 1:
            self.left_out[key] = "none of its kernels can be launched with its operands"
            return
        effort = Effort(
            attempts=1,
            most_rounds=MOST_ROUNDS,
            also_back_to_back=False,
            looks_once=True,
            unchecked={ATEN, *self.known_right},
        )
        trying = functools.partial(self.running, key=key)
        try:
            outcome = measure(problem, runs, self.bench, trying, trying, effort)
        except BrokenDeviceError as error:
            raise BrokenByError(
                f"{key}: {contender_name(error.contender)} leaves the GPU unusable: {error.reason}",
                error.contender,
            ) from error
        except torch.OutOfMemoryError as error:
            reason = one_line(str(error))
            self.left_out[key] = f"its operands do not fit into GPU memory: {reason}"
            return
        self.rejected.update(outcome.wrong)
        if outcome.aten is None or not outcome.kernels:
            self.left_out[key] = "no kernel, or not ATen, computes it correctly"
            return
        # It matters if a kernel gains on ATen, not which of two that gain the same is faster.
        doubts = [doubt for doubt in outcome.doubts if doubt != UNDECIDED]
        doubts += [busy] if busy is not None else []
        self.outcomes.setdefault(key, []).append(replace(outcome, doubts=tuple(doubts)))

    def _doubt_all(self, doubt: str) -> None:
        for key, outcomes in self.outcomes.items():
            self.outcomes[key] = [
                replace(outcome, doubts=(*outcome.doubts, doubt)) for outcome in outcomes
            ]

    def _is_settled(self, contest: Contest) -> bool:
        key = contest.problem.key
        return key in self.left_out or self._agreeing(key) is not None

    def _agreeing(self, key: str) -> tuple[TuningOutcome, TuningOutcome] | None:
        """Returns the last measurement, and another without doubts that it agrees with."""
        outcomes = self.outcomes.get(key, [])
        if not outcomes or outcomes[-1].doubts:
            return None
        last = outcomes[-1]
        for other in reversed(outcomes[:-1]):
            if not other.doubts and disagreement(other, last) is None:
                return other, last
        return None

    def times_of(self, contest: Contest) -> ConfirmedTimes | None:
        """Returns a problem's times: those of the measurement with the smaller gain."""
        key = contest.problem.key
        outcomes = self.outcomes.get(key, [])
        if key in self.left_out or not outcomes:
            return None
        pair = self._agreeing(key)
        if pair is not None:
            return min(map(_times, pair), key=_gain)
        doubts = dict.fromkeys(doubt for outcome in outcomes for doubt in outcome.doubts)
        for other in outcomes[:-1]:
            reason = disagreement(other, outcomes[-1])
            if reason is not None:
                doubts[reason] = None
        times = min(map(_times, outcomes), key=_gain)
        return replace(times, doubts=tuple(doubts) or ("it was measured only once",))


def _times(outcome: TuningOutcome) -> ConfirmedTimes:
    assert outcome.aten is not None  # problems without it are left out
    return ConfirmedTimes(kernels=outcome.kernels, aten=outcome.aten)
