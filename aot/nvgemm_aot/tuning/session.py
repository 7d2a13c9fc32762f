"""Tunes bundles: measures their problems one by one and writes a bundle with the results."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.format import Conditions, Header, sha256_hex
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import SuspectError, TuningError
from nvgemm_runtime.gemm.aten import unusual_setting
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.launch.loader import require_libraries
from nvgemm_runtime.matching.refusals import refusal

from ..bundle.content import ProblemRanking
from ..bundle.writer import write_bundle
from ..rankings.agreement import (
    ATEN,
    TRITON,
    Relation,
    compare,
    confirming_gpus,
    contender_name,
    gpu_name,
)
from .contenders import Contenders
from .correctness import suspicion, thrown_out
from .gpu import Bench
from .measuring import BrokenDeviceError, measure
from .neighbours import Neighbours
from .other_work import OtherWork
from .outcome import TuningOutcome
from .rewrite import (
    Pruned,
    previous_outcome,
    prune,
    read_together,
    tuned_content,
    with_build_key,
)
from .state import TuningState, refuse_foreign_measurements, reserved, state_path

PROGRAM = f"nvgemm-aot {__version__}"


class Running(Protocol):
    """Makes a context that is entered while a contender runs on the problem of a key."""

    def __call__(self, contender: str, key: str) -> contextlib.AbstractContextManager[None]:
        """The context."""


def unwatched(contender: str, key: str) -> contextlib.AbstractContextManager[None]:
    """A context in which nobody watches whether a contender returns."""
    return contextlib.nullcontext()


class UnusableGpuError(TuningError):
    """A contender left the GPU unusable for this process; the state records it."""


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Options of a tuning.

    Attributes:
        budget_s: Seconds after which no further problem is begun; None for no limit.
        all_kernels: Whether a problem is measured with all kernels of its signature instead of its
            ranking's.
        neighbours: Whether a problem is also measured with the kernels that won at the next smaller
            and larger m of its n and k.
        triton: Whether Inductor is asked for its best Triton kernel.
        prunes: Whether kernels that are never among the first two are dropped.
        accepts_suspect: Whether to write a bundle even if so many kernels were thrown out that
            the measurement itself may be at fault.
    """

    budget_s: float | None = None
    all_kernels: bool = False
    neighbours: bool = False
    triton: bool = False
    prunes: bool = False
    accepts_suspect: bool = False


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a tuning.

    Attributes:
        pruned_bytes: Bytes that the pruned kernels took in the original bundles.
        outcomes: By problem key, in the order of the problems, including those of earlier runs.
        unmeasured: By key, problems without an outcome, and the reason.
        broken: By name, contenders that left the GPU unusable or hang, and the error.
        hanging: Contenders that hang, each with the problem's key and what was observed. Kernels
            are among ``broken`` too; ATen and Triton are left out of the problem alone.
        pruned: Result of pruning; None unless it was asked for.
        state: The file that keeps the outcomes; None where there are none.
        measured_now: How many problems this run measured.
        is_complete: Whether the same command would have nothing left to measure.
        suspicion: Why the measurement rather than the thrown-out kernels may be wrong, or None.
    """

    path: Path
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
    is_complete: bool
    suspicion: str | None


def tune(
    paths: Sequence[Path],
    output: Path,
    bench: Bench,
    options: TuningOptions,
    *,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    running: Running = unwatched,
) -> Tuned:
    """Measure the problems of bundles and write one bundle with measured rankings.

    Each outcome is saved beside the output at once: after an interruption, or when the budget is
    used up, the same call continues there. After the last problem it measures nothing again.

    Args:
        paths: The bundles, of one target and toolchain.
        output: The bundle to write; not one of ``paths``.
        bench: The GPU and its timer.
        options: What to measure, and for how long.
        progress: Called before the first problem and after each finished one.
        clock: Returns seconds, for the budget.
        running: Context entered with a contender and a problem's key whenever the contender runs.

    Raises:
        TuningError: If the device cannot run the bundles, they declare no problem or differ in
            target or toolchain, ATen has unusual settings, no correct kernel is left, the state or
            the output's measurements belong to another tuning, or a kernel leaves the GPU
            unusable.
        SuspectError: If more kernels were thrown out than ``options`` accept; writes nothing.
        BundleFormatError: If a bundle is damaged.
        DriverError: If a library that kernels need is missing or does not fit.
        ToolchainError: If the native launcher is missing.
        StorageError: If a file cannot be read or written, or the state is damaged.
    """
    begin = clock()
    with contextlib.ExitStack() as stack:
        bundles = [stack.enter_context(_opened(path, bench)) for path in paths]
        content = read_together(bundles, bench.facts)
        if not content.rankings:
            named = ", ".join(map(str, paths))
            raise TuningError(f"{named}: no problem is declared, so there is nothing to measure")
        _refuse_unusual_aten(content.rankings)
        stack.enter_context(reserved(output))
        stored_bytes = {
            kernel.id: kernel.span.stored_bytes
            for bundle in bundles
            for kernel in bundle.header.kernels
        }
        state = TuningState(state_path(output), _identity(bundles, bench, options))
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
            neighbours=Neighbours(content.rankings if options.neighbours else ()),
        )
        left = session.left(content.rankings)
        left_out = session.measure(left, progress)
        measured_now = len(left) - len(left_out)
        lacking = session.lacking(content.rankings)
        for _ in range(MOST_PASSES):
            if not lacking or OUT_OF_BUDGET in left_out.values():
                break
            left_out |= session.measure(lacking, progress)
            lacking = session.lacking(content.rankings)
        suspect = suspicion(
            ((kernel.id, kernel.signature) for kernel in content.kernels),
            thrown_out(state.outcomes, state.broken),
        )
        if suspect is not None and not options.accepts_suspect:
            raise SuspectError(
                f"suspect, so {output} is not written: {suspect}. That many wrong kernels rather "
                "mean a broken GPU, driver or check. What was measured is kept in "
                f"{state_path(output)}, and the same command finds it there: to measure again, "
                "remove that file or name another output; to have the bundle written without "
                "these kernels: --accept-suspect"
            )
        made = tuned_content(
            content, state.outcomes, broken=state.broken, program=PROGRAM, gpu=bench.facts.name
        )
        pruned = None
        if options.prunes:
            made, pruned = prune(made)
        made = with_build_key(made, content.build_key)
        if any(ranking.measured is not None for ranking in made.rankings):
            state.add_written(made.build_key)
        header = write_bundle(output, made)
        file_bytes = output.stat().st_size
    keys = [ranking.problem.key for ranking in content.rankings]
    return Tuned(
        path=output,
        header=header,
        file_bytes=file_bytes,
        pruned_bytes=sum(stored_bytes[id_] for id_ in pruned.dropped) if pruned else 0,
        outcomes={key: state.outcomes[key] for key in keys if key in state.outcomes},
        unmeasured={key: why for key, why in left_out.items() if key not in state.outcomes},
        broken=state.broken,
        hanging=tuple(state.hanging),
        pruned=pruned,
        state=state_path(output) if state.outcomes else None,
        measured_now=measured_now,
        is_complete=not any(outcome.is_disturbed for outcome in state.outcomes.values())
        and not any(why.startswith((OUT_OF_BUDGET, OUT_OF_MEMORY)) for why in left_out.values())
        and not lacking,
        suspicion=suspect,
    )


@contextlib.contextmanager
def _opened(path: Path, bench: Bench) -> Iterator[Bundle]:
    with Bundle(path) as bundle:
        reason = refusal(bundle.header, bench.facts)
        if reason is not None:
            raise TuningError(f"{path} cannot be measured here: {reason}")
        require_libraries(bundle.header)  # or each kernel would be blamed for what is missing
        yield bundle


def _refuse_unusual_aten(rankings: Sequence[ProblemRanking]) -> None:
    for dtype in dict.fromkeys(ranking.problem.signature.a for ranking in rankings):
        setting = unusual_setting(dtype)
        if setting is not None:
            raise TuningError(
                f"{setting}: ATen's times would be those of another ATen; set it back, perhaps by "
                "an environment variable of torch's, and run again"
            )


def _identity(bundles: Sequence[Bundle], bench: Bench, options: TuningOptions) -> dict[str, str]:
    """What all outcomes of one tuning share, by the name that messages use for it."""
    content = "".join(sha256_hex(bundle.content()) for bundle in bundles)
    return {
        "bundle": sha256_hex(content.encode()),
        "GPU": bench.facts.name,
        "driver": bench.watch.driver,
        "torch": bench.versions.torch,
        "CUDA": bench.versions.cuda,
        "program": PROGRAM,
        "choice of kernels": ("all" if options.all_kernels else "ranked")
        + " and neighbours'" * options.neighbours,
        "asking for Triton": str(options.triton),
    }


_log = logging.getLogger(__name__)

MOST_PASSES = 4
"""Most further passes over problems that lack a neighbour's winner: each may change who wins."""


