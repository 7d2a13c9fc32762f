"""Which private names of torch each module uses, from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .tables import table

SOURCES = ("runtime/nvgemm_runtime", "aot/nvgemm_aot")


def section(root: Path) -> str:
    """A table of the modules that use private names, sorted by path."""
    rows = [
        (f"`{path}`", ", ".join(f"`{name}`" for name in sorted(names)))
        for path, names in sorted(by_module(root).items())
    ]
    return table(("module", "private names of torch"), rows)


def by_module(root: Path) -> dict[str, set[str]]:
    """By a module's path: the private names in its code and in its strings."""
    found = {}
    for package in SOURCES:
        for path in root.glob(f"{package}/**/*.py"):
            names = {one for one in _names(ast.parse(path.read_text("utf-8"))) if is_private(one)}
            if names:
                found[path.relative_to(root / package).as_posix()] = _longest(names)
    return found


def is_private(name: str) -> bool:
    """Whether a dotted name is torch's, with a part that begins with one underscore."""
    first, *others = name.split(".")
    return first == "torch" and any(
        part.startswith("_") and not part.startswith("__") for part in others
    )


def _longest(names: set[str]) -> set[str]:
    """Without names of which others are a part: ``torch._C`` beside ``torch._C._foo``."""
    return {name for name in names if not any(one.startswith(f"{name}.") for one in names)}


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{one.name}" for one in names)
            case ast.Constant(value=str(text)) if " " not in text and "\n" not in text:
                yield text.strip(".")
            case ast.Attribute():
                yield _dotted(node)


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{_dotted(value)}.{attribute}"
    return ""
