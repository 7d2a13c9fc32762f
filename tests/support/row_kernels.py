"""The kernels of `data/rows.json`: one of each row of the support table, and bundles of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nvgemm_aot.bundle.content import BuiltKernel, BundleContent
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.pipeline.compiler import Task, compile_all, make_tasks
from nvgemm_aot.providers import load_provider
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.targets import build_target
from nvgemm_runtime.bundle.format import sha256_hex
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.target import Target
from repository import TESTS

ROWS: dict[str, dict[str, Any]] = {
    row.pop("row"): row for row in json.loads((TESTS / "data" / "rows.json").read_text())
}
TARGETS = sorted({row["target"] for row in ROWS.values()})


def make_task(row: dict[str, Any]) -> Task:
    is_quack = row["operator"].startswith("quack.")
    provider = load_provider("quack" if is_quack else "cutlass_operators")
    target = build_target(row["target"])
    found = provider.enumerate(Signature.parse(row["signature"]), target).candidates
    chosen = [candidate for candidate in found if candidate.operator == row["operator"]]
    assert len(chosen) == 1, f"{row['operator']} is {len(chosen)} of {len(found)} candidates"
    (task,) = make_tasks(chosen, target, provider)
    return task


def compile_rows(names: Iterable[str], cache: Cache) -> dict[str, BuiltKernel]:
    tasks = {name: make_task(ROWS[name]) for name in names}
    compiled = compile_all(list(tasks.values()), cache, jobs=1)
    assert not compiled.failures
    return {
        name: BuiltKernel(**task.candidate.facts(), payload=compiled.kernels[task.key].payload)
        for name, task in tasks.items()
    }


def write_kernels(folder: Path, arch: str, kernels: Iterable[BuiltKernel]) -> Path:
    """Write a bundle of kernels for one architecture, which ranks nothing."""
    path = folder / f"{arch}.nvgemm"
    write_bundle(
        path,
        BundleContent(
            target=Target(arch=arch),
            device=build_target(arch).device.name,
            generator="test",
            build_key=sha256_hex(b"build"),
            toolchain={"test": "1"},
            kernels=tuple(kernels),
            rankings=(),
        ),
    )
    return path
