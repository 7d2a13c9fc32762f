"""Checks kernels in child processes, which a kernel may hang or crash."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence

from nvgemm_runtime.bundle.format import sha256_hex

from ...pipeline.workers import WorkerDied, Workers
from .kernel_check import KernelReport, KernelTask, check_kernel, failed_report, start_session

Progress = Callable[[int, int], None]
"""Receives the number of checked kernels, and of all."""

DEFAULT_LIMIT_SECONDS = 600.0
"""Time limit for a kernel with all its problems and seeds. Most take a few seconds."""


def check_kernels(
    tasks: Sequence[KernelTask],
    *,
    jobs: int,
    limit_seconds: float = DEFAULT_LIMIT_SECONDS,
    progress: Progress | None = None,
) -> Iterator[tuple[KernelTask, KernelReport]]:
    """Yields each task with its report, in no fixed order.

    A process emulates one GPU product, for one CUDA version at a time.

    Raises:
        WorkersCannotStart: If processes end before they are ready.
    """
    groups: dict[tuple[str, str], list[KernelTask]] = {}
    for task in tasks:
        groups.setdefault((task.device, task.target.cuda), []).append(task)
    done = 0
    for (device, cuda), group in groups.items():
        prepare = functools.partial(start_session, device, cuda)
        with Workers(min(jobs, len(group)), check_kernel, prepare, limit_seconds) as workers:
            for task, outcome in workers.run(group):
                done += 1
                if progress is not None:
                    progress(done, len(tasks))
                if isinstance(outcome, WorkerDied):
                    reason = f"the process that emulated it ended: {outcome}"
                    yield task, failed_report(task, reason)
                else:
                    yield task, outcome


_TARGET_LINE = re.compile(r"^\s*\.target .*$", re.M)


def code_digest(task: KernelTask) -> str:
    """Returns a digest of what emulation depends on; it leaves out the architecture's name.

    Equal digests mean equal PTX but for ``.target``, and equal facts. Such kernels are emulated
    once.
    """
    kernel = task.kernel
    facts = (kernel.provider, kernel.operator, kernel.signature.key, kernel.calling_convention)
    ptx = _TARGET_LINE.sub("", task.ptx)
    return sha256_hex("\n".join((*facts, *map(str, task.problems), ptx)).encode())
