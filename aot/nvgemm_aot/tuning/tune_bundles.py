"""Tunes bundles: measures their problems in turn and writes a bundle with the results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.format import Header, sha256_hex
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import SuspectError, TuningError
from nvgemm_runtime.installed.policy_checks import open_checked
from nvgemm_runtime.launch.loading.loader import require_libraries
from nvgemm_runtime.matching.refusals import refusal
from nvgemm_runtime.matching.trust import why_another_release

from ..bundle.content import BundleContent, ProblemRanking
from ..bundle.writer import write_bundle
from ..pipeline.shard import Shard
from ..rankings.entries import Operator
from ..rankings.prune_kernels import Pruned, prune
from .contenders import Contenders, refuse_unusual_aten
from .correctness.judgement import rejected_kernels, suspicion
from .measuring.dealing import deal
from .measuring.gpu import Bench
from .measuring.grid import (
    Grid,
    between_declared,
    between_measured,
    measured_earlier,
    where_winners_change,
)
from .measuring.neighbours import Neighbours
from .outcome import TuningOutcome
from .repeating import measure_again, unrepeated
from .rewrite import (
    previous_outcome,
    rankings_to_measure,
    read_together,
    tuned_content,
    with_build_key,
    with_rankings,
)
from .session import OUT_OF_BUDGET, OUT_OF_MEMORY, Progress, Running, Session, unwatched
from .state.joining import join_gpus
from .state.journal import Journal, Line, reserved, state_path
from .state.tuning_state import TuningState, check_identity, refuse_foreign_measurements

PROGRAM = f"nvgemm-aot {__version__}"

MOST_PASSES = 4
"""Most further passes over problems that lack a neighbour's winner: each may change the winners."""

FINER_STEPS = 4
"""Rounds that add m where the fastest kernel changes. After three, two m that were a factor of 2
apart are closer than `grid.CLOSEST`."""

_FURTHER_STEPS = {None: 0, Grid.STEPS: FINER_STEPS, Grid.SERVING: 1}
"""Rounds that add m, by grid."""


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Tuning options.

    Attributes:
        budget_s: Seconds after which no further problem begins; None for no limit.
        all_kernels: True to measure a problem with all kernels for its signature instead of its
            ranking's.
        neighbours: True to measure a problem also with the kernels that won at the next smaller and
            larger m for its n and k.
        grid: Grid of m between the declared ones to measure too (see `grid`); None for none.
            `Grid.STEPS` includes neighbours' winners.
        skips_confirmed: True to keep rankings that two GPUs of this product confirm with this
            torch, without measuring them again.
        triton: True to measure Inductor's best Triton kernel.
        prunes: True to drop kernels that are never among the first two and in no dispatch table.
        accepts_suspect: True to write a bundle even if so many kernels were dropped that the
            measurement itself may be at fault.
        repeats: True to measure a second time the problems that another process measured first.
        shard: Part of the problems to measure; None for all. See `deal`.
        confirms: Number of GPUs to measure each problem on; see `state.joining.join_gpus`.
    """

    budget_s: float | None = None
    all_kernels: bool = False
    neighbours: bool = False
    grid: Grid | None = None
    skips_confirmed: bool = False
    triton: bool = False
    prunes: bool = False
    accepts_suspect: bool = False
    repeats: bool = True
    shard: Shard | None = None
    confirms: int = 1


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Tuning result.

    Attributes:
        gpu: Measured GPU product, as its driver names it.
        pruned_bytes: Bytes that the pruned kernels took in the original bundles.
        outcomes: Outcomes by problem key, in problem order, including those from earlier runs.
        unmeasured: Problems without an outcome, by key, with the reason.
        broken: Contenders that left the GPU unusable or hang, by name, with the error.
        hanging: Contenders that hang, each with the problem key and the observation. Kernels are in
            ``broken`` too; ATen and Triton are skipped for that problem alone.
        pruned: Pruning result; None unless requested.
        state: File with the outcomes; None without outcomes.
        measured_now: Number of problems this run measured, for the first or the second time.
        unrepeated: Number of problems left for a second measurement by another process.
        is_complete: True if the same command would have nothing left to measure.
        suspicion: Reason to suspect the measurement rather than the rejected kernels, or None.
    """

    path: Path
    gpu: str
    header: Header
    file_bytes: int
    pruned_bytes: int
    outcomes: Mapping[str, TuningOutcome]
    unmeasured: Mapping[str, str]
    broken: Mapping[str, str]
    hanging: Sequence[tuple[str, str]]
    pruned: Pruned | None
    state: Path | None
    measured_now: int
    unrepeated: int
    is_complete: bool
    suspicion: str | None


