"""Rows of problems to measure, and their progress."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvgemm_aot.tuning.outcome import TuningOutcome, read_outcome
from nvgemm_aot.tuning.state.journal import Journal, state_path
from nvgemm_runtime.gemm.problem import Problem

ROWS = "rows.json"
"""File beside the bundles that lists their rows, for machines without the builder."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Queue row.

    Attributes:
        name: Row name.
        manifest: Shipped manifest with its problems.
        file: Name of its bundle, before and after measuring.
        problems: Problems to measure, in the manifest's order.
        neighbours: True if winners at neighbouring m are measured too.
        serving: True if the m between declared ones that serving engines use are measured too, and
            confirmed rankings are not measured again.
    """

    name: str
    manifest: str
    file: str
    problems: tuple[Problem, ...]
    neighbours: bool = True
    serving: bool = False

    def bundle(self, directory: Path) -> Path:
        """Returns the row's bundle in a directory."""
        return directory / self.file


def write_rows(directory: Path, rows: Sequence[Row]) -> None:
    """Writes the bundles' rows beside them."""
    document = [
        {**vars(row), "problems": [problem.key for problem in row.problems]} for row in rows
    ]
    (directory / ROWS).write_text(json.dumps(document, indent=1) + "\n")


def read_rows(directory: Path) -> list[Row]:
    """Reads a directory's rows; empty if no bundle was built."""
    path = directory / ROWS
    if not path.exists():
        return []
    return [
        Row(**{**row, "problems": tuple(map(Problem.parse, row["problems"]))})
        for row in json.loads(path.read_text())
    ]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Row progress.

    Attributes:
        outcomes: Outcomes by problem key.
        is_done: True if measuring again would change nothing.
    """

    row: Row
    outcomes: dict[str, TuningOutcome]
    is_done: bool

    @property
    def unmeasured(self) -> list[Problem]:
        """Problems without a measurement."""
        return [one for one in self.row.problems if one.key not in self.outcomes]

    @property
    def doubtful(self) -> int:
        """Measurements with doubts."""
        return sum(bool(outcome.doubts) for outcome in self.outcomes.values())


def progress_of(row: Row, results: Path) -> Progress:
    """Reads the progress from the state that `tune` keeps."""
    journal = Journal(state_path(row.bundle(results)), {})
    outcomes = {
        line["problem"]: read_outcome(line["outcome"])
        for line in journal.lines
        if "outcome" in line
    }
    return Progress(row=row, outcomes=outcomes, is_done=done_mark(row, results).exists())


def done_mark(row: Row, results: Path) -> Path:
    """Returns the file that marks a row as measured to its end.

    It holds the build key of the bundle that was measured.
    """
    return results / f"{row.name}.done"


def is_done_with(row: Row, results: Path, build_key: str) -> bool:
    """Returns True if the bundle with this build key is measured to its end."""
    mark = done_mark(row, results)
    return mark.exists() and mark.read_text().strip() == build_key


def table(found: Sequence[Progress], *, most: int | None) -> list[str]:
    """Returns a table of all rows, and a row's unmeasured problems up to a limit."""
    lines = [f"{'row':<26} {'problems':>8} {'measured':>8} {'doubtful':>8} {'unmeasured':>10}"]
    for one in found:
        count = len(one.row.problems)
        left = len(one.unmeasured)
        lines.append(
            f"{one.row.name:<26} {count:8d} {count - left:8d} {one.doubtful:8d} {left:10d}"
            + ("  done" if one.is_done else "")
        )
    total = sum(len(one.row.problems) for one in found)
    left = sum(len(one.unmeasured) for one in found)
    doubtful = sum(one.doubtful for one in found)
    lines.append(f"{'all':<26} {total:8d} {total - left:8d} {doubtful:8d} {left:10d}")
    for one in found:
        keys = [problem.key for problem in one.unmeasured]
        shown = keys if most is None else keys[:most]
        lines += [f"unmeasured, {one.row.name}: {key}" for key in shown]
        if len(keys) > len(shown):
            lines.append(f"unmeasured, {one.row.name}: {len(keys) - len(shown)} more (--all)")
    return lines
