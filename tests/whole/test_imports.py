"""Which part may import which: the runtime is light and never reaches into the builder."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from repository import ROOT

HEAVY = ("torch", "cutlass", "nvMatmulHeuristics", "pydantic", "cuda", "tvm_ffi")


def modules_after(statement: str) -> set[str]:
    """Top-level packages that a fresh process has imported after ``statement``."""
    script = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not result.stderr, "importing is silent"
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module", sorted(p.stem for p in (ROOT / "runtime/nvgemm_runtime").glob("[!_]*.py"))
)
def test_runtime_modules_import_neither_builder_nor_compiler(module: str) -> None:
    loaded = modules_after(f"import nvgemm_runtime.{module}")
    assert not loaded & {*HEAVY, "nvgemm_aot"}


def test_runtime_sources_never_name_the_builder() -> None:
    for path in (ROOT / "runtime").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module or "")
            assert not {name.split(".")[0] for name in names} & {"nvgemm_aot", "cutlass"}, path


def test_the_command_starts_without_the_compiler() -> None:
    assert not modules_after("import nvgemm_aot.cli.main") & {*HEAVY, "yaml", "packaging", "wheel"}


def test_errors_import_nothing_of_the_package() -> None:
    tree = ast.parse((ROOT / "runtime/nvgemm_runtime/errors.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imports} == {"__future__", "typing"}
