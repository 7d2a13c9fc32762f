"""The committed queue's rows, as manifests to build."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rankings_queue.rows import Row
from benchmarks.shared.resuming import ORDER_SEED
from nvgemm_aot.manifest.parse import Declared, Manifest, load_manifest
from nvgemm_aot.manifest.shipped_manifests import find_manifest
from nvgemm_aot.targets import build_target
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature

QUEUE = Path(__file__).with_name("queue.yaml")


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """Queue row and its bundle's manifest."""

    row: Row
    work: Manifest


def planned_row(name: str, manifest: str, work: Manifest, *, neighbours: bool = True) -> PlannedRow:
    """Returns the row of a manifest with one target; ``neighbours`` is as in `Row`."""
    (target,) = work.targets
    row = Row(
        name=name,
        manifest=manifest,
        file=f"{work.name}-{target.target.key}.nvgemm",
        problems=tuple(entry.problem for entry in work.declared),
        neighbours=neighbours,
    )
    return PlannedRow(row=row, work=work)


def read_queue(path: Path = QUEUE) -> list[PlannedRow]:
    """Returns the rows in order, each without problems of an earlier row for its device."""
    queue = yaml.safe_load(path.read_text())
    seen: dict[str, set[Problem]] = {}
    rows = []
    for row in queue["rows"]:
        device = row.get("device", queue["device"])
        target = build_target(queue["arch"], device)
        manifest = load_manifest(find_manifest(Path(row["manifest"])))
        known = seen.setdefault(device, set())
        problems = [one for one in _problems(manifest, row) if one not in known]
        known.update(problems)
        work = Manifest(
            name=row["name"],
            description=manifest.description,
            targets=(target,),
            declared=tuple(
                Declared(problem=one, candidates=row.get("candidates", queue["candidates"]))
                for one in problems
            ),
            providers=tuple(row.get("providers", queue["providers"])),
        )
        neighbours = row.get("neighbours", True)
        rows.append(planned_row(row["name"], row["manifest"], work, neighbours=neighbours))
    return rows


def _problems(manifest: Manifest, row: dict[str, Any]) -> list[Problem]:
    dtype = DType(row["dtype"])
    floats = (DType.BF16, DType.FP16)
    operations = [Op(name) for name in row.get("op", [Op.MM.value])]
    products = [
        entry.problem
        for entry in manifest.declared
        if entry.problem.signature.op in operations and entry.problem.signature.dtype in floats
    ]
    weights = {tuple(pair) for pair in row["nk"]} if "nk" in row else None
    found = sorted(
        {
            replace(one, signature=_in_type(one.signature, dtype))
            for one in products
            if weights is None or (one.n, one.k) in weights
        }
    )
    if "sample" in row:
        random.Random(ORDER_SEED).shuffle(found)
        found = sorted(found[: row["sample"]])
    return found


def _in_type(signature: Signature, dtype: DType) -> Signature:
    a = signature.a if signature.op is Op.GATHERED_MM else dtype  # its routing weights are fp32
    return replace(signature, a=a, b=dtype, out=dtype)


def problems_of(manifest: str) -> set[Problem]:
    """Returns all problems of a manifest in the queue, those of earlier rows included."""
    queue = yaml.safe_load(QUEUE.read_text())
    declared = load_manifest(find_manifest(Path(manifest)))
    rows = [row for row in queue["rows"] if row["manifest"] == manifest]
    return {problem for row in rows for problem in _problems(declared, row)}
