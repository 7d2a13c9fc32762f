"""Chooses the candidates to compile for each problem: those most likely to be fast.

Candidates that can run a problem are ranked by estimated runtime, corrected where a correction was
fitted on measurements. Model estimates tie often, and designs that differ only in scheduling always
tie, so only a few candidates per block shape stay. If at least two stay and m is small, one of them
is made for small m. Every candidate left out has a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nvgemm_runtime.gemm.group_limits import too_large_reason
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.roles import misalignment_reason

from ..providers.base import DYNAMIC_PERSISTENT, BlockShape, Candidate, Rejection
from ..rankings.entries import Operator
from ..rankings.usable import Usable

Estimate = Callable[[Problem, BlockShape], "int | None"]
"""Estimates a runtime in nanoseconds, or returns None; `RuntimeModel.estimate_ns`."""

Correct = Callable[[Problem, Sequence[Candidate], Sequence["int | None"]], "list[int | None]"]
"""Corrects the estimates of a problem's candidates, in the same order."""

MAX_PER_SHAPE = 2
"""Most candidates per problem that look alike to the model and differ only in scheduling or
pairing. They share one estimate, so more of them would displace other shapes without evidence."""

SPLIT_SHARE = 4
"""Divisor: at most ``limit / SPLIT_SHARE`` candidates split k, and at least one may, unless a split
candidate ranks first. On an H200 such kernels were fastest at 5 of 167 problems, by up to 15 %, and
up to 96 times slower at others (``benchmarks/results/raw/estimates-h200-2026-11-22.json``)."""

FIRST_SPLIT_SHARE = 2
"""Divisor in place of `SPLIT_SHARE` if a split candidate ranks first: the best split is less
certain then."""

SPLIT_GAIN = 0.8
"""Largest fraction of the best unsplit kernel's time at which a kernel that splits k may rank
first, by corrected estimates. Otherwise no split counts as faster than the unsplit kernel until it
is measured. Out of 103 problems held back, splits ranked first at 7, all with n 512, and were
faster at 6. Any number from 0.8 to 1 gives the same; 0.8 was chosen by looking at these problems
(``benchmarks/results/raw/estimates-*.json``)."""

LEAST_K_TILES = 4
"""Fewest tiles along k in each part of a split. Out of 368 kernel and problem pairs with fewer,
measured on an H200, the fastest took 1.34 times as long as the best unsplit kernel; with more, 179
of 4,903 were faster (``benchmarks/results/raw/estimates-*.json``)."""

DYNAMIC_SHARE = 8
"""Divisor: at most ``limit // DYNAMIC_SHARE`` candidates differ from another one by a dynamic
schedule alone. No measurement says yet where these are faster."""

LEAST_DYNAMIC_NS = 100_000
"""Least estimated runtime for such a candidate, in nanoseconds. Every launch fills its counter,
which is assumed to cost 2,000 ns, and tiles in one or two waves leave nothing to hand out."""

SMALL_M = 64
"""Largest m that reserves a place for a kernel made for small m, if the limit is two or more. The
estimate does not matter, because the model does not cover such kernels: they compute the transposed
problem, in tiles with at most this many of the problem's rows."""

_SIGNIFICANT_DIGITS = 3
"""Estimates that agree in this many digits count as equal: the model's own resolution is coarser.
"""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen candidate, with its estimated runtime in nanoseconds if the model has one."""

    candidate: Candidate
    time_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Candidates to compile for one problem, best first, and the reasons against the others."""

    problem: Problem
    choices: tuple[Choice, ...]
    rejections: tuple[Rejection, ...]


