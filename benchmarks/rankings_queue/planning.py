"""The committed queue's rows, as manifests to build."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rankings_queue.rows import Row
from benchmarks.shared.resuming import ORDER_SEED
from nvgemm_aot.manifest.parse import Declared, Manifest, load_manifest
from nvgemm_aot.manifest.shipped_manifests import find_manifest
from nvgemm_aot.targets import build_target
from nvgemm_aot.tuning.measuring.grid import CAPTURED, serving_between
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature

QUEUE = Path(__file__).with_name("queue.yaml")


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """Queue row and its bundle's manifest."""

    row: Row
    work: Manifest


def planned_row(
    name: str,
    manifest: str,
    work: Manifest,
    *,
    problems: Sequence[Problem] | None = None,
    neighbours: bool = True,
    serving: bool = False,
) -> PlannedRow:
    """Returns the row of a manifest with one target; other arguments are as in `Row`.

    Without ``problems``, the row's are those that its manifest declares.
    """
    (target,) = work.targets
    if problems is None:
        problems = [entry.problem for entry in work.declared]
    row = Row(
        name=name,
        manifest=manifest,
        file=f"{work.name}-{target.target.key}.nvgemm",
        problems=tuple(problems),
        neighbours=neighbours,
        serving=serving,
    )
    return PlannedRow(row=row, work=work)


def read_queue(path: Path = QUEUE) -> list[PlannedRow]:
    """Returns the rows in order, each without problems of an earlier row for its device.

    A row for serving also builds the problems declared in earlier rows between which it measures.
    """
    queue = yaml.safe_load(path.read_text())
    seen: dict[str, set[Problem]] = {}
    rows = []
    for row in queue["rows"]:
        device = row.get("device", queue["device"])
        target = build_target(queue["arch"], device)
        manifest = load_manifest(find_manifest(Path(row["manifest"])))
        known = seen.setdefault(device, set())
        serving = row.get("serving", False)
        declared = _problems(manifest, row)
        problems = [one for one in _to_measure(declared, serving) if one not in known]
        known.update(problems)
        lines = {replace(one, m=1) for one in problems}
        declared = [
            one for one in declared if one in problems or (serving and replace(one, m=1) in lines)
        ]
        work = Manifest(
            name=row["name"],
            description=manifest.description,
            targets=(target,),
            declared=tuple(
                Declared(problem=one, candidates=row.get("candidates", queue["candidates"]))
                for one in declared
            ),
            providers=tuple(row.get("providers", queue["providers"])),
        )
        rows.append(
            planned_row(
                row["name"],
                row["manifest"],
                work,
                problems=problems,
                neighbours=row.get("neighbours", not serving),
                serving=serving,
            )
        )
    return rows


def _to_measure(declared: Sequence[Problem], serving: bool) -> list[Problem]:
    """Returns a row's declared problems and, for serving, those between."""
    return [*declared, *(serving_between(declared) if serving else ())]


def _problems(manifest: Manifest, row: dict[str, Any]) -> list[Problem]:
    dtype = DType(row["dtype"])
    floats = (DType.BF16, DType.FP16)
    operations = [Op(name) for name in row.get("op", [Op.MM.value])]
    products = [
        entry.problem
        for entry in manifest.declared
        if entry.problem.signature.op in operations
        and entry.problem.signature.dtype in floats
        and ("op" in row or _is_gated(entry.problem) == row.get("gated", False))
    ]
    weights = {tuple(pair) for pair in row["nk"]} if "nk" in row else None
    heads = {tuple(pair) for pair in row.get("heads", ())}
    found = sorted(
        {
            replace(one, signature=_in_type(one.signature, dtype))
            for one in products
            if (weights is None or (one.n, one.k) in weights)
            and ((one.n, one.k) not in heads or one.m <= CAPTURED[-1])
        }
    )
    if "sample" in row:
        random.Random(ORDER_SEED).shuffle(found)
        found = sorted(found[: row["sample"]])
    return found


def _is_gated(problem: Problem) -> bool:
    epilogue = problem.signature.epilogue
    return epilogue is not None and epilogue.gate is not None


def _in_type(signature: Signature, dtype: DType) -> Signature:
    a = signature.a if signature.op is Op.GATHERED_MM else dtype  # its routing weights are fp32
    return replace(signature, a=a, b=dtype, out=dtype)


def problems_of(manifest: str) -> set[Problem]:
    """Returns all problems of a manifest in the queue, those of earlier rows included."""
    queue = yaml.safe_load(QUEUE.read_text())
    declared = load_manifest(find_manifest(Path(manifest)))
    rows = [row for row in queue["rows"] if row["manifest"] == manifest]
    return {
        problem
        for row in rows
        for problem in _to_measure(_problems(declared, row), row.get("serving", False))
    }
