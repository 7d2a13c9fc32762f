"""Processes that compile cases side by side, and then time them one after the other."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.additive.table import SIDES
from benchmarks.additive.worker import CALLS, GRAPHS
from benchmarks.shared.compiling import Worker, fresh_environment

BACKENDS = ("ATEN", "ATEN,TRITON")
"""What bundled kernels compete with: max_autotune_gemm_backends."""

DEFAULT = "default"
"""In place of backends: no max-autotune."""

TIMING_S = 3.0
"""Kept free of the time that there is, for each case that is compiled: it is timed later."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model at a batch, and what bundled kernels compete with there."""

    backends: str
    model: str
    batch: int

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        return f"{self.backends}/{self.model}/{self.batch}"


@dataclass
class Deadline:
    """Whether there is time to compile one more case, if it takes as long as its model ever took.

    Attributes:
        at: When all must be timed, by `time.monotonic`; None for never.
        cases: Cases that are compiled, or being compiled, and have yet to be timed.
        longest_s: How long a process took to compile a model, by its name.
    """

    at: float | None
    cases: set[Case] = field(default_factory=set)
    longest_s: dict[str, float] = field(default_factory=dict)

    def allows(self, case: Case) -> bool:
        """Whether to compile a case; from now on it counts, if so."""
        behind = len(self.cases | {case}) * TIMING_S
        expected = self.longest_s.get(case.model, max(self.longest_s.values(), default=0.0))
        if self.at is not None and time.monotonic() + expected + behind > self.at:
            return False
        self.cases.add(case)
        return True

    def note(self, case: Case, seconds: float) -> None:
        """Learn how long a process took."""
        self.longest_s[case.model] = max(self.longest_s.get(case.model, 0.0), seconds)


class Pool:
    """The workers over one choice of backends.

    Attributes:
        failures: How processes ended that should not have; what they compiled is not timed.
    """

    def __init__(self, workers: Sequence[Worker], draws: int) -> None:
        self.failures: list[str] = []
        self._workers = workers
        self._draws = draws

    def compile(self, cases: Sequence[Case], deadline: Deadline) -> dict[Case, list[Any]]:
        """Compile cases, each in as many processes as there are draws.

        A process takes its cases in their order and waits for no other. Of a case, one process
        comes after the other, so later ones find most of Triton's kernels compiled. Where one
        ends, the others begin nothing new.

        Returns:
            Of each case that all of its processes compiled: what each reports.
        """
        reports: dict[tuple[Case, int], Any] = {}
        ended: set[Worker] = set()

        def work(worker: Worker) -> None:
            for number, case in enumerate(cases):
                for draw in (d for d in range(self._draws) if self._worker(number, d) is worker):
                    if self.failures:
                        return
                    if not deadline.allows(case):
                        continue
                    begin = time.monotonic()
                    first = list(SIDES)[draw % len(SIDES)]
                    question = {"compile": [case.model, case.batch], "first": first}
                    try:
                        reports[case, draw] = worker.ask(question)
                    except click.ClickException as error:
                        self.failures.append(f"{case.key}: {error.message}")
                        ended.add(worker)
                        return
                    deadline.note(case, time.monotonic() - begin)
                    click.echo(f"compiled {case.key}, process {draw + 1}", err=True)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            for done in [threads.submit(work, worker) for worker in self._workers]:
                done.result()
        draws = range(self._draws)
        return {
            case: [reports[case, draw] for draw in draws]
            for number, case in enumerate(cases)
            if all((case, draw) in reports for draw in draws)
            and ended.isdisjoint(self._worker(number, draw) for draw in draws)
        }

    def _worker(self, number: int, draw: int) -> Worker:
        return self._workers[(number + draw) % len(self._workers)]

    def time(
        self, number: int, case: Case, reports: list[Any], rounds: int, window_ms: float
    ) -> dict[str, Any]:
        """Time a compiled case in each of its processes: an entry of the results.

        Args:
            number: Its place among those that `compile` was given.
            case: Which it is.
            reports: What `compile` returned of it.
            rounds: Windows a side.
            window_ms: How long each is.
        """
        on_gpu = reports[0]["with"]["versions"]["device"] != "cpu"
        workers = [self._worker(number, draw) for draw in range(self._draws)]
        modes = {}
        for mode in [CALLS, GRAPHS] if on_gpu else [CALLS]:
            question = {"time": [case.model, case.batch], "mode": mode}
            question.update(rounds=rounds, window_ms=window_ms)
            modes[mode] = {"times_us": [worker.ask(question) for worker in workers]}
        for report in (side for draw in reports for side in draw.values()):
            report.pop("versions")  # the file's environment has them, once
        named = {"backends": case.backends, "model": case.model, "batch": case.batch}
        return {**named, "modes": modes, "reports": reports}


@contextlib.contextmanager
def started(backends: str, processes: int, draws: int, device: str) -> Iterator[Pool]:
    """Start processes; Triton's compiled kernels are all that they share."""
    with contextlib.ExitStack() as stack:

        def directory() -> Path:
            path = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            return Path(stack.enter_context(path))

        shared = directory()
        workers = []
        for _ in range(max(draws, processes)):
            own = directory()
            environment = fresh_environment(
                own,
                TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS=None if backends == DEFAULT else backends,
                NVGEMM_AOT_DEFAULT_MODE="1" if backends == DEFAULT else None,
                TORCHINDUCTOR_COMPILE_THREADS="4",
                # Both sides are compiled, rather than one found where it equals the other.
                TORCHINDUCTOR_FX_GRAPH_CACHE="0",
                TORCHINDUCTOR_AUTOGRAD_CACHE="0",
                TRITON_CACHE_DIR=str(shared / "triton"),
            )
            arguments = ["worker", "--device", device, "--lock", str(shared / "lock")]
            worker = Worker("benchmarks.additive", arguments, own, environment)
            workers.append(stack.enter_context(worker))
        yield Pool(workers, draws)
