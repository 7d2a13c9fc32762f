"""The verdict on a changed program, and why a survivor was not noticed."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DeadlockError, EmulationError, UnsupportedPtxError
from ..instructions.decoding import plan_of
from ..machine.global_memory import GlobalMemory
from ..machine.hierarchy import Grid, Warp
from ..machine.lanes import Mask
from ..machine.launch import Schedule
from ..machine.meanings import Branch, Computation, going_on, lanes_of
from ..machine.ordering import Ordering
from ..machine.scheduler import Plan, Scheduler
from ..ptx.operands import Address, Label, Pair, Register, Vector
from ..ptx.program import Instruction, Program
from .changes import registers_of
from .recorded_launch import RecordedLaunch


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

    SAME_VALUES = "same values at every execution"
    UNUSED = "its result is not read"
    ORDERED = "every access is still ordered"
    PERFORMANCE = "changes performance only"
    MISSED = "not caught"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An outcome, and its message."""

    outcome: Outcome
    message: str = ""


_PERFORMANCE = {
    "prefetch",
    "prefetchu",
    "applypriority",
    "discard",
    "createpolicy",
    "nanosleep",
    "setmaxnreg",
    "griddepcontrol",
}

_SYNCHRONISATION = {"fence", "membar", "bar", "barrier"}


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


def why_survived(recorded: RecordedLaunch, program: Program, place: int) -> Survival:
    """Classifies a survivor, whose instruction at a place was changed."""
    old, new = recorded.program.instructions[place], program.instructions[place]
    if old.opcode in _PERFORMANCE:
        return Survival.PERFORMANCE
    if _is_synchronisation(old):
        return Survival.ORDERED
    written = {*written_registers(old), *written_registers(new)}
    if old.opcode == "bra" or new.opcode == "bra":
        return (
            Survival.SAME_VALUES
            if _branches(recorded, recorded.program) == _branches(recorded, program)
            else Survival.MISSED
        )
    if written and not any(
        register in written
        for number, instruction in enumerate(program.instructions)
        if number != place and recorded.execution.counts[number]
        for register in (
            *_read_registers(instruction),
            *([instruction.predicate] if instruction.predicate else []),
        )
    ):
        return Survival.UNUSED
    if written and _trace(recorded, recorded.program, place, written) == _trace(
        recorded, program, place, written
    ):
        return Survival.SAME_VALUES
    if _differs_only_in_hints(old, new):
        return Survival.PERFORMANCE
    return Survival.MISSED


def _is_synchronisation(instruction: Instruction) -> bool:
    names = {f"{instruction.opcode}.{each}" for each in instruction.qualifiers}
    return instruction.opcode in _SYNCHRONISATION or bool(
        names & {"cp.wait_group", "cp.commit_group", "tcgen05.wait::ld", "tcgen05.wait::st"}
    )


def _differs_only_in_hints(old: Instruction, new: Instruction) -> bool:
    """Whether only a cache policy, or a wait's time limit, was changed."""
    if old.qualifiers != new.qualifiers or len(old.operands) != len(new.operands):
        return False
    differing = [
        number for number, pair in enumerate(zip(old.operands, new.operands)) if pair[0] != pair[1]
    ]
    last = len(old.operands) - 1
    return differing == [last] and (
        "L2::cache_hint" in old.qualifiers or ("try_wait" in old.qualifiers and last == 3)
    )


_NO_RESULT = {"st", "red", "bra", "ret", "bar", "barrier", "fence", "cp", "prefetch", "stmatrix"}


def written_registers(instruction: Instruction) -> tuple[Register, ...]:
    """Returns the registers that an instruction writes."""
    if instruction.opcode in _NO_RESULT or not instruction.operands:
        return ()
    if instruction.opcode == "tcgen05" and instruction.qualifiers[0] != "ld":
        return ()
    if instruction.opcode == "mbarrier" and instruction.qualifiers[0] in (
        "init", "inval", "expect_tx", "complete_tx",
    ):  # fmt: skip
        return ()
    first = instruction.operands[0]
    if isinstance(first, (Address, Label)):
        return ()
    if isinstance(first, (Register, Vector, Pair)):
        return tuple(registers_of((first,)))
    return ()


def _read_registers(instruction: Instruction) -> tuple[Register, ...]:
    begin = 1 if written_registers(instruction) else 0
    return tuple(registers_of(instruction.operands[begin:]))


def _branches(recorded: RecordedLaunch, program: Program) -> list[int]:
    """Returns how often each instruction runs, without the changed one's own registers."""
    return recorded.replay(program, ordering=Ordering()).counts


def _trace(
    recorded: RecordedLaunch, program: Program, place: int, registers: Iterable[Register]
) -> str:
    """Returns a digest of what registers hold after each execution of an instruction."""
    meanings = list(plan_of(program).meanings)
    meaning, predicate, negated = meanings[place]
    assert not isinstance(meaning, Branch)
    numbers = sorted(each.number for each in registers)
    digest = hashlib.sha256()

    def traced(warp: Warp, mask: Mask) -> str | None:
        active = mask
        if predicate is not None:
            holds = warp.registers[predicate]
            active = mask & (~holds if negated else holds)
        signal = None
        if isinstance(meaning, Computation):
            _compute(meaning, warp, active)
        elif active.any():
            signal = meaning(warp, active)
        digest.update(str(warp).encode())
        for number in numbers:
            digest.update(np.ascontiguousarray(warp.registers[number][mask]).tobytes())
        return signal

    step: Any = going_on(traced) if isinstance(meaning, Computation) else traced  # type: ignore[arg-type]
    meanings[place] = (step, None, False)
    for region, content in zip(recorded.regions, recorded.before):
        region.data[:] = content
    grid = Grid(program, recorded.launch, GlobalMemory(recorded.regions), Schedule(), Ordering())
    Scheduler(grid, Plan(program, meanings)).run()
    return digest.hexdigest()


def _compute(meaning: Computation, warp: Warp, active: Mask) -> None:
    results = meaning.function(*(lanes_of(each)(warp) for each in meaning.sources))
    if len(meaning.results) == 1:
        results = (results,)
    for number, result in zip(meaning.results, results):
        if number is not None:
            value = result if meaning.view is None else result.view(meaning.view)
            warp.put(number, value, active)
