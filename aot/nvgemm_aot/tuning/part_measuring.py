"""Measures one GPU's part of a tuning, into a journal of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..pipeline.shard import Shard
from .measuring.dealing import deal
from .measuring.gpu import Bench
from .repeating import measure_again, needs_repeat, unrepeated
from .rewrite import rankings_to_measure
from .session import Progress, Running, unwatched
from .state.facts import gpu_of
from .state.joining import join_gpus, outcomes_by_problem
from .state.journal import Journal, Line, state_path
from .tune_bundles import TuningOptions, measure_first, operators_by_id, preparing


@dataclass(frozen=True, kw_only=True)
class Part:
    """One GPU's part of a tuning, which is measured into a journal of its own.

    Attributes:
        shards: Problems to measure.
        output: Output that the part would have: its journal is next to it.
    """

    shards: tuple[Shard, ...]
    output: Path


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of measuring a part; attributes as for `Tuned`."""

    unmeasured: Mapping[str, str]
    measured_now: int
    unrepeated: int
    is_complete: bool


def measure_part(
    paths: Sequence[Path],
    output: Path,
    part: Part,
    bench: Bench,
    options: TuningOptions,
    *,
    progress: Progress | None = None,
    again: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    running: Running = unwatched,
) -> Measured:
    """Measures one GPU's part of a tuning into a journal of its own, and writes no bundle.

    Skips what the output's journal and the part's have: with ``options.confirms``, what this GPU
    has measured, and what enough other GPUs have; else what any GPU has. With ``options.repeats``,
    measures a second time what this GPU has measured, in this part or not, and no other confirms.

    ``output`` is the tuning's; ``shard`` and ``prunes`` among the options are not used. Other
    arguments are as for `tune`.

    Raises:
        NvgemmError: As `tune`.
    """
    lines = Journal(state_path(output), {}).facts
    own, gpu = lines, bench.conditions.gpu_sha256
    if options.confirms > 1:
        own = [line for line in lines if gpu_of(line) in (gpu, None)]
    with preparing(
        paths, output, part.output, bench, options, running=running, clock=clock, before=own
    ) as prepared:
        session, state = prepared.session, prepared.session.state
        rankings = rankings_to_measure(prepared.content, bench.facts.name)
        dealt = {ranking.problem.key for shard in part.shards for ranking in deal(rankings, shard)}
        if options.confirms > 1:
            dealt -= _measured_elsewhere(lines, gpu, options.confirms)
        mine = [ranking for ranking in rankings if ranking.problem.key in dealt]
        done = measure_first(session, mine, options, progress)
        measured_now, left_to_repeat = done.measured_now, 0
        if options.repeats:
            first = {one.problem.key for one in done.rankings}
            to_repeat = [*done.rankings]  # and what this GPU measured before parts moved
            to_repeat += [one for one in rankings if one.problem.key not in first]
            if options.confirms > 1:
                joined = join_gpus(lines, operators_by_id(prepared.content))
                keys = {key for key, one in joined.items() if needs_repeat(one, gpu)}
                to_repeat = [one for one in to_repeat if one.problem.key in keys]
            measured_now += measure_again(session, to_repeat, again)
            left_to_repeat = len(unrepeated(session, to_repeat))
    keys = {ranking.problem.key for ranking in done.rankings}
    outcomes = [outcome for key, outcome in state.outcomes.items() if key in keys]
    return Measured(
        unmeasured={key: why for key, why in done.left_out.items() if key not in state.outcomes},
        measured_now=measured_now,
        unrepeated=left_to_repeat,
        is_complete=done.is_complete(outcomes) and not left_to_repeat,
    )


def _measured_elsewhere(lines: Sequence[Line], gpu: str | None, enough: int) -> set[str]:
    """Returns the keys of problems that enough other GPUs have measured."""
    return {
        key
        for key, outcomes in outcomes_by_problem(lines).items()
        if len({outcome.conditions.gpu_sha256 for outcome in outcomes} - {gpu}) >= enough
    }
