"""Every environment variable of the project, from the constants that name them.

A variable is a module's constant, ``..._VARIABLE = "NVGEMM_AOT_..."``; the text under the constant
is what this page says of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .tables import table

SOURCES = ("runtime/nvgemm_runtime", "aot/nvgemm_aot")
PREFIX = "NVGEMM_AOT"


def section(root: Path) -> str:
    """A table of the variables, sorted by name."""
    rows = sorted(variables(root).items())
    return table(("variable", "meaning"), [(f"`{name}`", text) for name, text in rows])


def variables(root: Path) -> dict[str, str]:
    """By name: the text under the constant; the longer one, where two modules name a variable."""
    found: dict[str, str] = {}
    for package in SOURCES:
        for path in sorted(root.glob(f"{package}/**/*.py")):
            for name, text in _constants(ast.parse(path.read_text("utf-8"))):
                found[name] = max(found.get(name, ""), text, key=len)
    return found


def _constants(module: ast.Module) -> Iterator[tuple[str, str]]:
    for statement, following in zip(module.body, [*module.body[1:], None]):
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=str(name))):
                if not (target.endswith("_VARIABLE") and name.startswith(PREFIX)):
                    continue
            case _:
                continue
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.replace("``", "`").split())
            case _:
                yield name, ""
