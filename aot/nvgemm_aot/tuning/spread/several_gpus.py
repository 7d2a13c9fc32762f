"""Tunes on several GPUs of this machine at once: a part of the problems on each.

Each GPU's part has a journal of its own beside the output, which the output's journal takes. At the
end, one process measures what is left and writes the bundle. With ``confirms``, each problem is in
several parts, and measurements are joined as rankings of several machines are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import NvgemmError, TuningError

from ...pipeline.shard import Shard
from ...rankings.entries import Operator
from ..outcome import TuningOutcome
from ..part_measuring import Measured, Part, measure_part
from ..repeating import needs_repeat
from ..session import Progress
from ..state.facts import facts_by_gpu
from ..state.gathering import gather, part_path
from ..state.joining import join_gpus
from ..state.journal import Journal, state_path
from ..tune_bundles import Tuned, TuningOptions
from ..watchdog import GPU_BENCH, HANG_S, VISIBLE_GPUS, measure_watched, tune_watched
from .gpu_identities import identify, refuse_unlike

_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"

R = TypeVar("R")


def visible_gpus() -> tuple[str, ...]:
    """Lists the GPUs that torch sees, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        TuningError: If torch cannot tell, or sees none.
    """
    done = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True)
    if done.returncode:
        raise TuningError(f"torch cannot count this machine's GPUs: {done.stderr.strip()[-300:]}")
    count = int(done.stdout.split()[-1])
    if not count:
        raise TuningError("torch sees no GPU, which tuning needs; run: nvgemm-aot doctor")
    names = [name.strip() for name in os.environ.get(VISIBLE_GPUS, "").split(",") if name.strip()]
    return tuple(names[:count]) or tuple(map(str, range(count)))


def tune_on(
    gpus: Sequence[str],
    paths: Sequence[Path],
    output: Path,
    options: TuningOptions,
    *,
    bench: str = GPU_BENCH,
    hang_s: float = HANG_S,
    progress: Progress | None = None,
    again: Progress | None = None,
) -> Tuned:
    """Tunes like `watchdog.tune_watched`, with a part of the problems on each GPU.

    Args:
        gpus: GPUs of one product, as CUDA_VISIBLE_DEVICES names them.
        paths: Bundles to tune.
        output: Bundle to write.
        options: Problems and kernels to measure, and the budget.
        bench: Function that creates the bench in a measuring process, as ``module:function``.
        hang_s: Seconds after which a contender that has not returned counts as hanging.
        progress: Called with all parts' problems, done and in total.
        again: Called likewise for second measurements.

    Raises:
        NvgemmError: As `tune_watched`. The other GPUs are interrupted, and the same command
            continues.
    """
    begin = time.monotonic()

    def left() -> TuningOptions:
        if options.budget_s is None:
            return options
        return replace(options, budget_s=max(0.0, options.budget_s - (time.monotonic() - begin)))

    def measure(options: TuningOptions) -> list[Measured]:
        parts = divide(output, len(gpus), options.confirms)
        sums = [SummedProgress(report=report, parts=len(gpus)) for report in (progress, again)]

        def measure_one(index: int, stop: threading.Event) -> Measured:
            return measure_watched(
                functools.partial(measure_part, paths, output, parts[index]),
                parts[index].output,
                options,
                bench=bench,
                hang_s=hang_s,
                progress=sums[0].of(index),
                again=sums[1].of(index),
                gpu=gpus[index],
                stop=stop,
            )

        with gathering(output):
            return on_each(len(gpus), measure_one)

    gather(output)
    if options.confirms == 1:
        measured = measure(left())
        tuned = tune_watched(paths, output, left(), bench=bench, hang_s=hang_s, gpu=gpus[0])
        now = tuned.measured_now + sum(part.measured_now for part in measured)
        return replace(tuned, measured_now=now)
    identities = on_each(
        len(gpus), lambda index, stop: identify(bench, gpu=gpus[index], hang_s=hang_s, stop=stop)
    )
    names = [f"GPU {gpu}" for gpu in gpus]
    refuse_unlike(dict(zip(names, identities)), confirms=options.confirms)
    runs = [measure(replace(left(), repeats=False))]
    if options.repeats and has_unconfirmed(paths, output):
        runs.append(measure(left()))
    written = replace(options, budget_s=0.0)  # other GPUs measure what is left
    tuned = tune_watched(paths, output, written, bench=bench, hang_s=hang_s, gpu=gpus[0])
    return with_parts(tuned, output, options, runs)


@contextlib.contextmanager
def gathering(output: Path) -> Iterator[None]:
    """Gathers the parts after the block; after an error too, if that is possible.

    Raises:
        NvgemmError: As `gather`, unless the block raises.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(NvgemmError):
            gather(output)
        raise
    gather(output)


