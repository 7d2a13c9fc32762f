"""Changes one instruction of emulated kernels at a time, and counts what the emulator notices.

    python -m benchmarks.emulation.mutants DIRECTORY --verdicts mutants.jsonl --result run.jsonl
    python -m benchmarks.record keep run.jsonl

A mutant is named by kernel, line, kind and seed. ``--fences`` removes each fence, wait and commit
that ran, instead of random changes.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.metadata
import json
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record as results
from benchmarks.emulation.recorded_kernels import RecordedKernel, record_kernels
from nvgemm_aot.emulator.machine.launch import Schedule
from nvgemm_aot.emulator.mutants.changes import Kind, changed, removed
from nvgemm_aot.emulator.mutants.fence_uses import FenceUses
from nvgemm_aot.emulator.mutants.verdict import (
    Effects,
    Outcome,
    Survival,
    effects_of,
    judge,
    why_survived,
)
from nvgemm_aot.emulator.ptx.program import Instruction

_RUNAWAY = 8
"""A mutant that runs this many times the kernel's instructions counts as one that never ends."""

_TRIES = 40


@dataclass(frozen=True)
class Job:
    """One mutant: its kernel's number, the changed instruction, and how it changes."""

    kernel: int
    place: int
    kind: Kind
    seed: int


_kernels: list[RecordedKernel] = []
"""Filled before worker processes are forked, which then have the same memory."""


_effects: dict[int, Effects] = {}
"""Each kernel's own effects, in a worker that has needed them."""


def _schedules(kernel: RecordedKernel) -> list[Schedule]:
    limit = _RUNAWAY * kernel.launch.execution.warp_instructions
    return [Schedule(limit=limit), Schedule(seed=1, delay=4, limit=limit)]


def is_synchronisation(instruction: Instruction) -> bool:
    """Whether an instruction orders others and computes nothing."""
    names = instruction.qualifiers
    if instruction.opcode in ("fence", "membar", "bar", "barrier"):
        return True
    if instruction.opcode == "cp":
        return bool({"commit_group", "wait_group"}.intersection(names))
    if instruction.opcode == "mbarrier":
        return names[0] in ("try_wait", "test_wait")
    if instruction.opcode == "tcgen05":
        return names[0].startswith(("commit", "wait", "fence"))
    return False


def run_mutant(job: Job) -> dict[str, object]:
    """Returns the record of a mutant, without an outcome if there is none like it."""
    kernel = _kernels[job.kernel]
    recorded = kernel.launch
    instruction = recorded.program.instructions[job.place]
    program = changed(recorded.program, job.place, job.kind, job.seed)
    record: dict[str, object] = {
        "kernel": f"{kernel.kernel.operator} {kernel.kernel.id[:12]}",
        "line": instruction.line,
        "kind": job.kind.value,
        "seed": job.seed,
        "instruction": instruction.text[:80],
    }
    if program is None:
        return record
    try:
        verdict = judge(recorded, program, _schedules(kernel))
        record |= {"outcome": verdict.outcome.value, "message": verdict.message[:200]}
        if verdict.outcome is Outcome.SURVIVED:
            if job.kernel not in _effects:
                _effects[job.kernel] = effects_of(recorded, recorded.program)
            reason = why_survived(recorded, program, job.place, _effects[job.kernel])
            record["survival"] = reason.value
    except Exception as error:  # a fault of the emulator, which the record shows
        record |= {"outcome": "emulator's fault", "message": f"{type(error).__name__}: {error}"}
    return record


def run_removal(job: Job) -> dict[str, object]:
    """Returns the record of a removed fence, and why it is redundant if nothing notices."""
    kernel = _kernels[job.kernel]
    recorded = kernel.launch
    instruction = recorded.program.instructions[job.place]
    program = removed(recorded.program, job.place)
    record: dict[str, object] = {
        "kernel": f"{kernel.kernel.operator} {kernel.kernel.id[:12]}",
        "line": instruction.line,
        "instruction": instruction.text[:80],
    }
    try:
        verdict = judge(recorded, program, _schedules(kernel))
    except Exception as error:  # a fault of the emulator, which the record shows
        message = f"{type(error).__name__}: {error}"
        return record | {"outcome": "emulator's fault", "message": message}
    record |= {"outcome": verdict.outcome.value, "message": verdict.message[:200]}
    waits_left = any("wait::ld" in each.qualifiers for each in program.instructions)
    is_last_wait = "wait::ld" in instruction.qualifiers and not waits_left
    if verdict.outcome is Outcome.SURVIVED and is_last_wait:
        record["reason"] = "PTX that never waits for loads leaves that to ptxas"
    elif verdict.outcome is Outcome.SURVIVED:
        uses = FenceUses()
        recorded.replay(recorded.program, ordering=uses)
        record["reason"] = uses.reason(job.place)
    return record


