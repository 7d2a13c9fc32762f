"""Changes one instruction of emulated kernels at a time, and counts what the emulator notices.

    python -m benchmarks.emulation.mutants --kernels recorded.pickle --records mutants.jsonl

A mutant is named by kernel, line, kind and seed. ``--fences`` removes each fence, wait and commit
that ran, instead of random changes. The file of kernels is made if it does not exist, which needs
the builder; its kernels come from the build cache, and are compiled if that lacks them.
"""

from __future__ import annotations

import collections
import functools
import json
import pickle
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.emulation.mutant_runs import Job, RecordedKernel, load_kernels, record_of, run_job
from benchmarks.emulation.recorded_kernels import kernel_tasks, recorded_kernels
from benchmarks.record import Case
from benchmarks.shared.resuming import recording, records_option
from nvgemm_aot.emulator.mutants.changes import Kind, changed
from nvgemm_aot.emulator.mutants.verdict import Outcome, Survival, is_synchronisation
from nvgemm_aot.pipeline.workers import TimeLimitExceeded, WorkerDied, Workers
from nvgemm_aot.storage.build_cache import Cache, default_directory
from nvgemm_runtime import __version__

_TRIES = 40

_LIMIT_SECONDS = 300.0

KILLED, TOO_SLOW = "killed its process", "exceeded its time limit"
"""Outcomes of mutants that their process did not survive."""

_CAUGHT = (Outcome.RESULT, Outcome.FINDING, Outcome.ERROR, Outcome.DEADLOCK)

_MISSED = (Survival.MISSED, Survival.UNCHECKED)


def mutants(kernels: Sequence[RecordedKernel], count: int, seed: int) -> Iterator[Job]:
    """Yields random changes in code that ran, of each kernel in turn."""
    choices = random.Random(seed)
    kinds = list(Kind)
    ran = [[place for place, times in enumerate(each.counts) if times] for each in kernels]
    for turn in range(count):
        number = turn % len(kernels)
        program = kernels[number].launches[0].program
        for _ in range(_TRIES):
            place, kind = choices.choice(ran[number]), choices.choice(kinds)
            if changed(program, place, kind, turn):
                yield Job(number, place, kind, turn)
                break


def removals(kernels: Sequence[RecordedKernel]) -> Iterator[Job]:
    """Yields each fence, wait and commit that ran."""
    for number, kernel in enumerate(kernels):
        instructions = kernel.launches[0].program.instructions
        for place, (instruction, count) in enumerate(zip(instructions, kernel.counts)):
            if count and is_synchronisation(instruction):
                yield Job(number, place)


def run_all(
    path: Path, kernels: Sequence[RecordedKernel], jobs: Sequence[Job], *, processes: int
) -> Iterator[dict[str, Any]]:
    """Yields each mutant's record, also if it kills its process."""
    if not jobs:
        return
    prepare = functools.partial(load_kernels, path)
    with Workers(min(processes, len(jobs)), run_job, prepare, _LIMIT_SECONDS) as workers:
        for job, outcome in workers.run(jobs):
            if isinstance(outcome, WorkerDied):
                end = TOO_SLOW if isinstance(outcome, TimeLimitExceeded) else KILLED
                yield record_of(kernels[job.kernel], job) | {
                    "outcome": end,
                    "message": str(outcome),
                }
            else:
                yield outcome


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns counts by outcome, and the shares caught: of what is not equivalent, and of all.

    A change whose end is unknown counts as not caught; what is not PTX does not count.
    """
    outcomes = collections.Counter(each["outcome"] for each in records)
    reasons = collections.Counter(
        each.get("survival") or each["reason"]
        for each in records
        if each["outcome"] == Outcome.SURVIVED.value
    )
    caught = sum(outcomes[each.value] for each in _CAUGHT)
    survived = outcomes[Outcome.SURVIVED.value]
    unknown = len(records) - caught - survived - outcomes[Outcome.UNSUPPORTED.value]
    missed = unknown + sum(reasons[each.value] for each in _MISSED)
    return {
        "changes": len(records),
        "kernels": len({each["kernel"] for each in records}),
        "outcomes": dict(outcomes),
        "survivors": dict(reasons),
        "caught_share": round(caught / max(1, caught + missed), 4),
        "caught_share_of_all": round(caught / max(1, caught + survived + unknown), 4),
    }


@click.command()
@click.option(
    "--kernels",
    "kernels_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Recorded kernels; made if there is no such file.",
)
@click.option("--fences", is_flag=True, help="Remove fences, waits and commits.")
@click.option("--count", type=click.IntRange(1), default=640, show_default=True, help="Mutants.")
@click.option("--most", type=click.IntRange(1), help="Most changes to run, drawn by the seed.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("-j", "--jobs", "processes", type=click.IntRange(1), default=2, show_default=True)
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Build cache.")
@click.option(
    "--verdicts",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to append verdicts to; those in it are not repeated.",
)
@records_option
def main(
    kernels_path: Path | None,
    fences: bool,
    count: int,
    most: int | None,
    seed: int,
    processes: int,
    cache_dir: Path | None,
    verdicts: Path | None,
    records_path: Path | None,
) -> None:
    """Run mutants, or remove fences, and count what the emulator notices."""
    with tempfile.TemporaryDirectory() as directory:
        path = kernels_path or Path(directory) / "kernels.pickle"
        if not path.exists():
            tasks = list(kernel_tasks(Cache(cache_dir or default_directory()), jobs=processes))
            path.write_bytes(pickle.dumps(recorded_kernels(tasks, jobs=processes)))
        try:
            kernels = load_kernels(path)
        except (pickle.UnpicklingError, AttributeError, ImportError, EOFError) as error:
            raise click.ClickException(
                f"{path} has no kernels that this version recorded ({error}); delete it to record "
                "them again"
            ) from error
        jobs = list(removals(kernels) if fences else mutants(kernels, count, seed))
        random.Random(seed).shuffle(jobs)
        jobs = jobs[:most]
        missing = {_name(record_of(kernels[job.kernel], job)): job for job in jobs}
        records = [each for each in _earlier_records(verdicts) if missing.pop(_name(each), None)]
        for record in run_all(path, kernels, list(missing.values()), processes=processes):
            records.append(record)
            if verdicts:
                with verdicts.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if len(records) % 20 == 0:
                click.echo(f"{len(records)} of {len(jobs)}", err=True)
    counts = summary(records)
    click.echo(json.dumps(counts, indent=1))
    with recording(records_path, "emulation.mutants", {"nvgemm-aot": __version__}) as cases:
        cases += _cases(counts, "removed fences" if fences else "mutants")


def _earlier_records(path: Path | None) -> list[dict[str, Any]]:
    """Returns the records of an earlier run, which this one goes on with."""
    if path is None or not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise click.ClickException(f"{path}: not a verdict in each line: {error}") from error


def _name(record: dict[str, Any]) -> tuple[object, ...]:
    return tuple(record.get(part) for part in ("kernel", "line", "kind", "seed"))


def _cases(counts: dict[str, Any], kind: str) -> Iterator[Case]:
    named = {**counts["outcomes"], **counts["survivors"]}
    for name, count in sorted(named.items()):
        yield Case(name=f"{kind}/{name}", figure=count, unit=kind)
    for name, part in (("caught", "caught_share"), ("caught of all", "caught_share_of_all")):
        yield Case(name=f"{kind}/{name}", figure=round(100 * counts[part], 2), unit="%")


if __name__ == "__main__":
    main()
