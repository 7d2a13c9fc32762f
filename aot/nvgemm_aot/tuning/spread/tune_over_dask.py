"""Tunes over Dask workers with GPUs: a part of the problems on each worker.

Workers send what they measure as it comes, and the client keeps it in the parts' journals beside
the output. What a lost worker has not measured is divided among the others.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import ExecutorError
from nvgemm_runtime.installed.policy_checks import open_checked

from ...pipeline.executor.scheduler_connection import connect
from ..part_measuring import Measured
from ..session import Progress
from ..state.facts import Facts
from ..state.gathering import gather
from ..state.journal import Journal, reserved, state_path
from ..state.tuning_state import refuse_foreign_measurements
from ..tune_bundles import Tuned, TuningOptions
from ..watchdog import GPU_BENCH, GRACE_S, HANG_S
from .gpu_workers import SAVED, GpuWorkers, LostError, Worker
from .part_journals import PartJournals
from .returned_bundle import keep_returned
from .several_gpus import divide, gathering, has_unconfirmed, with_parts
from .worker_tasks import SentTuning, measure_on_worker, write_on_worker

_log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks for lost workers."""


def tune_over(
    address: str,
    paths: Sequence[Path],
    output: Path,
    options: TuningOptions,
    *,
    allow_insecure: bool = False,
    bench: str = GPU_BENCH,
    hang_s: float = HANG_S,
    progress: Progress | None = None,
    again: Progress | None = None,
) -> Tuned:
    """Tunes like `several_gpus.tune_on`, on the GPUs of a Dask scheduler's workers.

    Each worker process measures on the first GPU that it sees. Workers that join later get work in
    the next run.

    Args:
        address: Scheduler; see `scheduler_connection.check_address`.
        paths: Bundles to tune, which are sent to the workers.
        output: Bundle to write.
        options: Problems and kernels to measure, and the budget.
        allow_insecure: True to allow a scheduler without TLS on another machine.
        bench: Function that creates the bench in a measuring process, as ``module:function``.
        hang_s: Seconds after which a contender that has not returned counts as hanging.
        progress: Called with all parts' problems, done and in total.
        again: Called likewise for second measurements.

    Raises:
        ExecutorError: If the scheduler, or too many workers, are lost or cannot be used.
        NvgemmError: As `several_gpus.tune_on`.
        ValueError: If the address is not allowed.
    """
    begin = time.monotonic()
    gather(output)
    refuse_foreign_measurements(output, Facts(Journal(state_path(output), {}).facts).written)
    with contextlib.ExitStack() as stack:
        bundles = [stack.enter_context(open_checked(path)) for path in paths]
        client = stack.enter_context(connect(address, allow_insecure=allow_insecure))
        workers = GpuWorkers(client, output.absolute(), bundles, bench, hang_s)
        workers.find(options.confirms)
        tuning = _Tuning(client, workers, output.absolute(), bundles, bench, hang_s)

        def left(**changes: Any) -> TuningOptions:
            if options.budget_s is not None:
                spent_s = time.monotonic() - begin
                changes = {"budget_s": max(0.0, options.budget_s - spent_s), **changes}
            return replace(options, **changes)

        first = options.confirms == 1 and options.repeats
        runs = [tuning.measure(left(repeats=first), progress, again)]
        if options.confirms > 1 and options.repeats and has_unconfirmed(paths, output):
            runs.append(tuning.measure(left(), progress, again))
        tuned = tuning.write(replace(options, budget_s=0.0))
    return with_parts(tuned, output, options, runs)