def divide(output: Path, count: int, confirms: int) -> list[Part]:
    """Divides a tuning into parts; each problem is in ``confirms`` of them."""
    return [
        Part(
            shards=tuple(
                Shard(number=(number + step) % count + 1, count=count) for step in range(confirms)
            ),
            output=part_path(output, number + 1, count),
        )
        for number in range(count)
    ]


def has_unconfirmed(paths: Sequence[Path], output: Path) -> bool:
    """Returns True if an output's journal has a sound measurement that no other GPU confirms."""
    operators: dict[str, Operator] = {}
    for path in paths:
        with Bundle(path) as bundle:
            for kernel in bundle.header.kernels:
                operators[kernel.id] = Operator(provider=kernel.provider, operator=kernel.operator)
    joined = join_gpus(Journal(state_path(output), {}).facts, operators)
    return any(needs_repeat(one, one.conditions.gpu_sha256) for one in joined.values())


def left_to_repeat(output: Path, tuned: Tuned) -> int:
    """Returns the number of problems to measure a second time, also on GPUs that are absent."""
    by_gpu = facts_by_gpu(Journal(state_path(output), {}).facts)

    def is_left(key: str, outcome: TuningOutcome) -> bool:
        gpu = outcome.conditions.gpu_sha256
        if not needs_repeat(outcome, gpu):
            return False
        repeat = by_gpu[gpu].repeats.get(key)
        return repeat is None or repeat.outcome.is_disturbed

    return sum(is_left(key, outcome) for key, outcome in tuned.outcomes.items())


def with_parts(
    tuned: Tuned, output: Path, options: TuningOptions, runs: Sequence[Sequence[Measured]]
) -> Tuned:
    """Returns a tuning's result with the counts of all runs' parts, and what the last left out."""
    last = runs[-1]
    unrepeated = left_to_repeat(output, tuned) if options.repeats else 0
    unmeasured = {key: why for part in last for key, why in part.unmeasured.items()}
    return replace(
        tuned,
        unmeasured={key: why for key, why in unmeasured.items() if key not in tuned.outcomes},
        measured_now=sum(part.measured_now for parts in runs for part in parts),
        unrepeated=unrepeated,
        is_complete=all(part.is_complete for part in last) and not unrepeated,
    )


def on_each(count: int, run: Callable[[int, threading.Event], R]) -> list[R]:
    """Runs a function in a thread for each of so many indices, and returns the results.

    Raises:
        BaseException: The first that a function raised; the event that the others got is set.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(count) as pool:
        running: list[Future[R]] = [pool.submit(run, index, stop) for index in range(count)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    errors = [error for one in running if (error := one.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, KeyboardInterrupt)):
        raise error
    return [one.result() for one in running]


@dataclass(kw_only=True)
class SummedProgress:
    """Sums the progress of parts that report from threads of their own."""

    report: Progress | None
    parts: int
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, index: int) -> Callable[[int, int], None] | None:
        """Returns the function that a part calls."""
        if self.report is None:
            return None

        def called(done: int, total: int) -> None:
            with self.lock:
                self.counts[index] = done, total
                if len(self.counts) == self.parts and self.report is not None:
                    self.report(*map(sum, zip(*self.counts.values())))

        return called