def _mutants(count: int, seed: int) -> Iterator[Job]:
    choices = random.Random(seed)
    kinds = list(Kind)
    ran = [
        [place for place, times in enumerate(each.launch.execution.counts) if times]
        for each in _kernels
    ]
    yielded = 0
    while yielded < count:
        number = yielded % len(_kernels)
        for _ in range(_TRIES):
            job = Job(number, choices.choice(ran[number]), choices.choice(kinds), yielded)
            if changed(_kernels[number].launch.program, job.place, job.kind, job.seed):
                yield job
                break
        yielded += 1


def _removals() -> Iterator[Job]:
    for number, kernel in enumerate(_kernels):
        for place, instruction in enumerate(kernel.launch.program.instructions):
            if kernel.launch.execution.counts[place] and is_synchronisation(instruction):
                yield Job(number, place, Kind.REMOVED, 0)


def _recorded(path: Path | None) -> list[dict[str, object]]:
    """Returns the records of an earlier run, which this one goes on with."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _name(job: Job, fences: bool) -> tuple[object, ...]:
    kernel = _kernels[job.kernel]
    line = kernel.launch.program.instructions[job.place].line
    change = (None, None) if fences else (job.kind.value, job.seed)
    return (f"{kernel.kernel.operator} {kernel.kernel.id[:12]}", line, *change)


def summary(records: Sequence[dict[str, object]]) -> dict[str, Any]:
    """Returns counts by outcome, and the share caught of those that are not equivalent."""
    outcomes = collections.Counter(each.get("outcome") for each in records)
    survivals = collections.Counter(each["survival"] for each in records if "survival" in each)
    caught = sum(
        outcomes[each.value]
        for each in (Outcome.RESULT, Outcome.FINDING, Outcome.ERROR, Outcome.DEADLOCK)
    )
    missed = survivals[Survival.MISSED.value]
    return {
        "mutants": len(records),
        "kernels": len({each["kernel"] for each in records}),
        "outcomes": dict(outcomes),
        "survivors": dict(survivals),
        "caught_share": round(caught / max(1, caught + missed), 4),
    }


def main() -> None:
    """Runs mutants, or removes fences, in parallel processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="bundle and PTX, see recorded_kernels.py")
    parser.add_argument("--count", type=int, default=600, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--fences", action="store_true", help="remove fences instead")
    parser.add_argument("--kernels", type=int, default=10, help="kernels, the shortest launches")
    parser.add_argument(
        "--verdicts", type=Path, help="file to append verdicts to; those in it are not repeated"
    )
    parser.add_argument("--result", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for each in record_kernels(arguments.directory):
        if isinstance(each, RecordedKernel):
            _kernels.append(each)
        else:
            print(f"not recorded: {each[0].operator}: {each[1][:200]}")
    _kernels.sort(key=lambda each: each.launch.execution.warp_instructions)
    del _kernels[arguments.kernels :]
    jobs = list(_removals() if arguments.fences else _mutants(arguments.count, arguments.seed))
    random.Random(arguments.seed).shuffle(jobs)
    work = run_removal if arguments.fences else run_mutant
    records = _recorded(arguments.verdicts)
    done = {(each["kernel"], each["line"], each.get("kind"), each.get("seed")) for each in records}
    jobs = [job for job in jobs if _name(job, arguments.fences) not in done]
    with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
        for record in pool.imap_unordered(work, jobs):
            records.append(record)
            if arguments.verdicts:
                with arguments.verdicts.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if len(records) % 20 == 0:
                print(len(records), "of", len(jobs), flush=True)
    print(json.dumps(summary(records), indent=1))
    if arguments.result:
        results.write(arguments.result, _figures(records, arguments))


def _figures(
    records: Sequence[dict[str, object]], arguments: argparse.Namespace
) -> Iterator[results.Record]:
    """Yields the figures of a run, for benchmarks/results."""
    kind = "removed fences" if arguments.fences else "mutants"
    found = summary(records)
    outcomes = {**found["outcomes"], **found["survivors"]}
    cases = [
        results.Case(name=f"{kind}/{name}", figure=count, unit=kind)
        for name, count in sorted(outcomes.items())
    ]
    if not arguments.fences:
        share = 100 * found["caught_share"]
        cases.append(results.Case(name=f"{kind}/caught", figure=share, unit="%"))
    environment = {
        "torch": torch.__version__,
        "nvgemm-aot": importlib.metadata.version("nvgemm-aot"),
    }
    command = "python -m benchmarks.emulation.mutants DIRECTORY"
    if arguments.fences:
        command += " --fences"
    run = results.run_of(
        "emulation.mutants",
        environment,
        command=command,
        commit=results.commit(),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )
    yield from results.records_of(run, cases)


if __name__ == "__main__":
    main()
