"""Benchmark results: one JSON line a case, with everything needed to compare and repeat it.

    python -m benchmarks.record keep run.jsonl   # add a run to benchmarks/results

``benchmarks/results/BENCHMARK-PRODUCT.jsonl`` holds the newest result of each case, e.g.
``moe-h200.jsonl``. docs/benchmarks/index.md explains each field.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

RESULTS = Path(__file__).parent / "results"
CPU = "cpu"
"""Product name for benchmarks that need no GPU."""
TESTS = "tests"
"""Benchmark name in records of GPU test runs, which share one file."""
VERSIONS = ("torch", "cuda", "driver", "nvgemm-aot")
HIGHER_IS_BETTER = frozenset({"TFLOP/s", "tokens/s"})
"""Rate units; in every other unit, less is better."""

_PRODUCT = re.compile(r"NVIDIA (\w+)")


class RecordError(click.ClickException):
    """Result line that breaks the schema."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The figure that a case is compared with, in the case's unit.

    Attributes:
        name: Contender, e.g. ``ATen``.
        value: Its figure.
    """

    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured figure.

    Attributes:
        name: Parts from the general to the special, joined by slashes.
        figure: Measured value.
        unit: Unit, e.g. ``ms``.
        baseline: Contender's figure; None if the case has none.
        noise: Relative uncertainty in figure over baseline; None if unknown.
    """

    name: str
    figure: float
    unit: str
    baseline: Baseline | None = None
    noise: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Conditions that one run's cases share.

    Attributes:
        benchmark: Module under ``benchmarks``, e.g. ``moe.training``.
        command: Command line, without the machine's directories.
        commit: Repository commit, abbreviated.
        date: Day in UTC, e.g. ``2026-11-27``.
        gpu: Product name by the driver; None for benchmarks of the CPU.
        gpu_sha256: SHA-256 over the GPU's UUID, as in rankings.
        versions: Versions by the names in `VERSIONS`.
    """

    benchmark: str
    command: str | None = None
    commit: str | None = None
    date: str | None = None
    gpu: str | None = None
    gpu_sha256: str | None = None
    versions: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line in a result file."""

    case: Case
    run: Run

    @property
    def key(self) -> tuple[str, str, str | None]:
        """Identity within the file: benchmark, case and contender."""
        baseline = self.case.baseline
        return self.run.benchmark, self.case.name, None if baseline is None else baseline.name

    @property
    def file_name(self) -> str:
        """Result file that keeps the record, e.g. ``moe-h200.jsonl``."""
        if self.run.benchmark == TESTS:
            return f"{TESTS}.jsonl"
        return f"{self.run.benchmark.partition('.')[0]}-{product(self.run.gpu)}.jsonl"

    @property
    def over_baseline(self) -> float:
        """Figure over baseline: for times, how many times as long.

        Raises:
            ValueError: If the case has no baseline.
        """
        if self.case.baseline is None:
            raise ValueError(f"{self.case.name} has no baseline")
        return self.case.figure / self.case.baseline.value

    @property
    def speedup(self) -> float:
        """How many times as fast as the baseline.

        Raises:
            ValueError: If the case has no baseline.
        """
        if self.case.unit in HIGHER_IS_BETTER:
            return self.over_baseline
        return 1 / self.over_baseline

    def to_json(self) -> str:
        """Returns one JSON line."""
        case, run = self.case, self.run
        fields = {
            "benchmark": run.benchmark,
            "case": case.name,
            "figure": _rounded(case.figure),
            "unit": case.unit,
            "baseline": None
            if case.baseline is None
            else {"name": case.baseline.name, "value": _rounded(case.baseline.value)},
            "noise": None if case.noise is None else _rounded(case.noise, 3),
            "date": run.date,
            "gpu": run.gpu,
            "gpu_sha256": run.gpu_sha256,
            "versions": {name: run.versions.get(name) for name in VERSIONS},
            "commit": run.commit,
            "command": run.command,
        }
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Reads one line.

        Raises:
            ValueError: If a field is missing, unknown, or has the wrong type.
        """
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.keys() != _TYPES.keys():
            raise ValueError(f"fields must be {', '.join(_TYPES)} (got {line[:80]!r})")
        for name, types in _TYPES.items():
            if not isinstance(fields[name], types) or isinstance(fields[name], bool):
                raise ValueError(f"{name} has the wrong type (got {fields[name]!r})")
        if not math.isfinite(fields["figure"]):
            raise ValueError(f"figure must be finite (got {fields['figure']})")
        baseline = fields["baseline"]
        if baseline is not None and baseline.keys() != {"name", "value"}:
            raise ValueError(f"baseline must have name and value (got {baseline!r})")
        if fields["date"] is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", fields["date"]):
            raise ValueError(f"date must be YYYY-MM-DD (got {fields['date']!r})")
        digest = fields["gpu_sha256"]
        if digest is not None and not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"gpu_sha256 must be 64 lower-case hex digits (got {digest!r})")
        if fields["versions"].keys() != set(VERSIONS):
            raise ValueError(f"versions must be of {', '.join(VERSIONS)}")
        case = Case(
            name=fields["case"],
            figure=fields["figure"],
            unit=fields["unit"],
            baseline=None if baseline is None else Baseline(**baseline),
            noise=fields["noise"],
        )
        conditions = ("benchmark", "command", "commit", "date", "gpu", "gpu_sha256", "versions")
        return cls(case=case, run=Run(**{name: fields[name] for name in conditions}))


_OPTIONAL_TEXT = (str, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    "benchmark": (str,),
    "case": (str,),
    "figure": (int, float),
    "unit": (str,),
    "baseline": (dict, type(None)),
    "noise": (int, float, type(None)),
    "date": _OPTIONAL_TEXT,
    "gpu": _OPTIONAL_TEXT,
    "gpu_sha256": _OPTIONAL_TEXT,
    "versions": (dict,),
    "commit": _OPTIONAL_TEXT,
    "command": _OPTIONAL_TEXT,
}


def _rounded(value: float, digits: int = 7) -> float:
    """Value with so many significant digits; whole numbers without a point."""
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() else number


def product(gpu: str | None) -> str:
    """Short product name for file names, e.g. ``h200``; `CPU` for None."""
    if gpu is None:
        return CPU
    match = _PRODUCT.match(gpu)
    return (match[1] if match else re.sub(r"\W+", "-", gpu)).lower()


def read(path: Path) -> list[Record]:
    """Reads and checks a result file.

    Raises:
        RecordError: If a line breaks the schema, or two lines have the same key.
    """
    records: dict[tuple[str, str, str | None], Record] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            record = Record.from_json(line)
        except (ValueError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: {error}") from error
        if record.key in records:
            raise RecordError(f"{path}, line {number}: {record.key} is there twice")
        records[record.key] = record
    return list(records.values())


def read_all(directory: Path = RESULTS) -> list[Record]:
    """Reads every result file in a directory."""
    return [record for path in sorted(directory.glob("*.jsonl")) for record in read(path)]


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes a result file, replacing an existing one."""
    path.write_text("".join(f"{record.to_json()}\n" for record in records), "utf-8")


