"""Tunes over Dask workers with GPUs: a part of the problems on each worker.

Workers send what they measure as it comes, and the client keeps it in the parts' journals beside
the output. What a lost worker has not measured is divided among the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import ExecutorError, NvgemmError, TuningError, one_line
from nvgemm_runtime.installed.policy_checks import check_bundle
from nvgemm_runtime.installed.signatures import encode_signatures, read_signatures

from ...pipeline.executor.scheduler_connection import connect, workers_of
from ..part_measuring import Measured, Part
from ..session import Progress
from ..state.facts import Facts
from ..state.gathering import gather
from ..state.journal import Journal, Line, reserved, state_path
from ..state.tuning_state import refuse_foreign_measurements
from ..tune_bundles import Tuned, TuningOptions
from ..watchdog import GPU_BENCH, GRACE_S, HANG_S, IDLE_FACTOR
from .gpu_identities import GpuIdentity, refuse_unlike
from .returned_bundle import keep_returned
from .several_gpus import (
    SummedProgress,
    divide,
    gathering,
    has_unconfirmed,
    left_to_repeat,
    with_parts,
)
from .worker_tasks import (
    SentBundle,
    SentTuning,
    identify_worker,
    measure_on_worker,
    write_on_worker,
)

_log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks for lost workers."""

SAVED = "measurements are saved beside {}, and the same command continues"


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
        bundles = [stack.enter_context(_open_bundle(path)) for path in paths]
        client = stack.enter_context(connect(address, allow_insecure=allow_insecure))
        fleet = _Fleet(client, output.absolute(), bundles, bench, hang_s)
        fleet.find(options.confirms)

        def left(**changes: Any) -> TuningOptions:
            if options.budget_s is not None:
                spent_s = time.monotonic() - begin
                changes = {"budget_s": max(0.0, options.budget_s - spent_s), **changes}
            return replace(options, **changes)

        first = options.confirms == 1 and options.repeats
        measured = fleet.measure(left(repeats=first), progress, again)
        last = measured
        if options.confirms > 1 and options.repeats and has_unconfirmed(paths, output):
            last = fleet.measure(left(), progress, again)
        tuned = fleet.write(replace(options, budget_s=0.0))
    return with_parts(
        tuned,
        last,
        measured if last is not measured else (),
        unrepeated=left_to_repeat(output, tuned) if options.repeats else 0,
    )


@contextlib.contextmanager
def _open_bundle(path: Path) -> Iterator[Bundle]:
    with Bundle(path) as bundle:
        check_bundle(path, bundle.prefix)
        yield bundle


def _sent_bundle(bundle: Bundle) -> SentBundle:
    signatures = read_signatures(bundle.path)
    return SentBundle(
        path=bundle.path.absolute(),
        data=bundle.content(),
        signatures=encode_signatures(signatures) if signatures else None,
    )


@dataclass(kw_only=True)
class _Worker:
    """A worker in use: its address, and its future with the bundles."""

    address: str
    bundles: Any


