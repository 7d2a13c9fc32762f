"""Tasks that a Dask worker with a GPU runs: they measure in a temporary directory.

What a task measures goes to the client as it comes, by Dask's events, so that a lost worker loses
the last second.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvgemm_runtime.errors import NvgemmError
from nvgemm_runtime.installed.signatures import signature_path

from ..part_measuring import Measured, Part, measure_part
from ..state.journal import Journal, Line, state_path
from ..tune_bundles import Tuned, TuningOptions
from ..watchdog import measure_watched, tune_watched
from .gpu_identities import GpuIdentity, identify

LOOK_S = 0.5
"""Seconds between two looks at a part's journal, and at the client's interest in the task."""


@dataclass(frozen=True, kw_only=True)
class SentBundle:
    """A bundle's path at the client, its bytes, and those of its signature file, if any."""

    path: Path
    data: bytes
    signatures: bytes | None


@dataclass(frozen=True, kw_only=True)
class SentTuning:
    """The client's tuning when a task begins.

    Attributes:
        output: Bundle to write at the client.
        journal: Bytes of the output's journal.
        options: Options, with what is left of the budget.
        bench: Function that creates the bench, as ``module:function``.
        hang_s: As for `watchdog.tune_watched`.
        log_level: Lowest level to report.
    """

    output: Path
    journal: bytes
    options: TuningOptions
    bench: str
    hang_s: float
    log_level: int


def identify_worker(bench: str, hang_s: float) -> GpuIdentity | str:
    """Returns the identity of a worker's first visible GPU, or why it cannot be used."""
    try:
        return identify(bench, hang_s=hang_s)
    except NvgemmError as error:
        return str(error)


def measure_on_worker(
    tuning: SentTuning, part: Part, topic: str, bundles: list[SentBundle]
) -> tuple[Measured, list[Line]] | None:
    """Measures a part on this worker's GPU.

    Returns:
        Its result and its journal's lines; None if the client no longer wants them.

    Raises:
        NvgemmError: As `watchdog.measure_watched`.
    """
    stop = threading.Event()
    with _unpacked(tuning, bundles) as (paths, output):
        here = replace(part, output=output.with_name(part.output.name))
        reports = _Reports(state_path(here.output), topic, part.output.name)
        watching = threading.Thread(target=reports.watch, args=(stop,))
        watching.start()
        try:
            measured = measure_watched(
                functools.partial(measure_part, paths, output, here),
                here.output,
                tuning.options,
                bench=tuning.bench,
                hang_s=tuning.hang_s,
                progress=reports.progress("progress"),
                again=reports.progress("again"),
                stop=stop,
            )
        except KeyboardInterrupt:
            return None
        finally:
            stop.set()
            watching.join()
            reports.end()
        return measured, Journal(state_path(here.output), {}).lines


def write_on_worker(tuning: SentTuning, bundles: list[SentBundle]) -> tuple[Tuned, bytes, Line]:
    """Writes the tuned bundle on this worker, and measures nothing.

    Returns:
        The result, the bundle's bytes, and the first line of the output's journal; it is empty if
        nothing was ever measured.

    Raises:
        NvgemmError: As `watchdog.tune_watched`.
    """
    with _unpacked(tuning, bundles) as (paths, output):
        tuned = tune_watched(
            paths, output, tuning.options, bench=tuning.bench, hang_s=tuning.hang_s
        )
        lines = Journal(state_path(output), {}).lines
        return tuned, output.read_bytes(), lines[0] if lines else {}


@contextlib.contextmanager
def _unpacked(tuning: SentTuning, bundles: list[SentBundle]) -> Iterator[tuple[list[Path], Path]]:
    """Yields paths of the bundles and the output in a temporary directory; removes it.

    Errors name the client's paths.
    """
    with tempfile.TemporaryDirectory(prefix="nvgemm-tune-") as name:
        directory = Path(name)
        paths = []
        for number, bundle in enumerate(bundles):
            paths.append(directory / str(number) / bundle.path.name)
            paths[-1].parent.mkdir()
            paths[-1].write_bytes(bundle.data)
            if bundle.signatures is not None:
                signature_path(paths[-1]).write_bytes(bundle.signatures)
        output = directory / tuning.output.name
        if tuning.journal:
            state_path(output).write_bytes(tuning.journal)
        before = logging.getLogger().level
        logging.getLogger().setLevel(tuning.log_level)
        try:
            yield paths, output
        except NvgemmError as error:
            text = str(error)
            for path, bundle in zip(paths, bundles):
                text = text.replace(str(path), str(bundle.path))
            error.args = (text.replace(name, str(tuning.output.parent)), *error.args[1:])
            raise
        finally:
            logging.getLogger().setLevel(before)


class _Reports:
    """Sends a part's journal lines and progress to the client, by events."""

    def __init__(self, journal: Path, topic: str, part: str) -> None:
        from distributed import get_worker

        self._journal, self._topic, self._part = journal, topic, part
        self._worker: Any = get_worker()
        self._key = self._worker.get_current_task()
        self._sent = 0

    def progress(self, name: str) -> Callable[[int, int], None]:
        """Returns a function that reports progress."""
        return lambda done, total: self._send({name: [done, total]})

    def watch(self, stop: threading.Event) -> None:
        """Sends lines until ``stop`` is set; sets it if the client no longer wants the task."""
        while not stop.wait(LOOK_S):
            self._send_lines()
            task = self._worker.state.tasks.get(self._key)
            if task is None or task.state != "executing":
                stop.set()

    def end(self) -> None:
        """Sends the last lines, and that there are no more."""
        self._send_lines()
        self._send({"ended": True})

    def _send_lines(self) -> None:
        with contextlib.suppress(NvgemmError):  # a line that is being written
            lines = [line for line in Journal(self._journal, {}).lines if "running" not in line]
            if len(lines) > self._sent:
                self._send({"lines": lines[self._sent :], "at": self._sent})
                self._sent = len(lines)

    def _send(self, message: dict[str, Any]) -> None:
        self._worker.log_event(self._topic, {"part": self._part, **message})