def keep(records: Iterable[Record], directory: Path = RESULTS) -> set[Path]:
    """Adds records to a directory's files; among equal keys, the newest date stays.

    Returns:
        Files that were written.
    """
    by_file: dict[str, list[Record]] = {}
    for record in records:
        by_file.setdefault(record.file_name, []).append(record)
    for name, new in by_file.items():
        path = directory / name
        by_key = {record.key: record for record in (read(path) if path.exists() else [])}
        for record in new:
            before = by_key.get(record.key)
            if before is None or (record.run.date or "") >= (before.run.date or ""):
                by_key[record.key] = record
        write(path, sorted(by_key.values(), key=lambda record: record.run.benchmark))
    return {directory / name for name in by_file}


def records_of(run: Run, cases: Iterable[Case]) -> Iterator[Record]:
    """Joins cases with their run."""
    return (Record(case=case, run=run) for case in cases)


def run_of(benchmark: str, environment: Mapping[str, Any], **conditions: Any) -> Run:
    """Builds a run's conditions from a benchmark's environment.

    Args:
        benchmark: Module under ``benchmarks``.
        environment: Versions; also the product as ``gpu`` or ``device``.
        **conditions: Other `Run` fields.
    """
    versions = {
        "torch": environment.get("torch"),
        "cuda": environment.get("CUDA"),
        "driver": environment.get("driver"),
        "nvgemm-aot": environment.get("nvgemm-aot"),
    }
    gpu = environment.get("gpu") or environment.get("device")
    if gpu in (None, CPU):
        gpu = conditions["gpu_sha256"] = None
    return Run(benchmark=benchmark, gpu=gpu, versions=versions, **conditions)


def commit() -> str | None:
    """Returns this checkout's commit, abbreviated; None outside a git repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@click.group()
def main() -> None:
    """Keep benchmark results."""


@main.command("keep")
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
def keep_files(paths: tuple[Path, ...]) -> None:
    """Add the records of PATHS to benchmarks/results; renew tables and figures afterwards."""
    for path in paths:
        for written in sorted(keep(read(path))):
            click.echo(f"{written}: has the records of {path}")


if __name__ == "__main__":
    main()
