"""Facts about architectures and providers stand in tables alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from nvgemm_aot.providers import PROVIDERS
from repository import ROOT

RUNTIME = ROOT / "runtime" / "nvgemm_runtime"


def nodes(*roots: Path) -> Iterator[tuple[Path, ast.AST]]:
    for root in roots:
        for path in root.rglob("*.py"):
            yield from ((path, node) for node in ast.walk(ast.parse(path.read_text("utf-8"))))


def texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def test_no_code_compares_architectures() -> None:
    compared = [
        (path.name, node.lineno)
        for path, node in nodes(ROOT / "aot" / "nvgemm_aot", RUNTIME)
        if isinstance(node, ast.Compare) and any(text.startswith("sm_") for text in texts(node))
    ]
    assert compared == []


def test_the_runtime_names_no_provider_but_for_limits_of_old_bundles() -> None:
    naming = {
        path.name
        for path, node in nodes(RUNTIME)
        if isinstance(node, ast.Constant) and node.value in PROVIDERS
    }
    assert naming == {"group_limits.py"}
