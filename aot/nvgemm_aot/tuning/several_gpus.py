"""Tunes on several GPUs of this machine at once: a part of the problems on each.

Each GPU's part has a journal of its own beside the output. At the end, one process adds all parts'
outcomes to the output's journal, measures what is left, and writes the bundle.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from nvgemm_runtime.errors import TuningError

from ..pipeline.shard import Shard
from ..storage.files import remove_file
from .session import Progress
from .state import measured_keys, state_path
from .tune_bundles import Part, Tuned, TuningOptions
from .watchdog import GPU_BENCH, HANG_S, VISIBLE_GPUS, tune_watched

_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


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
    parts = [
        Part(shard=shard, output=output.with_name(f".{output.name}.{number}of{len(gpus)}"))
        for number in range(1, len(gpus) + 1)
        for shard in [Shard(number=number, count=len(gpus))]
    ]
    measured = measured_keys(output)
    stop = threading.Event()
    sums = [_Sum(report=report, parts=len(gpus)) for report in (progress, again)]

    def tune_part(index: int) -> Tuned:
        return tune_watched(
            paths,
            parts[index].output,
            replace(options, shard=parts[index].shard, measured=measured, prunes=False),
            bench=bench,
            hang_s=hang_s,
            progress=sums[0].of(index),
            again=sums[1].of(index),
            gpu=gpus[index],
            stop=stop,
        )

    with ThreadPoolExecutor(len(gpus)) as pool:
        running = [pool.submit(tune_part, index) for index in range(len(gpus))]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    errors = [error for one in running if (error := one.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, KeyboardInterrupt)):
        raise error
    left = options
    if options.budget_s is not None:
        left = replace(options, budget_s=max(0.0, options.budget_s - (time.monotonic() - begin)))
    joined = tune_watched(paths, output, left, bench=bench, hang_s=hang_s, parts=parts, gpu=gpus[0])
    for part in parts:
        for path in (part.output, state_path(part.output)):
            with contextlib.suppress(OSError):
                remove_file(path)
    now = joined.measured_now + sum(one.result().measured_now for one in running)
    return replace(joined, measured_now=now)


@dataclass(kw_only=True)
class _Sum:
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
