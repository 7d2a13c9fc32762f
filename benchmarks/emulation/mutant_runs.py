"""Recorded kernels, and changed ones that run on their launches in a child process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvgemm_aot.emulator.machine.launch import Schedule
from nvgemm_aot.emulator.mutants.changes import Kind, changed, removed
from nvgemm_aot.emulator.mutants.fence_uses import FenceUses
from nvgemm_aot.emulator.mutants.recorded_launch import RecordedLaunch
from nvgemm_aot.emulator.mutants.verdict import (
    Effects,
    Outcome,
    Verdict,
    effects_of,
    is_checked,
    judge,
    why_survived,
)
from nvgemm_aot.emulator.ptx.program import Program

RUNAWAY = 8
"""A mutant that runs this many times the kernel's instructions counts as one that never ends."""

FAULT = "emulator's fault"
"""Outcome of a mutant at which the emulator itself fails."""


@dataclass(frozen=True, kw_only=True)
class RecordedKernel:
    """A kernel, and its launch for each of two problems, whose results were right."""

    name: str
    launches: tuple[RecordedLaunch, ...]

    @property
    def counts(self) -> list[int]:
        """Times that warps ran each instruction, for both problems."""
        executions = [launch.execution.counts for launch in self.launches]
        return [sum(counts) for counts in zip(*executions)]


@dataclass(frozen=True)
class Job:
    """One mutant: its kernel's number, the changed instruction, and how it changes.

    Without a kind, a fence or wait is removed, and the record says why it is redundant.
    """

    kernel: int
    place: int
    kind: Kind | None = None
    seed: int = 0


_kernels: list[RecordedKernel] = []
"""This process's kernels."""

_effects: dict[int, list[Effects]] = {}
"""Each kernel's own effects, if a survivor has needed them."""


def load_kernels(path: Path) -> list[RecordedKernel]:
    """Loads recorded kernels that this project wrote, for `run_job` in this process."""
    _kernels[:] = pickle.loads(path.read_bytes())
    _effects.clear()
    return _kernels


def record_of(kernel: RecordedKernel, job: Job) -> dict[str, Any]:
    """Returns the part of a mutant's record that names it."""
    instruction = kernel.launches[0].program.instructions[job.place]
    kind = {} if job.kind is None else {"kind": job.kind.value, "seed": job.seed}
    return {
        "kernel": kernel.name,
        "line": instruction.line,
        **kind,
        "instruction": instruction.text[:80],
    }


def run_job(job: Job) -> dict[str, Any]:
    """Returns the record of a mutant."""
    kernel = _kernels[job.kernel]
    record = record_of(kernel, job)
    try:
        return record | _outcome(kernel.launches, job)
    except Exception as error:  # a fault of the emulator, which the record shows
        return record | {"outcome": FAULT, "message": f"{type(error).__name__}: {error}"[:200]}


def _outcome(launches: Sequence[RecordedLaunch], job: Job) -> dict[str, Any]:
    original = launches[0].program
    if job.kind is None:
        program: Program | None = removed(original, job.place)
    else:
        program = changed(original, job.place, job.kind, job.seed)
    assert program is not None  # jobs are made of changes that exist
    verdict = judge_launches(launches, program)
    found = {"outcome": verdict.outcome.value, "message": verdict.message[:200]}
    if verdict.outcome is not Outcome.SURVIVED:
        return found
    if job.kind is None:
        return found | {"reason": _redundancy(launches, job.place)}
    if job.kernel not in _effects:
        _effects[job.kernel] = [effects_of(launch, original) for launch in launches]
    limit = max(_limit(launch) for launch in launches)
    reason = why_survived(
        launches, program, job.place, [Schedule(limit=limit)], _effects[job.kernel]
    )
    return found | {"survival": reason.value}


def judge_launches(launches: Sequence[RecordedLaunch], program: Program) -> Verdict:
    """Runs a program on a kernel's launches, each under two schedules, until one shows a fault."""
    verdict = Verdict(outcome=Outcome.SURVIVED)
    for launch in launches:
        limit = _limit(launch)
        schedules = (
            Schedule(limit=limit),
            Schedule(seed=1, delay=4, resident=1, limit=limit),
        )
        verdict = judge(launch, program, schedules)
        if verdict.outcome is not Outcome.SURVIVED:
            break
    return verdict


def _limit(launch: RecordedLaunch) -> int:
    return RUNAWAY * launch.execution.warp_instructions


def _redundancy(launches: Sequence[RecordedLaunch], place: int) -> str:
    """Returns why a fence is redundant; of both problems' reasons, the weaker one."""
    if not is_checked(launches[0].program.instructions[place]):
        return "the emulator does not check it"
    found = []
    for launch in launches:
        uses = FenceUses()
        launch.replay(launch.program, ordering=uses)
        found.append(uses.redundancy(place))
    return max(found).text