def tune(
    paths: Sequence[Path],
    output: Path,
    bench: Bench,
    options: TuningOptions,
    *,
    progress: Progress | None = None,
    again: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    running: Running = unwatched,
) -> Tuned:
    """Measures the problems in bundles and writes one bundle with measured rankings.

    Rankings for other GPU products stay. Each outcome is saved next to the output at once: after an
    interruption, or at the budget's end, the same call continues there. After the last problem it
    measures a second time the problems that another process measured first (see `repeating`).

    Args:
        paths: Bundles with the same target and toolchain.
        output: Bundle to write; not one of ``paths``.
        bench: GPU and timer.
        options: Problems and kernels to measure, and the budget.
        progress: Called before the first problem and after each finished problem.
        again: Called likewise for second measurements, and during their waits.
        clock: Returns seconds, for the budget.
        running: Context entered with a contender and a problem key during each contender's run.

    Raises:
        TuningError: If the device cannot run the bundles, they declare no problem or differ in
            target or toolchain, ATen has unusual settings, no correct kernel is left, the state or
            the output's measurements belong to another tuning, or a kernel leaves the GPU unusable.
        SuspectError: If more kernels were dropped than ``options`` accept; writes nothing.
        BundleFormatError: If a bundle is damaged.
        DriverError: If a library that kernels need is missing or does not fit.
        ToolchainError: If the native launcher is missing.
        SignatureError: If the policy refuses a bundle.
        StorageError: If a file cannot be read or written, or the state is damaged.
    """
    with preparing(paths, output, output, bench, options, running=running, clock=clock) as prepared:
        content, session, state = prepared.content, prepared.session, prepared.session.state
        gpu = bench.facts.name
        declared = rankings_to_measure(content, gpu)
        if options.shard is not None:
            declared = deal(declared, options.shard)
        done = measure_first(session, declared, options, progress)
        measured_now, left_to_repeat = done.measured_now, 0
        if options.confirms == 1 and options.repeats:
            measured_now += measure_again(session, done.rankings, again)
            left_to_repeat = len(unrepeated(session, done.rankings))
        outcomes = join_gpus(Journal(state_path(output), {}).facts, operators_by_id(content))
        # Unmeasured problems without a ranking for this product have nothing to write.
        measured = (ranking for ranking in done.rankings if ranking.problem.key in outcomes)
        content = with_rankings(content, measured, gpu)
        suspect = suspicion(
            ((kernel.id, kernel.signature) for kernel in content.kernels),
            rejected_kernels(outcomes, state.broken),
        )
        if suspect is not None and not options.accepts_suspect:
            raise SuspectError(
                f"suspect, so {output} is not written: {suspect}. So many wrong kernels suggest a "
                f"broken GPU, driver or check. Measurements are saved in {state_path(output)}, "
                "where the same command finds them. To measure again, remove that file or name "
                "another output. To write the bundle without these kernels, pass --accept-suspect"
            )
        new_content = tuned_content(
            content, outcomes, broken=state.broken, program=PROGRAM, gpu=gpu
        )
        pruned = None
        if options.prunes:
            new_content, pruned = prune(new_content)
        new_content = with_build_key(new_content, content.build_key)
        if any(ranking.measured is not None for ranking in new_content.rankings):
            state.add_written(new_content.build_key)
        header = write_bundle(output, new_content)
        file_bytes = output.stat().st_size
    keys = dict.fromkeys(ranking.problem.key for ranking in content.rankings)
    return Tuned(
        path=output,
        gpu=gpu,
        header=header,
        file_bytes=file_bytes,
        pruned_bytes=sum(prepared.stored_bytes[id_] for id_ in pruned.dropped) if pruned else 0,
        outcomes={key: outcomes[key] for key in keys if key in outcomes},
        unmeasured={key: why for key, why in done.left_out.items() if key not in outcomes},
        broken=state.broken,
        hanging=tuple(state.hanging),
        pruned=pruned,
        state=state_path(output) if outcomes else None,
        measured_now=measured_now,
        unrepeated=left_to_repeat,
        is_complete=done.is_complete(outcomes.values()) and not left_to_repeat,
        suspicion=suspect,
    )


def operators_by_id(content: BundleContent) -> dict[str, Operator]:
    """Returns each kernel's operator, by the kernel's id."""
    return {
        kernel.id: Operator(provider=kernel.provider, operator=kernel.operator)
        for kernel in content.kernels
    }


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Content of the bundles, each kernel's bytes in them, and a session to measure in."""

    content: BundleContent
    stored_bytes: Mapping[str, int]
    session: Session


