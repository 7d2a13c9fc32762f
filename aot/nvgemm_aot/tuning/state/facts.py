"""Facts that a tuning's journal states, in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ...rankings.agreement import ATEN, TRITON
from ..outcome import Moment, Repeat, TuningOutcome, read_outcome
from .journal import Line

MOST_KILLS = 2
"""Kills during a kernel's first run on a problem, and measuring process deaths during its runs,
after which the kernel counts as broken. ATen and Triton are skipped for that problem instead. A
single kill may well be a job's time limit, or a lack of memory."""


class Facts:
    """Outcomes and broken contenders, as a journal's lines state them one after the other.

    Attributes:
        outcomes: First outcomes, by problem key.
        moments: Time and process for first measurements, by problem key.
        repeats: Later measurements by another process, by problem key.
        broken: Contenders that must not run again, by name, with the reason.
        hanging: Contenders that hang, each with the problem key and the observation; kernels are in
            ``broken`` too.
        written: Build keys that this tuning has written.
        taken: Digests of the parts' journals that this one includes.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.outcomes: dict[str, TuningOutcome] = {}
        self.moments: dict[str, Moment] = {}
        self.repeats: dict[str, Repeat] = {}
        self.broken: dict[str, str] = {}
        self.hanging: list[tuple[str, str]] = []
        self.written: set[str] = set()
        self.taken: set[str] = set()
        self._unconfirmed: set[str] = set()
        self._unconfirmed_repeats: set[str] = set()
        self._running: tuple[str, str] | None = None
        self._kills: Counter[tuple[str, str]] = Counter()
        for line in lines:
            self.apply(line)

    def apply(self, line: Line) -> None:
        """Adds what a line states.

        Raises:
            ValueError, KeyError, TypeError: If it is no line of a tuning.
        """
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
        elif "taken" in line:
            self.taken.add(line["taken"])
        else:
            self._running = line["running"], line["on"]

    def left_out(self, key: str) -> set[str]:
        """Returns contenders that must not run on a problem again, as earlier runs were killed."""
        return {
            name for (name, on), kills in self._kills.items() if on == key and kills >= MOST_KILLS
        }

    @property
    def is_confirmed(self) -> bool:
        """True if all outcomes are confirmed."""
        return not self._unconfirmed and not self._unconfirmed_repeats

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


def facts_by_gpu(lines: Iterable[Line]) -> dict[str | None, Facts]:
    """Returns facts by the UUID digest of the GPU that measured; None stands for unknown GPUs.

    Contenders that broke on one GPU are in every GPU's facts.
    """
    lines = list(lines)
    gpus = dict.fromkeys(gpu_of(line) for line in lines if is_measurement(line))
    return {
        gpu: Facts(line for line in lines if not is_measurement(line) or gpu_of(line) == gpu)
        for gpu in gpus
    }


def is_measurement(line: Line) -> bool:
    """Returns True if a line states a first or second measurement."""
    return "outcome" in line or "repeat" in line


def gpu_of(line: Line) -> str | None:
    """Returns the UUID digest of the GPU that a line's measurement was made on, or None."""
    outcome = line.get("outcome", line.get("repeat", {}))
    gpu: str | None = outcome.get("conditions", {}).get("gpu_sha256")
    return gpu
