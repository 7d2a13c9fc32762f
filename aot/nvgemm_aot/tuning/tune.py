"""Tuning bundles: every declared problem is measured, and the rankings written anew."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.format import Header, sha256_hex
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import SuspectError, TuningError
from nvgemm_runtime.gemm.aten import unusual_setting
from nvgemm_runtime.launch.loader import require_libraries
from nvgemm_runtime.matching.refusals import refusal

from ..bundle.content import ProblemRanking
from ..bundle.writer import write_bundle
from .contenders import Contenders
from .measuring import Bench
from .outcome import Outcome
from .output import refuse_foreign_measurements, reserved
from .pruning import Pruned, prune
from .session import OUT_OF_BUDGET, OUT_OF_MEMORY, Progress, Session
from .state import TuningState, state_path
from .suspicion import suspicion, thrown_out
from .tuned_bundle import read_together, tuned_content, with_build_key

PROGRAM = f"nvgemm-aot {__version__}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to tune.

    Attributes:
        budget_s: After so many seconds no further problem is begun; None for no limit.
        all_kernels: Whether a problem is measured with all kernels of its signature, and not only
            with those that its ranking names.
        triton: Whether Inductor is asked for its best Triton kernel.
        prunes: Whether kernels are dropped that are never among the first two.
        accepts_suspect: Whether a bundle is written even if so many kernels were thrown out that
            something else may be wrong.
    """

    budget_s: float | None = None
    all_kernels: bool = False
    triton: bool = False
    prunes: bool = False
    accepts_suspect: bool = False


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
        broken: By name, contenders that left the GPU unusable, and how.
        pruned: What pruning came to; None where it was not asked for.
        state: Where what was measured is kept; None where nothing was.
        measured_now: How many problems this run has measured.
        is_complete: Whether the same command would find nothing left to measure.
        suspicion: Why the measurement may be wrong instead of the kernels that were thrown out;
            None where few were.
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
    measured_now: int
    is_complete: bool
    suspicion: str | None


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
    the same call goes on from there. The same call after the last one measures nothing again.

    Args:
        paths: The bundles, of one target and toolchain.
        output: The bundle to write; none of ``paths``.
        bench: Where, and by what.
        options: How.
        progress: Told of each finished problem.
        clock: Seconds, for the budget.

    Raises:
        TuningError: If the device cannot run the bundles, they declare no problem or do not go
            together, ATen is not set as usual, no right kernel is left, the state is another
            tuning's, the output holds measurements of another tuning, or a kernel leaves the GPU
            unusable.
        SuspectError: If more kernels were thrown out than options accept; nothing is written then.
        BundleFormatError: If a bundle is damaged.
        DriverError: If a library that kernels need is missing or does not fit.
        ToolchainError: If the native launcher is missing.
        StorageError: If a file cannot be read or written, or the state is damaged.
    """
    begin = clock()
    with contextlib.ExitStack() as stack:
        bundles = stack.enter_context(_opened(paths, bench))
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
        state = TuningState(
            state_path(output), _identity(bundles, bench, options), stored_bytes.keys()
        )
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
            clock=clock,
            begin=begin,
        )
        left = session.left(content.rankings)
        left_out = session.measure(left, progress)
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
        pruned=pruned,
        state=state_path(output) if state.outcomes else None,
        measured_now=len(left) - len(left_out),
        is_complete=not any(outcome.is_disturbed for outcome in state.outcomes.values())
        and not any(why.startswith((OUT_OF_BUDGET, OUT_OF_MEMORY)) for why in left_out.values()),
        suspicion=suspect,
    )


@contextlib.contextmanager
def _opened(paths: Sequence[Path], bench: Bench) -> Iterator[list[Bundle]]:
    with contextlib.ExitStack() as stack:
        bundles = [stack.enter_context(Bundle(path)) for path in paths]
        for bundle in bundles:
            reason = refusal(bundle.header, bench.facts)
            if reason is not None:
                raise TuningError(f"{bundle.path} cannot be measured here: {reason}")
            require_libraries(bundle.header)  # or each kernel would be blamed for what is missing
        yield bundles


def _refuse_unusual_aten(rankings: Sequence[ProblemRanking]) -> None:
    for dtype in dict.fromkeys(ranking.problem.signature.a for ranking in rankings):
        setting = unusual_setting(dtype)
        if setting is not None:
            raise TuningError(
                f"{setting}: ATen's times would be those of another ATen; set it back, perhaps by "
                "an environment variable of torch's, and run again"
            )


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
