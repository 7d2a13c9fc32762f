"""Tuning state: outcomes in a file next to the output, which survives interruptions.

The file's first line identifies the tuning. Each further line adds a fact: an outcome, a look for
other work, a contender that broke the device, a written bundle. During a contender's first run, the
last line names it; it remains there only if the process is killed then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, NoReturn

from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, StorageError, TuningError

from ..rankings.agreement import ATEN, TRITON, contender_name
from ..storage.files import require_writable, sweep_partials_of
from ..storage.locks import acquire
from .outcome import Moment, Repeat, TuningOutcome, outcome_json, read_outcome


@contextlib.contextmanager
def reserved(output: Path) -> Iterator[None]:
    """Locks an output, so that no other process tunes into it.

    Raises:
        StorageError, TuningError: If it cannot be written, or another process holds it.
    """
    if output.is_dir():
        raise StorageError(f"{output}: cannot write: it is a directory; name a file in it")
    require_writable(output.parent)
    lock = acquire(output.with_name(f".{output.name}.lock"), wait=False)
    if lock is None:
        raise TuningError(
            f"{output}: another process is tuning into it; wait until it ends, or name another "
            "output"
        )
    try:
        sweep_partials_of(output)
        yield
    finally:
        lock.release()


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


Line = Mapping[str, Any]

_BEGIN = b'{"version": '
"""Prefix for every first line, in any version."""


class Journal:
    """File of JSON objects, one per line, to which one process at a time appends.

    The first appended line creates the file and writes ``first`` before it.

    Attributes:
        lines: Lines found at opening, with the first among them. Text after the last line feed was
            unfinished when its writer was killed, and is left out.

    Raises:
        StorageError: If the file cannot be read, or is damaged.
    """

    def __init__(self, path: Path, first: Line) -> None:
        self._path = path
        self._first = first
        self._file: IO[bytes] | None = None
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise StorageError(f"{path}: cannot read: {error.strerror}") from error
        self._end = data.rfind(b"\n") + 1
        self._size_bytes = len(data)
        self.lines = [self._parsed(line) for line in data[: self._end].split(b"\n")[:-1]]
        if not self._end and not _BEGIN.startswith(data[: len(_BEGIN)]):
            self.fail(f"its first line does not end: {data[:40]!r}")

    def _parsed(self, line: bytes) -> Line:
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError) as error:
            self.fail(f"{type(error).__name__} in {line[:40]!r}")
        if not isinstance(parsed, dict):
            self.fail(f"{line[:40]!r} is not a JSON object")
        return parsed

    def fail(self, what: str) -> NoReturn:
        """Raises the StorageError for a damaged file."""
        raise StorageError(
            f"{self._path}: the tuning state is damaged ({what}); remove it and the output next to "
            "it to start over"
        )

    def append(self, line: Line, *, sync: bool = True) -> None:
        """Appends a line; with ``sync``, the line also outlives a machine crash.

        Raises:
            StorageError: If the file cannot be written, or another process writes it too.
        """
        data = (b"" if self._end else _encode(self._first)) + _encode(line)
        with self._writing(f"{len(data)} bytes"):
            if self._file is None:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._file = os.fdopen(descriptor, "r+b", buffering=0)
            self._cut(self._end)  # drops an unfinished line
            self._file.seek(self._end)
            self._size_bytes += self._file.write(data)
            if self._size_bytes < self._end + len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(self._file.fileno())
        self._end += len(data)

    @contextlib.contextmanager
    def meanwhile(self, line: Line) -> Iterator[None]:
        """Keeps a line at the end during the block; it remains only if the process is killed.

        If the block fails, its error stays the cause for an error that `append` raises.
        """
        end = self._end or len(_encode(self._first))
        self.append(line, sync=False)
        try:
            yield
        finally:
            with self._writing("the removal of a line"):
                self._cut(end)
            self._end = end

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._path}: cannot write {what}: {error.strerror}; earlier measurements "
                "are saved, and the same command continues"
            ) from error

    def _cut(self, end: int) -> None:
        """Truncates the file, unless another process has written it too.

        Locks should prevent that, but some file systems have none.
        """
        assert self._file is not None
        actual_bytes = os.fstat(self._file.fileno()).st_size
        if actual_bytes != self._size_bytes:
            self._file.close()
            self._file = None
            raise StorageError(
                f"{self._path}: has {actual_bytes} bytes, but {self._size_bytes} when this process "
                "last used it: another process tunes into the same output; wait until it ends, or "
                "name another output"
            )
        self._file.truncate(end)
        self._size_bytes = end

    def close(self) -> None:
        """Closes the file; removes it if it has no facts."""
        if self._file is not None:
            self._file.close()
            if self._end <= len(_encode(self._first)):
                self._path.unlink(missing_ok=True)


def _encode(line: Line) -> bytes:
    return json.dumps(line).encode() + b"\n"


_log = logging.getLogger(__name__)

VERSION = 6
"""File format version. Version 3 may hold verdicts from a check that rejected correct kernels;
version 4 may hold times for launches back to back; version 5 lacks measurement times."""

PROCESS = uuid.uuid4().hex
"""This process's name in the states that it writes."""