class _Fleet:
    """Workers of a scheduler that share a tuning."""

    def __init__(
        self, client: Any, output: Path, bundles: list[Bundle], bench: str, hang_s: float
    ) -> None:
        self._client, self._output, self._bundles = client, output, bundles
        self._bench, self._hang_s = bench, hang_s
        self._limit_s = hang_s * IDLE_FACTOR
        self._workers: list[_Worker] = []

    def find(self, confirms: int) -> None:
        """Finds the workers that can measure.

        Raises:
            ExecutorError: If there is none.
            TuningError: If they differ; see `refuse_unlike`.
        """
        found = {
            address: self._submit(address, identify_worker, self._bench, self._hang_s)
            for address in self._addresses()
        }
        identities: dict[str, GpuIdentity] = {}
        refused: list[str] = []
        deadline = time.monotonic() + self._limit_s
        for address, future in found.items():
            try:
                answer = self._result(address, future, deadline=deadline)
            except (_LostError, TuningError) as error:
                answer = str(error).removeprefix(f"worker {address}: ")
            if isinstance(answer, GpuIdentity):
                identities[f"worker {address}"] = answer
            else:
                refused.append(f"worker {address}: {answer}")
        if not identities:
            raise ExecutorError(
                f"no worker of {self._client.scheduler.address} can measure "
                f"({'; '.join(refused) or 'it has none'}); start dask worker on machines with GPUs"
            )
        for reason in refused:
            _log.warning("%s; it gets no work", reason)
        refuse_unlike(identities, confirms=confirms)
        sent = [_sent_bundle(bundle) for bundle in self._bundles]
        for name in identities:
            address = name.removeprefix("worker ")
            (bundles,) = self._client.scatter([sent], workers=[address], hash=False)
            self._workers.append(_Worker(address=address, bundles=bundles))

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
                self._workers.remove(worker)
            if len(self._workers) < options.confirms:
                raise ExecutorError(
                    f"{len(self._workers)} workers are left, and {options.confirms} are needed; "
                    + SAVED.format(self._output)
                )

    def _measure_once(
        self, options: TuningOptions, progress: Progress | None, again: Progress | None
    ) -> tuple[list[Measured], list[tuple[_Worker, str]]]:
        parts = divide(self._output, len(self._workers), options.confirms)
        topic = f"nvgemm-tune-{uuid.uuid4().hex}"
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        journals = _PartJournals(parts, events, progress, again)
        tuning = self._sent(options)
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(reserved(part.output))
            stack.callback(journals.close)
            self._client.subscribe_topic(topic, lambda event: events.put(event[1]))
            stack.callback(self._unsubscribe, topic)
            futures = [
                self._submit(worker.address, measure_on_worker, tuning, part, topic, worker.bundles)
                for worker, part in zip(self._workers, parts)
            ]
            measured, lost = [], []
            try:
                for worker, part, future in zip(self._workers, parts, futures):
                    try:
                        one, lines = self._result(worker.address, future, journals)
                    except _LostError as error:
                        lost.append((worker, str(error)))
                        continue
                    journals.complete(part, lines)
                    measured.append(one)
            except BaseException:
                self._end(futures, journals)
                raise
        return measured, lost

    def _end(self, futures: list[Any], journals: _PartJournals) -> None:
        """Interrupts the workers, and keeps what they send until they have ended."""
        with contextlib.suppress(Exception):
            running = sum(future.status == "pending" for future in futures)
            self._client.cancel(futures, force=True)
            limit = time.monotonic() + GRACE_S
            while journals.ended < len(futures) and running and time.monotonic() < limit:
                if not set(self._addresses()) & {worker.address for worker in self._workers}:
                    break
                journals.keep(POLL_S)

    def write(self, options: TuningOptions) -> Tuned:
        """Lets a worker write the bundle, which comes back here; see `keep_returned`.

        Raises:
            NvgemmError: As `tune_bundles.tune`, or if no worker is left.
        """
        for worker in self._workers:
            future = self._submit(
                worker.address, write_on_worker, self._sent(options), worker.bundles
            )
            try:
                tuned, data, first = self._result(worker.address, future)
            except _LostError as error:
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

    def _submit(self, address: str, function: Any, *arguments: Any) -> Any:
        return self._client.submit(
            function,
            *arguments,
            workers=[address],
            allow_other_workers=False,
            pure=False,
            retries=0,
        )

    def _addresses(self) -> list[str]:
        """Returns the workers' addresses.

        Raises:
            ExecutorError: If the scheduler is gone.
        """
        try:
            if self._client.status == "running":
                return sorted(workers_of(self._client))
            reason = f"its connection is {self._client.status}"
        except (OSError, TimeoutError) as error:
            reason = one_line(str(error))
        raise ExecutorError(f"the scheduler was lost ({reason}); {SAVED.format(self._output)}")

    def _result(
        self,
        address: str,
        future: Any,
        journals: _PartJournals | None = None,
        deadline: float = math.inf,
    ) -> Any:
        """Waits for a future's result, and keeps what workers send meanwhile.

        Raises:
            _LostError: If its worker is lost, or has not answered at the deadline.
            NvgemmError: The task's, or if the scheduler is lost.
        """
        while not future.done():
            if address not in self._addresses():
                self._client.cancel([future], force=True)
                raise _LostError("it left the scheduler")
            if time.monotonic() > deadline:
                self._client.cancel([future], force=True)
                raise _LostError("it has not answered: is it busy with other work?")
            if journals is None:
                time.sleep(POLL_S / 5)
            else:
                journals.keep(POLL_S)
        try:
            return self._answer(address, future)
        except (OSError, asyncio.TimeoutError) as error:
            raise _LostError(f"its answer does not arrive ({type(error).__name__})") from None

    def _answer(self, address: str, future: Any) -> Any:
        """Returns a done future's result; see `_result`."""
        if future.status == "finished":
            return future.result(timeout=self._limit_s)
        if future.status != "error":
            self._addresses()  # names a scheduler that took all workers with it
            raise _LostError(f"its task is {future.status}")
        error = future.exception(timeout=self._limit_s)
        if isinstance(error, NvgemmError):
            raise error
        text = f"{type(error).__name__}: {one_line(str(error))}"
        if type(error).__module__.startswith("distributed"):
            raise _LostError(text)
        raise TuningError(
            f"worker {address}: {text}; it needs the client's Python, nvgemm-aot and torch, and "
            "the scheduler that Python and nvgemm-aot"
        )

    def _unsubscribe(self, topic: str) -> None:
        with contextlib.suppress(Exception):
            self._client.unsubscribe_topic(topic)