def select(
    problem: Problem,
    candidates: tuple[Candidate, ...],
    estimate: Estimate,
    limit: int,
    correct: Correct | None = None,
) -> Selection:
    """Chooses at most ``limit`` of a signature's candidates for one problem.

    All ``candidates`` have the problem's signature. ``limit`` is at least 1.
    """
    rejections: list[Rejection] = []
    able = []
    for candidate in candidates:
        misfit = _misfit(problem, candidate) or _split_misfit(problem, candidate)
        if misfit is None:
            able.append(candidate)
        else:
            rejections.append(Rejection(operator=candidate.operator, reason=misfit))
    estimates: dict[BlockShape, int | None] = {}
    for candidate in able:
        if candidate.block_shape not in estimates:
            estimates[candidate.block_shape] = estimate(problem, candidate.block_shape)
    times = [estimates[candidate.block_shape] for candidate in able]
    if correct is not None:
        times = correct(problem, able, times)
    # A single kernel is an unsplit one: parts added in any order serve no deterministic program.
    ranked = rank_splits_behind(
        sorted(
            (Choice(candidate=candidate, time_ns=time) for candidate, time in zip(able, times)),
            key=lambda choice: _sort_key(problem, choice),
        ),
        gain=None if correct is None or limit == 1 else SPLIT_GAIN,
    )
    choices = _keep_diverse(problem, ranked, limit, rejections)
    return Selection(problem=problem, choices=tuple(choices), rejections=tuple(rejections))


def _misfit(problem: Problem, candidate: Candidate) -> str | None:
    """Returns why a candidate cannot run a problem with these sizes, or None."""
    return misalignment_reason(problem, candidate.alignment_bytes) or too_large_reason(
        candidate.provider, problem
    )


def _split_misfit(problem: Problem, candidate: Candidate) -> str | None:
    """Returns why an unmeasured candidate gains nothing by splitting this k, or None."""
    shape = candidate.block_shape
    if shape.splits > 1 and problem.k < (least := LEAST_K_TILES * shape.splits * shape.tile[2]):
        return f"{shape.splits} parts need a k of {least} or more, {LEAST_K_TILES} tiles each"
    return None


def rank_splits_behind(ranked: list[Choice], gain: float | None) -> list[Choice]:
    """Ranks the best unsplit kernel first, unless a split takes at most ``gain`` times as long.

    The kernels that were before it then count as equally fast.
    """
    whole = (c for c in ranked if c.candidate.block_shape.splits == 1 and c.time_ns is not None)
    first = next(whole, None)
    if first is None or first is ranked[0] or first.time_ns is None:
        return ranked
    least = ranked[0].time_ns
    if gain is not None and least is not None and least <= gain * first.time_ns:
        return ranked
    position = ranked.index(first)
    before = [replace(choice, time_ns=first.time_ns) for choice in ranked[:position]]
    return [first, *before, *ranked[position + 1 :]]


def prefer_measured(
    selection: Selection, candidates: tuple[Candidate, ...], usable: Usable, limit: int
) -> Selection:
    """Replaces estimated choices by the fastest measured ones.

    Takes at most ``limit`` candidates, or more if more of them may be the fastest. Times are the
    measured ones. Returns the selection unchanged if no measured operator is a candidate for the
    problem.
    """
    able = {
        Operator(provider=candidate.provider, operator=candidate.operator): candidate
        for candidate in candidates
        if _misfit(selection.problem, candidate) is None
    }
    times = dict(usable.assessment.entry.kernels)
    available = [operator for operator in usable.operators if operator in able]
    front = set(usable.front)
    chosen = [
        operator for rank, operator in enumerate(available) if rank < limit or operator in front
    ]
    if not chosen:
        return selection
    choices = tuple(
        Choice(candidate=able[operator], time_ns=times[operator].time_ns) for operator in chosen
    )
    chosen_candidates = {choice.candidate for choice in choices}
    displaced = [
        choice.candidate
        for choice in selection.choices
        if choice.candidate not in chosen_candidates
    ]
    chosen_names = {choice.candidate.operator for choice in choices}
    return Selection(
        problem=selection.problem,
        choices=choices,
        rejections=(
            *(
                rejection
                for rejection in selection.rejections
                if rejection.operator not in chosen_names
            ),
            *(
                Rejection(
                    operator=candidate.operator,
                    reason="not measured, or slower than the measured candidates that were chosen",
                )
                for candidate in displaced
            ),
        ),
    )