MOST_KILLS = 2
"""Kills during a kernel's first run on a problem, and measuring process deaths during its runs,
after which the kernel counts as broken. ATen and Triton are skipped for that problem instead. A
single kill may well be a job's time limit, or a lack of memory."""
KILLED = "the run that measured it was killed before other work on the GPU was looked for"
"""Doubt for outcomes not confirmed before the run was killed."""


def state_path(output: Path) -> Path:
    """Returns a tuning's state file path, next to its output."""
    return output.with_name(f"{output.name}.tuning.jsonl")


def measured_keys(output: Path) -> frozenset[str]:
    """Returns the keys of problems for which an output's state has an outcome.

    Raises:
        StorageError: If the state cannot be read, or is damaged.
    """
    lines = Journal(state_path(output), {}).lines
    return frozenset(line["problem"] for line in lines if "outcome" in line)


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
    line = _encode(fact)
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


class TuningState:
    """Tuning outcomes, saved as they are added. One process at a time may open it.

    Refuses outcomes with another ``identity`` (bundles, GPU, versions …).

    Attributes:
        outcomes: First outcomes, by problem key.
        moments: Time and process for first measurements, by problem key.
        repeats: Later measurements by another process, by problem key.
        broken: Contenders that must not run again, by name, with the reason.
        hanging: Contenders that hang, each with the problem key and the observation; kernels are in
            ``broken`` too.
        written: Build keys that this tuning has written.

    Raises:
        StorageError: If the file cannot be read or written, or is damaged.
        TuningError: If it belongs to another tuning.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self.outcomes: dict[str, TuningOutcome] = {}
        self.moments: dict[str, Moment] = {}
        self.repeats: dict[str, Repeat] = {}
        self.broken: dict[str, str] = {}
        self.hanging: list[tuple[str, str]] = []
        self.written: set[str] = set()
        self._path = path
        self._unconfirmed: set[str] = set()
        self._unconfirmed_repeats: set[str] = set()
        self._running: tuple[str, str] | None = None
        self._kills: Counter[tuple[str, str]] = Counter()
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

    def take(self, part: Path, identity: Mapping[str, str]) -> None:
        """Adds all that another GPU's part of this tuning has saved; nothing if there is no file.

        Raises:
            StorageError: If the part's file cannot be read or written, or is damaged.
            TuningError: If it belongs to another tuning.
        """
        # Opening it notes what a killed process has left open.
        TuningState(part, identity).close()
        for line in Journal(part, {}).lines[1:]:
            if line.keys().isdisjoint(("written", "running")):
                self._journal.append(line, sync=False)
                self._apply_line(line)

    def is_of_another_process(self, key: str) -> bool:
        """Returns True if another process measured a problem first."""
        return self.moments[key].process != PROCESS

    def add_repeat(self, key: str, repeat: Repeat) -> None:
        """Adds a second measurement for a problem with an outcome, as `add` does."""
        repeat_json = outcome_json(repeat.outcome)
        self._journal.append({"problem": key, "repeat": repeat_json, "after_s": repeat.after_s})
        self._add_repeat(key, repeat)

    @property
    def is_confirmed(self) -> bool:
        """True if all outcomes are confirmed."""
        return not self._unconfirmed and not self._unconfirmed_repeats

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

    def left_out(self, key: str) -> set[str]:
        """Returns contenders that must not run on a problem again, as earlier runs were killed."""
        return {
            name for (name, on), kills in self._kills.items() if on == key and kills >= MOST_KILLS
        }

    def trying(self, contender: str, key: str) -> AbstractContextManager[None]:
        """Notes a contender's first run on a problem in the file, during the block."""
        return self._journal.meanwhile({"running": contender, "on": key})

    def close(self) -> None:
        """Closes the file."""
        self._journal.close()

    def _read(self, identity: Mapping[str, str]) -> None:
        first, *lines = self._journal.lines
        self._check_identity(first, identity)
        for line in lines:
            try:
                self._apply_line(line)
            except (ValueError, KeyError, TypeError) as error:
                self._journal.fail(f"{type(error).__name__}: {error}")
        if self._running is not None:
            self._add_kill(*self._running)  # before another line hides that line
        if not self.is_confirmed:
            self.confirm(KILLED)

    def _check_identity(self, first: Line, identity: Mapping[str, str]) -> None:
        version, recorded = first.get("version"), first.get("identity")
        if type(version) is not int or not isinstance(recorded, dict):
            self._journal.fail("its first line lacks a version or an identity")
        if version != VERSION:
            raise TuningError(
                f"{self._path}: state of version {version}, this release reads {VERSION}; finish "
                "it with the release that wrote it, or choose another output"
            )
        for name in [*identity, *recorded]:
            current, previous = identity.get(name, "none"), recorded.get(name, "none")
            if current != previous:
                raise TuningError(
                    f"{self._path} belongs to another tuning: its {name} is {previous}, here it is "
                    f"{current}; choose another output, or remove it and the output next to it"
                )

    def _apply_line(self, line: Line) -> None:
        self._running = None
        if "outcome" in line:
            moment = Moment(at_s=float(line["at_s"]), process=line["process"])
            self._add(line["problem"], read_outcome(line["outcome"]), moment)
        elif "repeat" in line:
            repeat = Repeat(outcome=read_outcome(line["repeat"]), after_s=int(line["after_s"]))
            self._add_repeat(line["problem"], repeat)
        elif "confirmed" in line:
            self._confirm(line["confirmed"])
        elif "broken" in line:
            self.broken[line["broken"]] = line["reason"]
        elif "written" in line:
            self.written.add(line["written"])
        elif "hangs" in line:
            self._add_hang(line["hangs"], line["on"], line["reason"])
        elif "died" in line:
            self._add_death(line["died"], line["on"], line["reason"])
        elif "killed" in line:
            self._kills[line["killed"], line["on"]] += 1
        else:
            self._running = line["running"], line["on"]

    def _add(self, key: str, outcome: TuningOutcome, moment: Moment) -> None:
        self.outcomes[key], self.moments[key] = outcome, moment
        self._unconfirmed.add(key)
        self.repeats.pop(key, None)  # it repeats a replaced outcome
        self._unconfirmed_repeats.discard(key)

    def _add_repeat(self, key: str, repeat: Repeat) -> None:
        self.repeats[key] = repeat
        self._unconfirmed_repeats.add(key)

    def _add_hang(self, contender: str, key: str, reason: str) -> None:
        fault = f"{key}: {reason}"
        self.hanging.append((contender, fault))
        if contender in (ATEN, TRITON):
            self._kills[contender, key] = MOST_KILLS
        else:
            self.broken[contender] = fault

    def _add_death(self, contender: str, key: str, reason: str) -> None:
        self._kills[contender, key] += 1
        kills = self._kills[contender, key]
        if kills >= MOST_KILLS and contender not in (ATEN, TRITON):
            self.broken[contender] = f"{key}: {reason} (time {kills} of {MOST_KILLS})"

    def _confirm(self, doubt: str | None) -> None:
        if doubt is not None:
            for key in self._unconfirmed:
                outcome = self.outcomes[key]
                self.outcomes[key] = replace(outcome, doubts=(*outcome.doubts, doubt))
            for key in self._unconfirmed_repeats:
                repeat = self.repeats[key]
                doubts = (*repeat.outcome.doubts, doubt)
                outcome = replace(repeat.outcome, doubts=doubts)
                self.repeats[key] = replace(repeat, outcome=outcome)
        self._unconfirmed.clear()
        self._unconfirmed_repeats.clear()

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
