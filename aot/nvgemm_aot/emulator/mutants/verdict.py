"""The verdict on a changed program, and why a survivor was not noticed."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..emulation_errors import DeadlockError, EmulationError, UnsupportedPtxError
from ..instructions.decoding import plan_of
from ..machine.fusion import never_waits
from ..machine.hierarchy import Grid, Warp
from ..machine.lanes import Mask
from ..machine.launch import Schedule
from ..machine.meanings import RETRY, Branch, Computation, Meaning, going_on
from ..machine.ordering import Ordering
from ..machine.scheduler import Plan, Scheduler
from ..ptx.program import Instruction, Program
from ..ptx.ptx_operands import Address, Immediate, Register, Sink
from .changes import registers_of, removed
from .recorded_launch import RecordedLaunch

Effects: TypeAlias = dict[str, bytes]
"""A digest for each warp."""


class Outcome(enum.Enum):
    """Ends of a changed program's execution."""

    RESULT = "wrong result"
    FINDING = "finding"
    ERROR = "error"
    DEADLOCK = "deadlock"
    UNSUPPORTED = "not PTX"
    SURVIVED = "survived"


class Survival(enum.Enum):
    """Reasons why a survivor is not noticed."""

    SAME_EFFECTS = "same effects on both problems"
    ORDERED = "every access is still ordered"
    UNUSED = "what it makes is not used"
    PERFORMANCE = "changes performance only"
    UNCHECKED = "the emulator does not check it"
    MISSED = "not caught"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An outcome, and its message."""

    outcome: Outcome
    message: str = ""


_PERFORMANCE = {"prefetch", "prefetchu", "applypriority", "discard", "createpolicy", "nanosleep"}

_UNCHECKED = {"tcgen05.wait::ld", "griddepcontrol.wait", "setmaxnreg.inc", "setmaxnreg.dec"}
"""Instructions whose absence is not always noticed: PTX from NVIDIA's compiler uses registers
before it waits for their loads, only dependent launches must wait for others, and registers are
never short."""

_SYNCHRONISATION = {"fence", "membar", "bar", "barrier"}

_WAITS = {
    "cp.wait_all",
    "cp.wait_group",
    "cp.commit_group",
    "griddepcontrol.wait",
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    "tcgen05.commit",
    "tcgen05.fence",
    "tcgen05.wait::ld",
    "tcgen05.wait::st",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
}


def judge(recorded: RecordedLaunch, program: Program, schedules: Iterable[Schedule]) -> Verdict:
    """Runs a changed program under some schedules until one shows a fault."""
    for schedule in schedules:
        try:
            execution = recorded.replay(program, schedule)
        except UnsupportedPtxError as error:
            return Verdict(outcome=Outcome.UNSUPPORTED, message=str(error))
        except DeadlockError as error:
            return Verdict(outcome=Outcome.DEADLOCK, message=str(error))
        except EmulationError as error:
            return Verdict(outcome=Outcome.ERROR, message=str(error))
        if execution.findings:
            return Verdict(outcome=Outcome.FINDING, message=execution.findings[0])
        if differing := recorded.differing_bytes():
            return Verdict(outcome=Outcome.RESULT, message=f"{differing} bytes differ")
    return Verdict(outcome=Outcome.SURVIVED)


def why_survived(
    launches: Sequence[RecordedLaunch],
    program: Program,
    place: int,
    schedules: Sequence[Schedule],
    effects: Sequence[Effects] | None = None,
) -> Survival:
    """Classifies a program with one changed instruction, which survived every launch.

    Args:
        launches: The kernel's launches.
        program: The changed program.
        place: Index of the changed instruction.
        schedules: Schedules under which it survived.
        effects: `effects_of` of each launch with its own program, if known.
    """
    original = launches[0].program
    old, new = original.instructions[place], program.instructions[place]
    if _changes_performance_only(old, new):
        return Survival.PERFORMANCE
    if not is_checked(old):
        return Survival.UNCHECKED
    if effects is None:
        effects = [effects_of(launch, original) for launch in launches]
    if all(each == effects_of(launch, program) for launch, each in zip(launches, effects)):
        return Survival.ORDERED if is_synchronisation(old) else Survival.SAME_EFFECTS
    if "mbarrier.init" in _names(old):
        # Using a memory barrier that was not initialised is an error.
        without = removed(original, place)
        verdicts = (judge(launch, without, schedules) for launch in launches)
        if all(verdict.outcome is Outcome.SURVIVED for verdict in verdicts):
            return Survival.UNUSED
    return Survival.MISSED


def is_synchronisation(instruction: Instruction) -> bool:
    """Tells if an instruction orders others and computes nothing."""
    return instruction.opcode in _SYNCHRONISATION or not _WAITS.isdisjoint(_names(instruction))


def is_checked(instruction: Instruction) -> bool:
    """Tells if the emulator can notice that an instruction is missing."""
    return _UNCHECKED.isdisjoint(_names(instruction))


def _names(instruction: Instruction) -> set[str]:
    return {f"{instruction.opcode}.{each}" for each in instruction.qualifiers}


def _changes_performance_only(old: Instruction, new: Instruction) -> bool:
    if old.opcode in _PERFORMANCE or "griddepcontrol.launch_dependents" in _names(old):
        # A policy in another register may overwrite what others need.
        return old.opcode != "createpolicy" or new.operands[:1] in (old.operands[:1], ())
    return _differs_only_in_hints(old, new)


def _differs_only_in_hints(old: Instruction, new: Instruction) -> bool:
    """Tells if only a cache policy, or a wait's time limit, was changed."""
    if old.qualifiers != new.qualifiers or len(old.operands) != len(new.operands):
        return False
    differing = [
        number for number, pair in enumerate(zip(old.operands, new.operands)) if pair[0] != pair[1]
    ]
    last = len(old.operands) - 1
    return differing == [last] and (
        "L2::cache_hint" in old.qualifiers or ("try_wait" in old.qualifiers and last == 3)
    )


