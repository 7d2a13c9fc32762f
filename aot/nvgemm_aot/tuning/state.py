"""What a tuning has measured so far, in a file that outlives an interruption.

Its first line says what tuning it is; each other one adds what became known: an outcome, that other
work was looked for, that a contender broke the device, what bundle came of it. Which contender runs
for the first time stands on the last line meanwhile: it is still there where that run never came
back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from nvgemm_runtime.errors import TuningError

from .contenders import ATEN, TRITON
from .journal import Journal, Line
from .outcome import Outcome, contender_name
from .outcome_json import outcome_json, read_outcome, read_text

_log = logging.getLogger(__name__)

VERSION = 4
"""Of the file. States of version 3 may hold verdicts of a check that called right kernels wrong."""

MOST_KILLS = 2
"""A kernel that was running for the first time on a problem when so many runs were killed counts as
broken; ATen and Triton are left out of that problem. One kill may well be a job's time limit."""


KILLED = "the run that measured it was killed before other work on the GPU was looked for"
"""Doubt of outcomes that were not confirmed."""


def state_path(output: Path) -> Path:
    """Where the state of a tuning lies: beside what it is to write."""
    return output.with_name(f"{output.name}.tuning.jsonl")


class TuningState:
    """The outcomes of a tuning, by problem key. One process at a time may have it.

    Args:
        path: The file; read if it is there, and made with the first that is added.
        identity: What must be equal for outcomes to belong to this tuning: bundles, GPU, versions.
        ids: Of the kernels that are tuned.

    Attributes:
        outcomes: Those that are known.
        broken: By name, contenders that are not to be run again, and why.
        written: Build keys of the bundles that came of it.

    Raises:
        StorageError: If the file cannot be read or written, or is damaged.
        TuningError: If it belongs to another tuning.
    """

    def __init__(self, path: Path, identity: Mapping[str, str], ids: Collection[str]) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.broken: dict[str, str] = {}
        self.written: set[str] = set()
        self._path = path
        self._ids = ids
        self._unconfirmed: set[str] = set()
        self._running: tuple[str, str] | None = None
        self._kills: Counter[tuple[str, str]] = Counter()
        self._journal = Journal(path, {"version": VERSION, "identity": dict(identity)})
        if self._journal.lines:
            self._read(identity)

    def add(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome, which is doubted in later runs if this one does not confirm it.

        Raises:
            StorageError: If the file cannot be written; likewise of the others.
        """
        self._journal.append({"problem": key, "outcome": outcome_json(outcome)})
        self.outcomes[key] = outcome
        self._unconfirmed.add(key)

    @property
    def is_confirmed(self) -> bool:
        """Whether all outcomes are."""
        return not self._unconfirmed

    def confirm(self, doubt: str | None) -> None:
        """Say of what was added since the last time whether anything disturbed it.

        Args:
            doubt: Why none of that is to be relied on, or None.
        """
        self._journal.append({"confirmed": doubt})
        self._confirm(doubt)

    def add_broken(self, contender: str, reason: str) -> None:
        """Keep that a contender is not to be run again, and why."""
        self._journal.append({"broken": contender, "reason": reason})
        self.broken[contender] = reason

    def add_written(self, build_key: str) -> None:
        """Keep, before it is written, that a bundle with measurements comes of this tuning."""
        if build_key not in self.written:
            self._journal.append({"written": build_key})
            self.written.add(build_key)

    def left_out(self, key: str) -> set[str]:
        """Contenders that are not to be run again on a problem, for runs were killed there."""
        return {
            name for (name, on), kills in self._kills.items() if on == key and kills >= MOST_KILLS
        }

    def trying(self, contender: str, key: str) -> AbstractContextManager[None]:
        """Have it written down, meanwhile, which contender runs for the first time on a problem."""
        return self._journal.meanwhile({"running": contender, "on": key})

    def close(self) -> None:
        """Close the file."""
        self._journal.close()

    def _read(self, identity: Mapping[str, str]) -> None:
        first, *lines = self._journal.lines
        self._check_identity(first, identity)
        for line in lines:
            try:
                self._take(line)
            except (ValueError, KeyError) as error:
                self._journal.fail(f"{type(error).__name__}: {error}")
        if self._running is not None:
            self._add_kill(*self._running)  # first, while that is on the last line
        if self._unconfirmed:
            self.confirm(KILLED)

    def _check_identity(self, first: Line, identity: Mapping[str, str]) -> None:
        version, found = first.get("version"), first.get("identity")
        if type(version) is not int or not isinstance(found, dict):
            self._journal.fail("its first line names no version, or no tuning")
        if version != VERSION:
            raise TuningError(
                f"{self._path}: state of version {version}, this release reads {VERSION}; finish "
                "it with the release that wrote it, or choose another output"
            )
        for name in [*identity, *found]:
            here, there = identity.get(name), found.get(name)
            if here != there:
                raise TuningError(
                    f"{self._path} belongs to another tuning: its {name} is {there}, here it is "
                    f"{here}; choose another output, or remove it and the output beside it"
                )

    def _take(self, line: Line) -> None:
        self._running = None
        if "outcome" in line:
            key = read_text(line["problem"])
            self.outcomes[key] = read_outcome(line["outcome"], self._ids)
            self._unconfirmed.add(key)
        elif "confirmed" in line:
            doubt = line["confirmed"]
            self._confirm(None if doubt is None else read_text(doubt))
        elif "broken" in line:
            self.broken[read_text(line["broken"])] = read_text(line["reason"])
        elif "written" in line:
            self.written.add(read_text(line["written"]))
        elif "killed" in line:
            self._kills[read_text(line["killed"]), read_text(line["on"])] += 1
        else:
            self._running = read_text(line["running"]), read_text(line["on"])

    def _confirm(self, doubt: str | None) -> None:
        if doubt is not None:
            for key in self._unconfirmed:
                outcome = self.outcomes[key]
                self.outcomes[key] = replace(outcome, doubts=(*outcome.doubts, doubt))
        self._unconfirmed.clear()

    def _add_kill(self, contender: str, key: str) -> None:
        self._journal.append({"killed": contender, "on": key})
        self._kills[contender, key] += 1
        kills = self._kills[contender, key]
        said = (
            f"{key}: {contender_name(contender)} was killed in its first run, perhaps by a time "
            f"limit (time {kills} of {MOST_KILLS})"
        )
        _log.warning("%s", said)
        if kills >= MOST_KILLS and contender not in (ATEN, TRITON):
            self.add_broken(contender, said)
