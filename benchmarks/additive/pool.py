"""Worker processes that compile cases side by side and time them one after the other."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.additive.table import SIDES
from benchmarks.additive.worker import FAILURE, modes_on
from benchmarks.shared.compiling import Worker, fresh_environment
from benchmarks.shared.resuming import MAX_FAILURES

BACKENDS = ("ATEN", "ATEN,TRITON")
"""max_autotune_gemm_backends that bundled kernels compete with."""

DEFAULT = "default"
"""Name for the comparison without max-autotune."""

REPEATED = "default-repeated"
"""Name for the comparison where repeated rankings count."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, batch and competing backends."""

    backends: str
    model: str
    batch: int

    @property
    def key(self) -> str:
        """Name in the results file."""
        return f"{self.backends}/{self.model}/{self.batch}"


@dataclass(kw_only=True)
class Deadline:
    """Decides if there is time to compile another case, by the model's longest compilation so far.

    Attributes:
        at_s: Time at which all must be timed, by `time.monotonic`; None for never.
        timing_s: Seconds to time a compiled case, of the slowest so far.
        longest_s: Longest compilation by model name.
    """

    at_s: float | None
    timing_s: float
    longest_s: dict[str, float] = field(default_factory=dict)
    _admitted: dict[Case, bool] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def admit(self, case: Case) -> bool:
        """Returns True if a case may be compiled, with the same answer for all its processes."""
        with self._lock:
            return self._admitted.setdefault(case, self._has_time(case))

    def _has_time(self, case: Case) -> bool:
        if self.at_s is None:
            return True
        compiling_s = self.longest_s.get(case.model, max(self.longest_s.values(), default=0.0))
        to_time = 1 + sum(self._admitted.values())
        return time.monotonic() + compiling_s + to_time * self.timing_s <= self.at_s

    def note_compiled(self, case: Case, seconds: float) -> None:
        """Records a process' compile time."""
        with self._lock:
            self.longest_s[case.model] = max(self.longest_s.get(case.model, 0.0), seconds)

    def note_timed(self, case: Case, seconds: float) -> None:
        """Releases a case's reserved time and records its timing time."""
        with self._lock:
            self.timing_s = max(self.timing_s, seconds)
            self._admitted.pop(case, None)


class Pool:
    """Workers for one backend choice.

    Attributes:
        failures: Failures by case; such a case is not timed.
    """

    def __init__(self, workers: Sequence[Worker], draws: int, modes: Sequence[str]) -> None:
        self.failures: list[str] = []
        self._workers = workers
        self._draws = draws
        self._modes = modes

    def compile(self, cases: Sequence[Case], deadline: Deadline) -> dict[Case, list[Any]]:
        """Compiles cases side by side, each in one process per draw.

        A process takes its cases in their order and waits for no other. After `MAX_FAILURES`, or
        where this process is interrupted, none begins anything new.

        Returns:
            Reports of each process, by case; only cases that all processes compiled.
        """
        reports: dict[tuple[Case, int], Any] = {}
        stop = threading.Event()

        def work(worker: Worker) -> None:
            for number, case in enumerate(cases):
                for draw in (d for d in range(self._draws) if self._worker(number, d) is worker):
                    if stop.is_set() or len(self.failures) >= MAX_FAILURES:
                        return
                    if not deadline.admit(case):
                        continue
                    begin = time.monotonic()
                    first = list(SIDES)[(number + draw) % len(SIDES)]
                    question = {"compile": [case.model, case.batch], "first": first}
                    report = self._ask(worker, question, case)
                    if report is not None:
                        reports[case, draw] = report
                        deadline.note_compiled(case, time.monotonic() - begin)
                        click.echo(f"compiled {case.key}, process {draw + 1}", err=True)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                for done in [threads.submit(work, worker) for worker in self._workers]:
                    done.result()
            except BaseException:
                stop.set()
                raise
        return {
            case: [reports[case, draw] for draw in range(self._draws)]
            for case in cases
            if all((case, draw) in reports for draw in range(self._draws))
        }

    def time(
        self, number: int, case: Case, reports: list[Any], rounds: int, window_ms: float
    ) -> dict[str, Any] | None:
        """Times a compiled case in all its processes.

        Args:
            number: Index among `compile`'s cases.
            case: Case to time.
            reports: `compile`'s reports for the case.
            rounds: Windows a side.
            window_ms: Window length.

        Returns:
            An entry of the results, or None where a process failed.
        """
        modes: dict[str, dict[str, Any]] = {}
        for mode in self._modes:
            question = {"time": [case.model, case.batch], "mode": mode}
            question.update(rounds=rounds, window_ms=window_ms)
            workers = (self._worker(number, draw) for draw in range(self._draws))
            times = [self._ask(worker, question, case) for worker in workers]
            if None in times:
                return None
            modes[mode] = {"times_us": times}
        named = {"backends": case.backends, "model": case.model, "batch": case.batch}
        return {**named, "modes": modes, "reports": reports}

    def forget(self) -> None:
        """Frees compiled cases."""
        for worker in self._workers:
            with contextlib.suppress(click.ClickException):  # the worker ended, as recorded
                worker.ask({"forget": True})

    def _worker(self, number: int, draw: int) -> Worker:
        return self._workers[(number + draw) % len(self._workers)]

    def _ask(self, worker: Worker, question: dict[str, Any], case: Case) -> Any:
        """Returns a worker's answer; None if it failed, which is recorded."""
        try:
            answer = worker.ask(question)
        except click.ClickException as error:  # the worker ended
            self.failures.append(f"{case.key}: {error.message}")
            return None
        if FAILURE in answer:
            self.failures.append(f"{case.key}: {answer[FAILURE]}")
            return None
        return answer


@contextlib.contextmanager
def started(backends: str, processes: int, draws: int, device: str) -> Iterator[Pool]:
    """Starts processes that share nothing but compiled Triton kernels."""
    with contextlib.ExitStack() as stack:

        def directory() -> Path:
            path = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            return Path(stack.enter_context(path))

        is_default = backends in (DEFAULT, REPEATED)
        shared = directory()
        workers = []
        for _ in range(max(draws, processes)):
            own = directory()
            environment = fresh_environment(
                own,
                TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS=None if is_default else backends,
                NVGEMM_AOT_DEFAULT_MODE="1" if is_default else "0",
                NVGEMM_AOT_REPEATED_RANKINGS="1" if backends == REPEATED else None,
                TORCHINDUCTOR_COMPILE_THREADS="4",
                # Compiles both sides, even if a cache could serve equal code.
                TORCHINDUCTOR_FX_GRAPH_CACHE="0",
                TORCHINDUCTOR_AUTOGRAD_CACHE="0",
                TRITON_CACHE_DIR=str(shared / "triton"),
            )
            arguments = ["worker", "--device", device, "--lock", str(shared / "lock")]
            worker = Worker("benchmarks.additive", arguments, own, environment)
            workers.append(stack.enter_context(worker))
        yield Pool(workers, draws, modes_on(device))