_EFFECTS = {
    *("st", "red", "atom", "stmatrix", "mbarrier", "cp", "tcgen05", "wgmma"),
    *("clusterlaunchcontrol", "tensormap"),
}
_WITHOUT_EFFECT = {
    *("try_wait", "test_wait", "ld", "wait::ld", "wait::st", "fence"),
    *("commit_group", "wait_group", "query_cancel"),
}


_Digests: TypeAlias = dict[str, Any]
"""Unfinished digests, of a type that `hashlib` does not name."""


def effects_of(recorded: RecordedLaunch, program: Program) -> Effects:
    """Returns, for each warp, a digest of all that it does to others, in order.

    That is each store, copy, multiplication and arrival, with the values of its operands. Waits are
    left out, since how often a warp asks depends on the schedule.
    """
    digests: _Digests = {}
    meanings = [
        _watched(number, *each, program.instructions[number], digests)
        for number, each in enumerate(plan_of(program).meanings)
    ]
    memory = recorded.restored_memory()
    grid = Grid(program, recorded.launch, memory, Schedule(), Ordering())
    Scheduler(grid, Plan(program, meanings)).run()
    return {name: digest.digest() for name, digest in digests.items()}


def _watched(
    number: int,
    meaning: Meaning,
    predicate: int | None,
    negated: bool,
    instruction: Instruction,
    digests: _Digests,
) -> tuple[Meaning, int | None, bool]:
    if instruction.opcode not in _EFFECTS or _WITHOUT_EFFECT.intersection(instruction.qualifiers):
        return meaning, predicate, negated
    assert not isinstance(meaning, (Branch, Computation))
    operands = instruction.operands
    if instruction.opcode in ("mbarrier", "atom") and isinstance(operands[0], (Register, Sink)):
        operands = operands[1:]
    registers = [each.number for each in registers_of(operands)]
    constants = repr([each for each in operands if isinstance(each, (Immediate, Address))])
    constants = re.sub(r"Register\([^)]*\)", "", constants)

    def step(warp: Warp, mask: Mask) -> str | None:
        signal = meaning(warp, mask)
        if signal is not RETRY:
            name = str(warp)
            if name not in digests:
                digests[name] = hashlib.sha256()
            digest = digests[name]
            digest.update(f"{number} {constants}".encode())
            for register in registers:
                digest.update(np.ascontiguousarray(warp.registers[register][mask]).tobytes())
        return signal

    watched: Any = going_on(step) if never_waits(meaning) else step  # type: ignore[arg-type]
    return watched, predicate, negated
