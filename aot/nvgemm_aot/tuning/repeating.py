"""Measures problems a second time, in another process and minutes later, on the same GPU.

A second measurement takes only the contenders that may be the fastest. If it agrees, the ranking
counts as repeated; if it contradicts, the ranking is in doubt.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nvgemm_runtime.bundle.ranking_entries import LEAST_REPEAT_S

from ..bundle.content import ProblemRanking
from ..rankings.agreement import ATEN
from ..rankings.intervals import contending, interval_of
from .contenders import Run
from .measuring.other_work import OtherWork
from .outcome import Repeat, TuningOutcome
from .session import Progress, Session

_log = logging.getLogger(__name__)

SLICE_S = 1.0
"""Longest sleep at a time, after which progress is reported: the watchdog takes silence for a hang.
Waits are longer by this much, as clocks are corrected."""


ANNOUNCED_WAIT_S = 10.0
"""Shortest wait that is announced."""


def needs_repeat(outcome: TuningOutcome, gpu: str | None) -> bool:
    """Returns True if a GPU, by its UUID's digest, is to repeat an outcome.

    It is that GPU's, has no doubts, and no other GPU confirms it.
    """
    if outcome.doubts or outcome.confirmed_by or not outcome.kernels:
        return False
    return gpu is not None and outcome.conditions.gpu_sha256 == gpu


def unrepeated(session: Session, rankings: Sequence[ProblemRanking]) -> list[ProblemRanking]:
    """Returns problems to measure a second time on this GPU, the first measured first.

    These have no doubts and no confirmation by another GPU. A problem whose second measurement was
    disturbed is included.
    """
    state, gpu = session.state, session.bench.conditions.gpu_sha256

    def is_unrepeated(key: str) -> bool:
        outcome, repeat = state.outcomes.get(key), state.repeats.get(key)
        if outcome is None or not needs_repeat(outcome, gpu):
            return False
        return repeat is None or repeat.outcome.is_disturbed

    remaining = [ranking for ranking in rankings if is_unrepeated(ranking.problem.key)]
    return sorted(remaining, key=lambda ranking: state.moments[ranking.problem.key].at_s)


def measure_again(
    session: Session, rankings: Sequence[ProblemRanking], progress: Progress | None
) -> int:
    """Measures a second time the problems that another process measured first.

    Each waits until `LEAST_REPEAT_S` have passed since its first measurement, unless the budget
    ends before.

    Returns:
        Number of measured problems.
    """
    state, bench = session.state, session.bench
    remaining = [
        ranking
        for ranking in unrepeated(session, rankings)
        if state.is_of_another_process(ranking.problem.key)
    ]
    if not remaining:
        return 0
    if progress is None:
        progress = _ignore_progress
    progress(0, len(remaining))
    other_work = OtherWork(bench, state)
    now, done = session.elapsed_s(), 0
    try:
        for position, ranking in enumerate(remaining, start=1):
            key = ranking.problem.key
            begun_s = _wait_until_due(
                session, key, functools.partial(progress, position - 1, len(remaining))
            )
            last, now = now, session.elapsed_s()
            other_work.pass_time(now - last)
            if begun_s is None or _is_budget_spent(session, now):
                break
            outcome = session.run(
                ranking.problem, _fastest_runs(session, ranking), also_back_to_back=False
            )
            if isinstance(outcome, TuningOutcome):
                if other_work.busy is not None:
                    outcome = replace(outcome, doubts=(*outcome.doubts, other_work.busy))
                after_s = math.floor(begun_s - state.moments[key].at_s)
                state.add_repeat(key, Repeat(outcome=outcome, after_s=after_s))
                done += 1
            progress(position, len(remaining))
    finally:
        other_work.end()
    return done


def _ignore_progress(done: int, total: int) -> None:
    """Ignores progress."""


def _is_budget_spent(session: Session, elapsed_s: float) -> bool:
    return session.budget_s is not None and elapsed_s >= session.budget_s


def _wait_until_due(session: Session, key: str, report: Callable[[], None]) -> float | None:
    """Waits until a problem may be measured again.

    Returns:
        The shared clock's time then, or None without waiting if the budget ends before.
    """
    bench, at_s = session.bench, session.state.moments[key].at_s
    # The minimum bounds the wait if the clock was set back meanwhile.
    left_s = min(LEAST_REPEAT_S + at_s - bench.now_s(), LEAST_REPEAT_S) + SLICE_S
    if left_s > 0 and _is_budget_spent(session, session.elapsed_s() + left_s):
        return None
    if left_s > ANNOUNCED_WAIT_S:
        _log.warning(
            "waiting %d s: a problem's second measurement starts %d s or more after its first",
            math.ceil(left_s),
            LEAST_REPEAT_S,
        )
    while left_s > 0:
        bench.sleep(min(SLICE_S, left_s))
        left_s -= SLICE_S
        report()
    return bench.now_s()


def _fastest_runs(session: Session, ranking: ProblemRanking) -> Mapping[str, Run]:
    """Returns ATen and the contenders that may be the fastest by the first measurement."""
    outcome = session.state.outcomes[ranking.problem.key]
    contending_names = contending(
        {name: interval_of(timing) for name, timing in outcome.times.items()}
    )
    names = {*contending_names, next(iter(outcome.kernels)), ATEN}
    runs = session.contenders.runs_of(ranking, [id_ for id_ in outcome.kernels if id_ in names])
    return {name: run for name, run in runs.items() if name in names}
