"""Tuning bundles: every declared problem is measured, and the rankings written anew."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.errors import TuningError
from nvgemm_runtime.format import Header, sha256_hex
from nvgemm_runtime.refusals import refusal

from ..bundle import ProblemRanking, write_bundle
from .contenders import ATEN, TRITON, Contenders
from .measuring import Bench, BrokenDeviceError, look_for_others, measure, wait_until_idle
from .outcome import Outcome, contender_name, disagreement
from .pruning import Pruned, prune
from .state import TuningState, state_path
from .tuned_bundle import previous_outcome, read_together, tuned_content, with_build_key

_log = logging.getLogger(__name__)

PROGRAM = f"nvgemm-aot {__version__}"

Progress = Callable[[int, int], None]
"""Called before the first problem and after each: how many are done of those that were left."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to tune.

    Attributes:
        budget_s: After so many seconds no further problem is begun; None for no limit.
        all_kernels: Whether a problem is measured with all kernels of its signature, and not only
            with those that its ranking names.
        triton: Whether Inductor is asked for its best Triton kernel.
        prunes: Whether kernels are dropped that are never among the first two.
    """

    budget_s: float | None = None
    all_kernels: bool = False
    triton: bool = False
    prunes: bool = False


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a tuning came to.

    Attributes:
        path: The bundle that was written.
        header: Its header.
        file_bytes: Its size.
        pruned_bytes: What kernels that pruning dropped took in the bundles that it was made from.
        outcomes: By problem key, in the order of the problems; those of earlier runs among them.
        unmeasured: Problems without one, and why.
        broken: By id, kernels that left the GPU unusable, and how.
        pruned: What pruning came to; None where it was not asked for.
        state: Where the state is kept, if problems are left; None where all are measured.
    """

    path: Path
    header: Header
    file_bytes: int
    pruned_bytes: int
    outcomes: Mapping[str, Outcome]
    unmeasured: Mapping[str, str]
    broken: Mapping[str, str]
    pruned: Pruned | None
    state: Path | None