class _Tuning:
    """One tuning: its parts, which workers measure, and its bundle."""

    def __init__(
        self,
        client: Any,
        workers: GpuWorkers,
        output: Path,
        bundles: Sequence[Bundle],
        bench: str,
        hang_s: float,
    ) -> None:
        self._client, self._workers = client, workers
        self._output, self._bundles = output, bundles
        self._bench, self._hang_s = bench, hang_s

    def measure(
        self, options: TuningOptions, progress: Progress | None, again: Progress | None
    ) -> list[Measured]:
        """Measures until no worker is lost meanwhile, and gathers the parts.

        Returns:
            Results of the parts, without those of lost workers.

        Raises:
            NvgemmError: If a part fails, or too few workers are left.
        """
        begin, before = time.monotonic(), list[Measured]()
        while True:
            left = options
            if options.budget_s is not None:
                spent_s = time.monotonic() - begin
                left = replace(options, budget_s=max(0.0, options.budget_s - spent_s))
            with gathering(self._output):
                measured, lost = self._measure_once(left, progress, again)
            if not lost:
                now = sum(part.measured_now for part in before)
                measured[0] = replace(measured[0], measured_now=measured[0].measured_now + now)
                return measured
            before += measured
            for worker, reason in lost:
                _log.warning(
                    "worker %s was lost (%s); the others measure the rest", worker.address, reason
                )
                self._workers.in_use.remove(worker)
            count = len(self._workers.in_use)
            if count < options.confirms:
                raise ExecutorError(
                    f"{count} workers are left, and {options.confirms} are needed; "
                    + SAVED.format(self._output)
                )

    def _measure_once(
        self, options: TuningOptions, progress: Progress | None, again: Progress | None
    ) -> tuple[list[Measured], list[tuple[Worker, str]]]:
        workers = self._workers.in_use
        parts = divide(self._output, len(workers), options.confirms)
        topic = f"nvgemm-tune-{uuid.uuid4().hex}"
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        journals = PartJournals(parts, events, progress, again)
        wait = functools.partial(journals.keep, POLL_S)
        sent = self._sent(options)
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(reserved(part.output))
            stack.callback(journals.close)
            self._client.subscribe_topic(topic, lambda event: events.put(event[1]))
            stack.callback(self._unsubscribe, topic)
            futures = [
                self._workers.submit(
                    worker.address, measure_on_worker, sent, part, topic, worker.bundles
                )
                for worker, part in zip(workers, parts)
            ]
            measured, lost = [], []
            try:
                for worker, part, future in zip(workers, parts, futures):
                    try:
                        one, lines = self._workers.result(worker.address, future, wait)
                    except LostError as error:
                        lost.append((worker, str(error)))
                        continue
                    journals.complete(part, lines)
                    measured.append(one)
            except BaseException:
                self._end(futures, journals)
                raise
        return measured, lost

    def _end(self, futures: list[Any], journals: PartJournals) -> None:
        """Interrupts the workers, and keeps what they send until they have ended."""
        with contextlib.suppress(Exception):
            in_use = {worker.address for worker in self._workers.in_use}
            running = sum(future.status == "pending" for future in futures)
            self._client.cancel(futures, force=True)
            limit = time.monotonic() + GRACE_S
            while journals.ended < len(futures) and running and time.monotonic() < limit:
                if in_use.isdisjoint(self._workers.addresses()):
                    break
                journals.keep(POLL_S)

    def write(self, options: TuningOptions) -> Tuned:
        """Lets a worker write the bundle, which comes back here; see `keep_returned`.

        Raises:
            NvgemmError: As `tune_bundles.tune`, or if no worker is left.
        """
        for worker in self._workers.in_use:
            future = self._workers.submit(
                worker.address, write_on_worker, self._sent(options), worker.bundles
            )
            try:
                tuned, data, first = self._workers.result(worker.address, future)
            except LostError as error:
                _log.warning("worker %s was lost (%s)", worker.address, error)
                continue
            header = keep_returned(data, first, self._bundles, self._output, worker.address)
            result: Tuned = replace(
                tuned,
                path=self._output,
                header=header,
                file_bytes=len(data),
                state=tuned.state and state_path(self._output),
            )
            return result
        raise ExecutorError(f"all workers were lost; {SAVED.format(self._output)}")

    def _sent(self, options: TuningOptions) -> SentTuning:
        path = state_path(self._output)
        return SentTuning(
            output=self._output,
            journal=path.read_bytes() if path.exists() else b"",
            options=options,
            bench=self._bench,
            hang_s=self._hang_s,
            log_level=logging.getLogger().getEffectiveLevel(),
        )

    def _unsubscribe(self, topic: str) -> None:
        with contextlib.suppress(Exception):
            self._client.unsubscribe_topic(topic)
