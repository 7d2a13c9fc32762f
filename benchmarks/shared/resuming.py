"""Results that grow over several runs: a raw file, its table and its records.

A GPU may be available for a few minutes only. A benchmark therefore saves its file after each size,
starts no size that it has no time to finish, and continues from the file when it starts again.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.record import Case, commit, records_of, run_of
from benchmarks.record import write as write_records
from benchmarks.shared.records import as_written, check_output, read_record, write
from benchmarks.shared.turns import others_turn, take_turns
from nvgemm_runtime.errors import NvgemmError

Item = TypeVar("Item")

BEGUN = time.monotonic()
"""This process' start, by `time.monotonic`; without torch's import if this is imported first."""

MAX_FAILURES = 3
"""Failures after which the GPU or the installation is at fault, not the size."""

ORDER_SEED = 1000
"""Seed for the fixed size order."""


def measuring_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds measuring commands' argument and options: ``path``, ``resume``, ``budget``.

    ``--turns`` needs no parameter (`benchmarks.shared.turns`).
    """
    for decorate in (
        click.option(
            "--turns",
            type=click.Path(path_type=Path, dir_okay=False),
            callback=lambda _context, _option, path: None if path is None else take_turns(path),
            expose_value=False,
            help="Take turns on the GPU with other benchmarks that name this file.",
        ),
        click.option("--budget", type=click.FloatRange(min=1), help="Seconds after which to stop."),
        click.option("--resume", is_flag=True, help="Go on with what the file holds."),
        click.argument("path", type=click.Path(path_type=Path)),
    ):
        command = decorate(command)
    return command


class Results:
    """A benchmark's raw file.

    Attributes:
        environment: GPU and versions.
        entries: Entries by size key.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path = path
        self._record = record
        self.environment: dict[str, Any] = record["environment"]
        self.entries: dict[str, Any] = record["entries"]

    @classmethod
    def begin(
        cls,
        path: Path,
        *,
        what: str,
        environment: dict[str, Any],
        settings: dict[str, Any],
        resume: bool,
    ) -> Results:
        """Starts a file, or continues one.

        Args:
            path: File path.
            what: Benchmark name.
            environment: This run's GPU and versions.
            settings: Other settings that results depend on.
            resume: Continue an existing file, which must agree in all of these.
        """
        check_output(path, resume=resume)
        agreed = {"what": what, "environment": environment, "settings": settings}
        agreed = json.loads(json.dumps(agreed))  # as read back from the file
        if path.exists():
            found = cls.read(path, what)
            for part, value in agreed.items():
                if found._record[part] != value:
                    raise click.ClickException(
                        f"{path}: cannot go on, for its {part} is {found._record[part]}, and here "
                        f"it is {value}; measure into another file"
                    )
            record = found._record
        else:
            record = {**agreed, "runs": [], "entries": {}}
        run: dict[str, Any] = {
            **this_run(),
            "gpu": gpu_state(),
            "seconds": 0.0,
        }
        record["runs"].append(run)
        return cls(path, record)

    @classmethod
    def read(cls, path: Path, what: str) -> Results:
        """Reads this benchmark's file."""
        record = read_record(path, what, {"environment": dict, "settings": dict, "runs": list})
        if not isinstance(record.get("entries"), dict):
            raise click.ClickException(f"{path} has no entries; measure into another file")
        return cls(path, record)

    @classmethod
    def joined(cls, path: Path, parts: Sequence[Path], what: str) -> Results:
        """Joins files with equal environments and settings into a new one.

        If two files have a size, the later file's entry counts.
        """
        check_output(path, resume=False)
        first, *others = (cls.read(part, what) for part in parts)
        for part, other in zip(parts[1:], others):
            for name in ("environment", "settings"):
                if other._record[name] != first._record[name]:
                    raise click.ClickException(
                        f"{part}: cannot be joined with {parts[0]}, for its {name} is "
                        f"{other._record[name]}, and there it is {first._record[name]}"
                    )
            first._record["runs"] += other._record["runs"]
            first.entries.update(other.entries)
        return cls(path, first._record)

    def add(self, key: str, entry: dict[str, Any]) -> None:
        """Saves one size's entry."""
        self.entries[key] = entry
        self._record["runs"][-1]["seconds"] = round(time.monotonic() - BEGUN, 1)
        self.save()

    def fill(
        self,
        work: Sequence[tuple[str, Callable[[], dict[str, Any]]]],
        budget_s: float | None,
        say: Callable[[dict[str, Any]], str],
    ) -> None:
        """Measures one size after the other while there is time, and saves each.

        Failures are left out, and measured when the benchmark continues.

        Args:
            work: Keys, with the function that measures each.
            budget_s: Seconds after which to stop; None for no limit.
            say: Returns an entry's progress text.
        """
        failures: list[str] = []
        for number, (key, measure) in in_time(work, budget_s):
            try:
                entry = measure()
            except (NvgemmError, RuntimeError, click.ClickException) as error:
                failures.append(f"{key} FAILED: {type(error).__name__}: {error}")
                click.echo(failures[-1], err=True)
                if len(failures) == MAX_FAILURES:
                    break
                continue
            finally:
                with others_turn():
                    pass
            self.add(key, entry)
            seconds = self._record["runs"][-1]["seconds"]
            click.echo(f"{number + 1}/{len(work)} {seconds:.0f} s {key}: {say(entry)}", err=True)
        if failures:
            raise click.ClickException("\n".join(failures))

    def save(self) -> None:
        """Writes the file, a line an entry."""
        entries = ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in self.entries.items()
        )
        rest = {name: part for name, part in self._record.items() if name != "entries"}
        text = json.dumps(rest, indent=1)[:-2] + ',\n "entries": {\n' + entries + "\n }\n}\n"
        write(self.path, text)

    def heading(self) -> list[str]:
        """Returns a table's heading: commands, environment and GPU state."""
        environment, runs = self._record["environment"], self._record["runs"]
        lines = [f"$ {run['command']}    # {run['date']}, {run['seconds']:.0f} s" for run in runs]
        states = dict.fromkeys(run["gpu"] for run in runs)
        named = ", ".join(
            str(value) if name == "gpu" else f"{name} {value}"
            for name, value in environment.items()
            if name != "bundles"
        )
        lines += [named, *(f"  {bundle}" for bundle in environment.get("bundles", []))]
        return lines + [f"GPU before: {state}" for state in states if state]

    def end(self, table: Callable[[dict[str, Any]], Iterable[str]]) -> None:
        """Writes the file, its records and its table, if anything was measured."""
        if self.entries:
            self.save()
            self.write_cases()
            self.write_table(table)
        else:
            click.echo(f"{self.path}: nothing was measured", err=True)

    def write_cases(self) -> None:
        """Writes the entries' cases beside the file, as JSON lines."""
        from benchmarks.cases import write_cases

        last = self._record["runs"][-1]
        with as_written(self.path):
            write_cases(
                self.path,
                self.benchmark,
                self.entries,
                self.environment,
                **{name: last.get(name) for name in ("command", "date", "commit", "gpu_sha256")},
            )

    @property
    def benchmark(self) -> str:
        """Module under ``benchmarks`` that wrote the file, e.g. ``moe.training``."""
        name = str(self._record["what"]).replace("-", ".")
        return f"{name}.tokens" if self._record["settings"].get("from") == "tokens" else name

    def write_table(self, table: Callable[[dict[str, Any]], Iterable[str]]) -> None:
        """Prints the entries' table and writes it beside the file, with its heading."""
        with as_written(self.path):
            lines = list(table(self.entries))
        text = "\n".join([*self.heading(), "", *lines])
        write(self.path.with_suffix(".txt"), f"{text}\n")
        click.echo(text)