def _sort_key(problem: Problem, choice: Choice) -> tuple[float, int, bool, int, int, str, str]:
    candidate = choice.candidate
    design = candidate.design
    # Rounding makes near-equal estimates equal, so that the later, structural criteria decide.
    time = float("inf")
    if choice.time_ns is not None:
        time = round(choice.time_ns, _SIGNIFICANT_DIGITS - len(str(choice.time_ns)))
    wasted_rows = -problem.m % design.tile[0] if candidate.block_shape.swapped else 0
    # The model takes an even cluster along m for 2-CTA instructions.
    unlike_modelled = (design.ctas_per_tile == 2) != (design.cluster[0] % 2 == 0)
    cluster_size = design.cluster[0] * design.cluster[1]
    return (
        time,
        wasted_rows,
        unlike_modelled,
        cluster_size,
        candidate.preference,
        candidate.operator,
        candidate.provider,  # operators of two providers may share a name
    )


def _keep_diverse(
    problem: Problem, ranked: list[Choice], limit: int, rejections: list[Rejection]
) -> list[Choice]:
    choices: list[Choice] = []
    special = _small_m_choice(problem, ranked) if limit > 1 else None
    per_shape: Counter[BlockShape] = Counter()
    is_split_first = bool(ranked) and ranked[0].candidate.block_shape.splits > 1
    share = FIRST_SPLIT_SHARE if is_split_first else SPLIT_SHARE
    splitting, most_splitting = 0, max(1, limit // share)
    dynamic, most_dynamic = 0, limit // DYNAMIC_SHARE
    others = {c.candidate.block_shape for c in ranked if not _is_dynamic(c)}
    for rank, choice in enumerate(ranked, start=1):
        shape = choice.candidate.block_shape
        is_split = shape.splits > 1
        # For grouped problems a dynamic schedule is a different kernel, because groups differ in
        # length.
        is_twin = _is_dynamic(choice) and shape in others and not problem.signature.op.has_groups
        if is_split:
            shape = replace(shape, splits=2)  # the number of parts counts like a schedule
        room = limit - (special is not None and special not in choices)
        if choice is special:
            choices.append(choice)
            continue
        if is_split and splitting == most_splitting:
            reason = f"{most_splitting} that split k rank higher"
            rejections.append(Rejection(operator=choice.candidate.operator, reason=reason))
            continue
        if is_twin and (choice.time_ns or 0) < LEAST_DYNAMIC_NS:
            reason = f"a dynamic twin of a static schedule needs at least {LEAST_DYNAMIC_NS} ns"
            rejections.append(Rejection(operator=choice.candidate.operator, reason=reason))
            continue
        if is_twin and dynamic == most_dynamic:
            reason = f"at most {most_dynamic} of {limit} may differ by a dynamic schedule alone"
            rejections.append(Rejection(operator=choice.candidate.operator, reason=reason))
            continue
        if per_shape[shape] < MAX_PER_SHAPE and len(choices) < room:
            choices.append(choice)
            per_shape[shape] += 1
            splitting += is_split
            dynamic += is_twin
            continue
        reason = f"{MAX_PER_SHAPE} of the same block shape rank higher"
        if per_shape[shape] < MAX_PER_SHAPE:
            time = "no estimate" if choice.time_ns is None else f"estimate {choice.time_ns} ns"
            reason = f"rank {rank} of {len(ranked)} ({time}), limit {limit}"
        rejections.append(Rejection(operator=choice.candidate.operator, reason=reason))
    return choices


def _is_dynamic(choice: Choice) -> bool:
    return choice.candidate.design.scheduler == DYNAMIC_PERSISTENT


def _small_m_choice(problem: Problem, ranked: list[Choice]) -> Choice | None:
    """Returns the kernel made for small m whose tile wastes fewest rows, or None for a large m."""
    if problem.m > SMALL_M:
        return None
    specialised = [
        choice
        for choice in ranked
        if choice.candidate.block_shape.swapped
        and choice.candidate.block_shape.splits == 1
        and choice.candidate.design.tile[0] <= SMALL_M
    ]

    def row_tiles_then_width(choice: Choice) -> tuple[int, int]:
        tile_m = choice.candidate.design.tile[0]
        return -(-problem.m // tile_m), tile_m

    return min(specialised, key=row_tiles_then_width, default=None)