def tune(
    paths: Sequence[Path],
    output: Path,
    bench: Bench,
    options: Options,
    *,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Measure the problems of bundles and write one bundle with what was measured.

    What was measured is kept beside the output after each problem: interrupted, or out of budget,
    the same call goes on from there.

    Args:
        paths: The bundles, of one target and toolchain.
        output: The bundle to write; none of ``paths``.
        bench: Where, and by what.
        options: How.
        progress: Told of each finished problem.
        clock: Seconds, for the budget.

    Raises:
        TuningError: If the device cannot run the bundles, they declare no problem or do not go
            together, no right kernel is left, the state is another tuning's, or a kernel leaves the
            GPU unusable.
        BundleFormatError: If a bundle is damaged.
        StorageError: If a file cannot be read or written, or the state is damaged.
    """
    begin = clock()
    with _opened(paths, bench) as bundles:
        content = read_together(bundles)
        if not content.rankings:
            named = ", ".join(map(str, paths))
            raise TuningError(f"{named}: no problem is declared, so there is nothing to measure")
        state = TuningState(state_path(output), _identity(bundles, bench, options))
        contenders = Contenders(
            bundles,
            all_kernels=options.all_kernels,
            triton=options.triton,
            without=state.broken.keys(),
        )
        budget = _Budget(options.budget_s, begin, clock)
        unmeasured = _measure_all(content.rankings, contenders, bench, state, budget, progress)
        stored_bytes = {
            kernel.id: kernel.span.stored_bytes
            for bundle in bundles
            for kernel in bundle.header.kernels
        }
    made = tuned_content(
        content,
        state.outcomes,
        broken=state.broken,
        by=PROGRAM,
        gpu=bench.facts.name,
        generator=PROGRAM,
    )
    pruned = None
    if options.prunes:
        made, pruned = prune(made)
    header = write_bundle(output, with_build_key(made, content.build_key))
    is_complete = not any(reason == OUT_OF_BUDGET for reason in unmeasured.values())
    if is_complete:
        state.remove()
    keys = [ranking.problem.key for ranking in content.rankings]
    return Tuned(
        path=output,
        header=header,
        file_bytes=output.stat().st_size,
        pruned_bytes=sum(stored_bytes[id_] for id_ in pruned.dropped) if pruned else 0,
        outcomes={key: state.outcomes[key] for key in keys if key in state.outcomes},
        unmeasured=unmeasured,
        broken=state.broken,
        pruned=pruned,
        state=None if is_complete else state_path(output),
    )


OUT_OF_BUDGET = "the budget was used up; the same command goes on"


@contextlib.contextmanager
def _opened(paths: Sequence[Path], bench: Bench) -> Iterator[list[Bundle]]:
    with contextlib.ExitStack() as stack:
        bundles = [stack.enter_context(Bundle(path)) for path in paths]
        for bundle in bundles:
            reason = refusal(bundle.header, bench.facts)
            if reason is not None:
                raise TuningError(f"{bundle.path} cannot be measured here: {reason}")
        yield bundles


def _identity(bundles: Sequence[Bundle], bench: Bench, options: Options) -> dict[str, str]:
    """What outcomes of one tuning have in common; the names are those of messages."""
    content = "".join(sha256_hex(bundle.content()) for bundle in bundles)
    return {
        "bundle": sha256_hex(content.encode()),
        "GPU": bench.facts.name,
        "driver": bench.watch.driver,
        "torch": bench.versions.torch,
        "CUDA": bench.versions.cuda,
        "program": PROGRAM,
        "choice of kernels": "all" if options.all_kernels else "ranked",
        "asking for Triton": str(options.triton),
    }


@dataclass(frozen=True)
class _Budget:
    seconds: float | None
    begin: float
    clock: Callable[[], float]

    @property
    def is_used_up(self) -> bool:
        return self.seconds is not None and self.clock() - self.begin >= self.seconds


def _measure_all(
    rankings: Sequence[ProblemRanking],
    contenders: Contenders,
    bench: Bench,
    state: TuningState,
    budget: _Budget,
    progress: Progress | None,
) -> dict[str, str]:
    """Measure what the state does not hold; why problems are left out, by key."""
    import torch

    left = [ranking for ranking in rankings if ranking.problem.key not in state.outcomes]
    if not left:
        return {}
    if progress is not None:
        progress(0, len(left))
    busy = wait_until_idle(bench)
    unmeasured: dict[str, str] = {}
    for place, ranking in enumerate(left, start=1):
        key = ranking.problem.key
        if budget.is_used_up:
            unmeasured[key] = OUT_OF_BUDGET
            continue
        runs = contenders.of(ranking)
        if not runs.keys() - {ATEN, TRITON}:
            unmeasured[key] = (
                "none of its kernels can be measured: none can be launched with its operands"
            )
            continue
        try:
            outcome = measure(ranking.problem, runs, bench)
        except BrokenDeviceError as error:
            state.add_broken(error.contender, f"{key}: {error.reason}")
            raise TuningError(
                f"{key}: {contender_name(error.contender)} leaves the GPU unusable: "
                f"{error.reason}; run the same command again: it goes on without that"
            ) from error
        except torch.OutOfMemoryError as error:
            _log.warning("%s is left out: %s", key, error)
            unmeasured[key] = f"it does not fit into the GPU's memory: {error}"
            continue
        state.add(key, _with_doubts(outcome, busy, _why_runs_differ(ranking, outcome, bench)))
        if progress is not None:
            progress(place, len(left))
    if busy is None:
        _look_back([r for r in left if r.problem.key not in unmeasured], bench, state)
    return unmeasured


def _why_runs_differ(ranking: ProblemRanking, outcome: Outcome, bench: Bench) -> str | None:
    before = previous_outcome(ranking, bench.facts.name)
    return None if before is None else disagreement(before, outcome)


def _look_back(measured: Sequence[ProblemRanking], bench: Bench, state: TuningState) -> None:
    """Doubt what this run has measured if others use the GPU when it ends."""
    busy = look_for_others(bench)
    if busy is None:
        return
    for ranking in measured:
        key = ranking.problem.key
        state.add(key, _with_doubts(state.outcomes[key], f"{busy} when the run ended"))


def _with_doubts(outcome: Outcome, *doubts: str | None) -> Outcome:
    added = tuple(doubt for doubt in doubts if doubt is not None)
    return replace(outcome, doubts=(*outcome.doubts, *added)) if added else outcome