def today() -> str:
    """Returns the date in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def command_line(arguments: Sequence[str] | None = None) -> str:
    """Returns this process' command line, without directories of this machine.

    Args:
        arguments: Benchmark file and arguments; the process' own if None.
    """
    file, *rest = sys.argv if arguments is None else arguments
    path = Path(file)
    folders = path.parent.parts
    begin = folders.index("benchmarks") + 1 if "benchmarks" in folders else len(folders) - 1
    names = [*folders[begin:], *([] if path.stem == "__main__" else [path.stem])]
    named = (re.sub(r"(^|[=:,])/(?:[^:,]*/)?", r"\1", argument) for argument in rest)
    return shlex.join(["python", "-m", ".".join(["benchmarks", *names]), *named])


def this_run() -> dict[str, str | None]:
    """Returns this process' conditions, as `benchmarks.record.Run` names them."""
    return {
        "command": command_line(),
        "date": today(),
        "commit": commit(),
        "gpu_sha256": gpu_sha256(),
    }


records_option = click.option(
    "--records",
    "records_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write records here, as JSON lines.",
)


@contextlib.contextmanager
def recording(
    path: Path | None, benchmark: str, environment: Mapping[str, Any], *, is_measured: bool = True
) -> Iterator[list[Case]]:
    """Yields a list for cases, and writes it at the end if a path is given.

    Args:
        path: Result file, or None.
        benchmark: Module under ``benchmarks``.
        environment: Versions and GPU product.
        is_measured: False if the cases are computed from files, perhaps on another machine.
    """
    cases: list[Case] = []
    yield cases
    if path is not None:
        run = this_run()
        if not is_measured:
            run["gpu_sha256"] = None
        write_records(path, records_of(run_of(benchmark, environment, **run), cases))


def gpu_state() -> str:
    """Returns the GPU's id, clock, temperature and load by nvidia-smi, or an empty text."""
    found = nvidia_smi("uuid", "clocks.sm", "temperature.gpu", "utilization.gpu")
    if not found:
        return ""
    uuid, *state = found
    said = (f"{name} {value}" for name, value in zip(("clock", "temperature", "load"), state))
    return ", ".join([uuid[: len("GPU-") + 8], *said])


def gpu_sha256() -> str | None:
    """Returns the digest of the first GPU's UUID, as rankings have it; None without a GPU."""
    from nvgemm_aot.tuning.measuring.gpu import uuid_digest

    found = nvidia_smi("uuid")
    return uuid_digest(found[0]) if found else None


def nvidia_smi(*asked: str) -> list[str]:
    """Returns nvidia-smi's answers for the first GPU, or nothing."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--id=0", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().split(", ")


def in_time(
    items: Sequence[Item],
    budget_s: float | None,
    clock: Callable[[], float] = time.monotonic,
    begun: float = BEGUN,
    kind: Callable[[Item], Hashable] = lambda _: None,
) -> Iterator[tuple[int, Item]]:
    """Yields items while there is time for another as long as the longest of its kind so far.

    Args:
        items: Items; the first is never left out.
        budget_s: Seconds from ``begun``; None for no limit.
        clock: Gives seconds.
        begun: This process' start, by that clock.
        kind: Key of items that take about as long as each other.

    Yields:
        Number and item, without those that there is no time for.
    """
    longest: dict[Hashable, float] = {}
    for number, item in enumerate(items):
        started = clock() - begun
        expected = longest.get(kind(item), 0.0)
        if budget_s is not None and number and started + expected > budget_s:
            continue
        yield number, item
        longest[kind(item)] = max(expected, clock() - begun - started)