@contextlib.contextmanager
def preparing(
    paths: Sequence[Path],
    output: Path,
    measured: Path,
    bench: Bench,
    options: TuningOptions,
    *,
    running: Running,
    clock: Callable[[], float],
    before: Sequence[Line] = (),
) -> Iterator[Prepared]:
    """Opens bundles and the journal next to ``measured``, which is ``output`` or a part's."""
    begin = clock()
    with contextlib.ExitStack() as stack:
        bundles = [stack.enter_context(_open_bundle(path, bench)) for path in paths]
        content = read_together(bundles)
        if not content.rankings:
            names = ", ".join(map(str, paths))
            raise TuningError(f"{names}: no problem is declared, so there is nothing to measure")
        refuse_unusual_aten(ranking.problem for ranking in content.rankings)
        stack.enter_context(reserved(measured))
        identity = _identity(bundles, bench, options)
        journal = Journal(state_path(output), {})
        if measured != output and journal.lines:
            check_identity(journal, identity)
        state = TuningState(state_path(measured), identity, before)
        stack.callback(state.close)
        refuse_foreign_measurements(output, state.written)
        contenders = Contenders(
            bundles,
            all_kernels=options.all_kernels,
            triton=options.triton,
            without=state.broken.keys(),
        )
        session = Session(
            contenders=contenders,
            bench=bench,
            state=state,
            budget_s=options.budget_s,
            elapsed_s=lambda: clock() - begin,
            running=running,
        )
        stored_bytes = {
            kernel.id: kernel.span.stored_bytes
            for bundle in bundles
            for kernel in bundle.header.kernels
        }
        yield Prepared(content=content, stored_bytes=stored_bytes, session=session)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Problems to measure, and the first measurements made now.

    Attributes:
        rankings: Problems to measure, with those that a grid adds.
        measured_now: Number measured now.
        left_out: Problems not measured, by key, with the reason.
        lacking: Problems that lack a neighbour's winner.
    """

    rankings: Sequence[ProblemRanking]
    measured_now: int
    left_out: Mapping[str, str]
    lacking: Sequence[ProblemRanking]

    def is_complete(self, outcomes: Iterable[TuningOutcome]) -> bool:
        """Returns True if the same command would have nothing left to measure first."""
        return (
            not any(outcome.is_disturbed for outcome in outcomes)
            and not any(
                why.startswith((OUT_OF_BUDGET, OUT_OF_MEMORY)) for why in self.left_out.values()
            )
            and not self.lacking
        )


def measure_first(
    session: Session,
    declared: Sequence[ProblemRanking],
    options: TuningOptions,
    progress: Progress | None,
) -> Pass:
    """Measures the declared problems without the confirmed ones, and those that the options add."""
    confirmed = _confirmed_outcomes(declared, session.bench) if options.skips_confirmed else {}
    rankings = list(declared)
    by_steps = options.grid is Grid.STEPS
    if by_steps:
        rankings += between_declared(declared)
        rankings += measured_earlier(rankings, session.state.outcomes)
    measured_now, left_out = 0, dict[str, str]()
    lacking: list[ProblemRanking] = []
    for step in range(1 + _FURTHER_STEPS[options.grid]):
        if step:
            outcomes = {**confirmed, **session.state.outcomes}
            further = where_winners_change if by_steps else between_measured
            added = further(rankings, outcomes)
            if not added or OUT_OF_BUDGET in left_out.values():
                break
            rankings += added
        if options.neighbours or by_steps:
            session = replace(session, neighbours=Neighbours(rankings, confirmed))
        measurable = [ranking for ranking in rankings if ranking.problem.key not in confirmed]
        remaining = session.unmeasured(measurable)
        missed = session.measure(remaining, progress)
        measured_now += len(remaining) - len(missed)
        left_out |= missed
        lacking = session.lacking_neighbours(measurable)
        for _ in range(MOST_PASSES):
            if not lacking or OUT_OF_BUDGET in left_out.values():
                break
            left_out |= session.measure(lacking, progress)
            lacking = session.lacking_neighbours(measurable)
    return Pass(rankings=measurable, measured_now=measured_now, left_out=left_out, lacking=lacking)


def _confirmed_outcomes(
    rankings: Sequence[ProblemRanking], bench: Bench
) -> dict[str, TuningOutcome]:
    """Returns earlier outcomes by problem key that two GPUs of this product confirm.

    They are without doubts, and with this torch and CUDA.
    """
    outcomes = {}
    for ranking in rankings:
        outcome = previous_outcome(ranking, bench.facts.name)
        if outcome is None or not outcome.confirmed_by or outcome.doubts:
            continue
        then = outcome.conditions
        if why_another_release(then.torch, then.cuda, bench.versions) is None:
            outcomes[ranking.problem.key] = outcome
    return outcomes


@contextlib.contextmanager
def _open_bundle(path: Path, bench: Bench) -> Iterator[Bundle]:
    with open_checked(path) as bundle:
        reason = refusal(bundle.header, bench.facts)
        if reason is not None:
            raise TuningError(f"{path} cannot be measured here: {reason}")
        require_libraries(bundle.header)  # a missing library is not a kernel's fault
        yield bundle


def _identity(bundles: Sequence[Bundle], bench: Bench, options: TuningOptions) -> dict[str, str]:
    """Returns what all outcomes in a tuning share, by the name used in messages."""
    content = "".join(sha256_hex(bundle.content()) for bundle in bundles)
    return {
        "bundle": sha256_hex(content.encode()),
        "GPU": bench.facts.name,
        "driver": bench.watch.driver,
        "torch": bench.versions.torch,
        "CUDA": bench.versions.cuda,
        "program": PROGRAM,
        "choice of kernels": ("all" if options.all_kernels else "ranked")
        + " and neighbours'" * (options.neighbours or options.grid is Grid.STEPS)
        + ("" if options.grid is None else f" on {options.grid.value}")
        + " that two GPUs do not confirm" * options.skips_confirmed,
        "asking for Triton": str(options.triton),
        **({} if options.shard is None else {"shard": str(options.shard)}),
    }
