"""What is to be measured, row by row, and what of it has been."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.resuming import ORDER_SEED
from nvgemm_aot.manifest.parse import Declared, Manifest, load_manifest
from nvgemm_aot.manifest.shipped import find_manifest
from nvgemm_aot.targets import build_target
from nvgemm_aot.tuning.outcome import TuningOutcome, read_outcome
from nvgemm_aot.tuning.state import Journal, state_path
from nvgemm_runtime.gemm.problem import DType, Op, Problem

QUEUE = Path(__file__).with_name("queue.yaml")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the queue.

    Attributes:
        name: Of its bundle.
        manifest: The shipped manifest that its problems are of.
        work: What is built and measured.
    """

    name: str
    manifest: str
    work: Manifest

    @property
    def problems(self) -> list[Problem]:
        """What is measured, in the order of the manifest."""
        return [entry.problem for entry in self.work.declared]

    def bundle(self, directory: Path) -> Path:
        """Where its bundle is: what is to be measured, or what was."""
        (target,) = self.work.targets
        return directory / f"{self.name}-{target.target.key}.nvgemm"


def read_queue(path: Path = QUEUE) -> list[Row]:
    """The rows, in order; each without what an earlier one has."""
    queue = yaml.safe_load(path.read_text())
    target = build_target(queue["arch"], queue["device"])
    seen: set[Problem] = set()
    rows = []
    for row in queue["rows"]:
        manifest = load_manifest(find_manifest(Path(row["manifest"])))
        problems = [one for one in _problems(manifest, row) if one not in seen]
        seen.update(problems)
        work = Manifest(
            name=row["name"],
            description=manifest.description,
            targets=(target,),
            declared=tuple(
                Declared(problem=one, candidates=queue["candidates"]) for one in problems
            ),
            providers=tuple(queue["providers"]),
        )
        rows.append(Row(name=row["name"], manifest=row["manifest"], work=work))
    return rows


def _problems(manifest: Manifest, row: dict[str, Any]) -> list[Problem]:
    dtype = DType(row["dtype"])
    floats = (DType.BF16, DType.FP16)
    products = [
        entry.problem
        for entry in manifest.declared
        if entry.problem.signature.op is Op.MM and entry.problem.signature.a in floats
    ]
    weights = {tuple(pair) for pair in row["nk"]} if "nk" in row else None
    found = sorted(
        {
            replace(one, signature=replace(one.signature, a=dtype, b=dtype, out=dtype))
            for one in products
            if weights is None or (one.n, one.k) in weights
        }
    )
    if "sample" in row:
        random.Random(ORDER_SEED).shuffle(found)
        found = sorted(found[: row["sample"]])
    return found


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How much of a row has been measured.

    Attributes:
        outcomes: By problem key.
        is_done: Whether measuring it again would change nothing.
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
    """Read how far measuring has come, from the state that `tune` keeps."""
    journal = Journal(state_path(row.bundle(results)), {})
    outcomes = {
        line["problem"]: read_outcome(line["outcome"])
        for line in journal.lines
        if "outcome" in line
    }
    return Progress(row=row, outcomes=outcomes, is_done=done_mark(row, results).exists())


def done_mark(row: Row, results: Path) -> Path:
    """An empty file that is there when a row has been measured to its end."""
    return results / f"{row.name}.done"


def table(found: Sequence[Progress], *, most: int | None) -> list[str]:
    """Lines of a table of all rows, and of the unmeasured problems, at most so many of a row."""
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


def problems_of(manifest: str) -> set[Problem]:
    """All problems that the queue has of a manifest, those among them that an earlier row has."""
    queue = yaml.safe_load(QUEUE.read_text())
    declared = load_manifest(find_manifest(Path(manifest)))
    rows = [row for row in queue["rows"] if row["manifest"] == manifest]
    return {problem for row in rows for problem in _problems(declared, row)}
