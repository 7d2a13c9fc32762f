"""Tuning state: outcomes in a file next to the output, which survives interruptions.

The file's first line identifies the tuning. Each further line adds a fact: an outcome, a look for
other work, a contender that broke the device, a written bundle. During a contender's first run, the
last line names it; it remains there only if the process is killed then.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, StorageError, TuningError

from ...rankings.agreement import ATEN, TRITON, contender_name
from ..outcome import Moment, Repeat, TuningOutcome, outcome_json
from .facts import MOST_KILLS, Facts
from .journal import Journal, Line, encode_line, state_path

_log = logging.getLogger(__name__)

VERSION = 6
"""File format version. Version 3 may hold verdicts from a check that rejected correct kernels;
version 4 may hold times for launches back to back; version 5 lacks measurement times."""

PROCESS = uuid.uuid4().hex
"""This process's name in the states that it writes."""

KILLED = "the run that measured it was killed before other work on the GPU was looked for"
"""Doubt for outcomes not confirmed before the run was killed."""


def refuse_foreign_measurements(output: Path, written: Collection[str]) -> None:
    """Raises a TuningError for a bundle with measurements whose key is not among ``written``."""
    if not output.exists():
        return
    try:
        with Bundle(output) as bundle:
            header = bundle.header
    except BundleFormatError:
        return
    is_measured = any(ranking.measured is not None for ranking in header.rankings)
    if is_measured and header.build_key not in written:
        raise TuningError(
            f"{output} holds measurements that are not in {state_path(output)} and would be lost; "
            "name another output, or remove this one"
        )


def add_hang(path: Path, contender: str, key: str, reason: str) -> None:
    """Notes in a killed tuning's state that a contender hangs.

    Raises:
        StorageError: If the file cannot be written.
    """
    _append_to_ended(path, {"hangs": contender, "on": key, "reason": reason})


def add_death(path: Path, contender: str, key: str, reason: str) -> None:
    """Notes in a tuning's state that its process died while a contender ran.

    Raises:
        StorageError: If the file cannot be written.
    """
    _append_to_ended(path, {"died": contender, "on": key, "reason": reason})


def _append_to_ended(path: Path, fact: Line) -> None:
    """Appends a line to a file whose process has ended."""
    line = encode_line(fact)
    try:
        with path.open("r+b") as file:
            end = file.read().rfind(b"\n") + 1  # an unfinished line may follow
            file.seek(end)
            file.truncate()
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        kind, contender = next(iter(fact.items()))
        raise StorageError(
            f"{path}: cannot write that {contender_name(contender)} {kind}: {error.strerror}"
        ) from error


class TuningState(Facts):
    """Tuning outcomes, saved as they are added. One process at a time may open it.

    Refuses outcomes with another ``identity`` (bundles, GPU, versions …).

    Args:
        path: File.
        identity: Properties that all outcomes in a tuning share, by the name used in messages.
        before: Lines of other files of this tuning, whose facts come first.

    Raises:
        StorageError: If the file cannot be read or written, or is damaged.
        TuningError: If it belongs to another tuning.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, str], before: Iterable[Line] = ()
    ) -> None:
        super().__init__(before)
        self._journal = Journal(path, {"version": VERSION, "identity": dict(identity)})
        if self._journal.lines:
            self._read(identity)

    def add(self, key: str, outcome: TuningOutcome, at_s: float) -> None:
        """Adds an outcome measured now; later runs doubt it unless this run confirms it.

        Raises:
            StorageError: If the file cannot be written. The methods below raise it too.
        """
        moment = Moment(at_s=at_s, process=PROCESS)
        self._journal.append({"problem": key, "outcome": outcome_json(outcome), **asdict(moment)})
        self._add(key, outcome, moment)

    def is_of_another_process(self, key: str) -> bool:
        """Returns True if another process measured a problem first."""
        return self.moments[key].process != PROCESS

    def add_repeat(self, key: str, repeat: Repeat) -> None:
        """Adds a second measurement for a problem with an outcome, as `add` does."""
        repeat_json = outcome_json(repeat.outcome)
        self._journal.append({"problem": key, "repeat": repeat_json, "after_s": repeat.after_s})
        self._add_repeat(key, repeat)

    def confirm(self, doubt: str | None) -> None:
        """Confirms the outcomes added since the last call, or adds a doubt to them."""
        self._journal.append({"confirmed": doubt})
        self._confirm(doubt)

    def add_broken(self, contender: str, reason: str) -> None:
        """Notes that a contender must not run again, and the reason."""
        self._journal.append({"broken": contender, "reason": reason})
        self.broken[contender] = reason

    def add_written(self, build_key: str) -> None:
        """Notes a measured bundle's build key, before it is written."""
        if build_key not in self.written:
            self._journal.append({"written": build_key})
            self.written.add(build_key)

    def trying(self, contender: str, key: str) -> AbstractContextManager[None]:
        """Notes a contender's first run on a problem in the file, during the block."""
        return self._journal.meanwhile({"running": contender, "on": key})

    def close(self) -> None:
        """Closes the file."""
        self._journal.close()

    def _read(self, identity: Mapping[str, str]) -> None:
        check_identity(self._journal, identity)
        for line in self._journal.facts:
            try:
                self.apply(line)
            except (ValueError, KeyError, TypeError) as error:
                self._journal.fail(f"{type(error).__name__}: {error}")
        if self._running is not None:
            self._add_kill(*self._running)  # before another line hides that line
        if not self.is_confirmed:
            self.confirm(KILLED)

    def _add_kill(self, contender: str, key: str) -> None:
        self._journal.append({"killed": contender, "on": key})
        self._kills[contender, key] += 1
        kills = self._kills[contender, key]
        message = (
            f"{key}: {contender_name(contender)} was killed in its first run, perhaps by a time "
            f"limit (time {kills} of {MOST_KILLS})"
        )
        _log.warning("%s", message)
        if kills >= MOST_KILLS and contender not in (ATEN, TRITON):
            self.add_broken(contender, message)


def check_identity(journal: Journal, identity: Mapping[str, str]) -> None:
    """Raises a TuningError if a journal with lines belongs to another tuning."""
    first = journal.lines[0]
    version, recorded = first.get("version"), first.get("identity")
    if type(version) is not int or not isinstance(recorded, dict):
        journal.fail("its first line lacks a version or an identity")
    if version != VERSION:
        raise TuningError(
            f"{journal.path}: state of version {version}, this release reads {VERSION}; finish "
            "it with the release that wrote it, or choose another output"
        )
    for name in [*identity, *recorded]:
        current, previous = identity.get(name, "none"), recorded.get(name, "none")
        if current != previous:
            raise TuningError(
                f"{journal.path} belongs to another tuning: its {name} is {previous}, here it is "
                f"{current}; choose another output, or remove it and the output next to it"
            )