class _LostError(Exception):
    """A worker is lost."""


@dataclass(kw_only=True)
class _PartJournal:
    """A part's journal here, and the number of lines that it has of the worker's."""

    path: Path
    journal: Journal | None = None
    count: int = 0

    def add(self, lines: Sequence[Line], at: int = 0) -> None:
        """Appends those of the worker's lines from ``at`` that the file lacks."""
        for line in lines[max(0, self.count - at) :]:
            if self.journal is None:
                self.journal = Journal(self.path, line)
            else:
                self.journal.append(line)
            self.count += 1


@dataclass
class _PartJournals:
    """Journals of parts on workers, and their progress, from events."""

    parts: Sequence[Part]
    events: queue.SimpleQueue[dict[str, Any]]
    progress: Progress | None
    again: Progress | None
    ended: int = 0
    journals: dict[str, _PartJournal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sums = {
            name: SummedProgress(report=report, parts=len(self.parts))
            for name, report in (("progress", self.progress), ("again", self.again))
        }
        self._reports = {
            (part.output.name, name): one.of(index)
            for index, part in enumerate(self.parts)
            for name, one in sums.items()
        }
        for part in self.parts:
            self.journals[part.output.name] = _PartJournal(path=state_path(part.output))

    def keep(self, seconds: float) -> None:
        """Waits for an event, and takes all that have come."""
        with contextlib.suppress(queue.Empty):
            self._take(self.events.get(timeout=seconds))
            while True:
                self._take(self.events.get_nowait())

    def _take(self, event: dict[str, Any]) -> None:
        name = event["part"]
        self.ended += "ended" in event
        self.journals[name].add(event.get("lines", ()), event.get("at", 0))
        for kind in ("progress", "again"):
            report = self._reports[name, kind]
            if kind in event and report is not None:
                report(*event[kind])

    def complete(self, part: Part, lines: Sequence[Line]) -> None:
        """Adds those of a finished part's lines that no event has brought."""
        self.journals[part.output.name].add(lines)

    def close(self) -> None:
        """Keeps what has come, and closes the files."""
        self.keep(0.0)
        for one in self.journals.values():
            if one.journal is not None:
                one.journal.close()