OUT_OF_BUDGET = "the budget was used up; the same command goes on"
OUT_OF_MEMORY = "it does not fit into the GPU's memory, the same command tries again: "

Progress = Callable[[int, int], None]
"""Called before the first problem and after each, with how many are done and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of a tuning: measures the problems that its state does not hold yet.

    ``elapsed_s`` returns the seconds since the run began; `TuningOptions` has ``budget_s``.
    """

    contenders: Contenders
    bench: Bench
    state: TuningState
    budget_s: float | None
    elapsed_s: Callable[[], float]
    running: Running = unwatched
    neighbours: Neighbours = field(default_factory=lambda: Neighbours(()))
    said: set[str] = field(default_factory=set)

    def lacking(self, rankings: Sequence[ProblemRanking]) -> list[ProblemRanking]:
        """Problems that were measured without a kernel that won at a neighbouring m."""
        outcomes = self.state.outcomes
        return [
            one
            for one in rankings
            if one.problem.key in outcomes and self._unmeasured_neighbours(one.problem)
        ]

    def _unmeasured_neighbours(self, problem: Problem) -> list[str]:
        if not self.neighbours:
            return []
        outcome = self.state.outcomes.get(problem.key)
        known = set() if outcome is None else outcome.kernels.keys() | outcome.wrong.keys()
        wrong = thrown_out(self.state.outcomes, self.state.broken)
        left_out = self.state.left_out(problem.key)
        return [
            id_
            for id_ in self.neighbours.winners(problem, self.state.outcomes)
            if id_ not in known | left_out | wrong.keys() and self.contenders.serves(id_, problem)
        ]

    def left(self, rankings: Sequence[ProblemRanking]) -> list[ProblemRanking]:
        """Problems without an outcome, and then those whose measurement was disturbed."""
        outcomes = self.state.outcomes
        known = [one for one in rankings if one.problem.key in outcomes]
        disturbed = [one for one in known if outcomes[one.problem.key].is_disturbed]
        return [one for one in rankings if one.problem.key not in outcomes] + disturbed

    def measure(
        self, rankings: Sequence[ProblemRanking], progress: Progress | None
    ) -> dict[str, str]:
        """Measure problems and add their outcomes to the state.

        Returns those that were left out, by key, and the reason.

        Raises:
            TuningError: If a contender leaves the GPU unusable.
        """
        if not rankings:
            return {}
        if progress is not None:
            progress(0, len(rankings))
        unmeasured: dict[str, str] = {}
        other_work = OtherWork(self.bench, self.state)
        now = 0.0
        try:
            for place, ranking in enumerate(rankings, start=1):
                last, now = now, self.elapsed_s()
                other_work.pass_time(now - last)
                if self.budget_s is not None and now >= self.budget_s:
                    unmeasured[ranking.problem.key] = OUT_OF_BUDGET
                    continue
                reason = self._measure_one(ranking, other_work.busy)
                if reason is not None:
                    unmeasured[ranking.problem.key] = reason
                if progress is not None:
                    progress(place, len(rankings))
        finally:
            other_work.end()
        return unmeasured

    def _measure_one(self, ranking: ProblemRanking, busy: str | None) -> str | None:
        """Measure a problem; returns why it is left out, or None."""
        import torch

        key = ranking.problem.key
        before_now = self.state.outcomes.get(key)
        also = [] if before_now is None else [*before_now.kernels]  # or passes would never end
        also += self._unmeasured_neighbours(ranking.problem)
        runs = self.contenders.runs_of(ranking, also if self.neighbours else ())
        for name in self.state.left_out(key):
            runs.pop(name, None)
        if not runs.keys() - {ATEN, TRITON}:
            return self._why_no_contender(ranking)
        trying = functools.partial(self.state.trying, key=key)
        try:
            outcome = measure(
                ranking.problem,
                runs,
                self.bench,
                trying,
                functools.partial(self.running, key=key),
            )
        except BrokenDeviceError as error:
            name = contender_name(error.contender)
            reason = f"{key}: it leaves the GPU unusable: {error.reason}"
            self.state.add_broken(error.contender, reason)
            raise UnusableGpuError(
                f"{key}: {name} leaves the GPU unusable: {error.reason}; run the same command "
                "again: it goes on without that"
            ) from error
        except torch.OutOfMemoryError as error:
            _log.warning("%s is left out: %s", key, error)
            return f"{OUT_OF_MEMORY}{error}"
        before = previous_outcome(ranking, self.bench.facts.name)
        differs: str | None = None
        confirmed_by: tuple[str, ...] = ()
        if before is not None:
            compared = compare(before, outcome)
            if compared.relation is Relation.CONTRADICTS:
                differs = compared.why
            elif compared.relation is Relation.CONFIRMS:
                confirmed_by = confirming_gpus(before, outcome)
            else:
                _log.info("%s: not confirmed: %s", key, compared.why)
            self._warn_of_repetition(before.conditions, outcome.conditions)
        doubts = (*outcome.doubts, *(doubt for doubt in (busy, differs) if doubt is not None))
        outcome = replace(outcome, doubts=doubts, confirmed_by=confirmed_by)
        self.state.add(key, outcome)
        return None

    def _warn_of_repetition(self, before: Conditions, now: Conditions) -> None:
        """Say once that the bundle was measured on this very GPU before."""
        if now.gpu_sha256 is None or before.gpu_sha256 != now.gpu_sha256:
            return
        if not self.said:
            _log.warning(
                "this GPU, whose UUID has the digest %s, measured these problems before: that "
                "confirms nothing",
                gpu_name(now),
            )
        self.said.add(gpu_name(now))

    def _why_no_contender(self, ranking: ProblemRanking) -> str:
        broken = [id_ for id_, _ in ranking.kernels if id_ in self.state.broken]
        reasons = [f"{contender_name(id_)} is thrown out" for id_ in broken]
        if len(broken) < len(ranking.kernels):
            others = "none of the others" if broken else "none"
            reasons.append(f"{others} can be launched with its operands")
        return f"none of its kernels can be measured: {'; '.join(reasons)}"
