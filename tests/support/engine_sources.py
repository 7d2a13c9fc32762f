"""Parameters of the functions at which plug-ins enter engines, as each release's sources have them.

`tests/data/engine_seams.json` holds a row a release. With a release's Python files in a folder::

    PYTHONPATH=runtime python tests/support/engine_sources.py vllm 0.34.0 DIRECTORY  # adds a row
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.engines import sglang_plugin, vllm_plugin
from nvgemm_runtime.engines.seams import Seam

FILE = Path(__file__).resolve().parents[1] / "data/engine_seams.json"

SEAMS = {
    "vllm": (*vllm_plugin.HEAD_SEAMS, *vllm_plugin.FP8_SEAMS, *vllm_plugin.WORKER_SEAMS),
    "sglang": (*sglang_plugin.LINEAR_SEAMS, *sglang_plugin.REPORT_SEAMS),
}
"""By distribution."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A release's functions: parameters by ``module:name``, None for one that is not there."""

    name: str
    version: str
    parameters: dict[str, list[str] | None]

    def of(self, seam: Seam) -> tuple[str, ...] | None:
        """Parameters of a seam's function."""
        parameters = self.parameters[key(seam)]
        return None if parameters is None else tuple(parameters)


def key(seam: Seam) -> str:
    """The name of a seam's function in a row."""
    return f"{seam.module}:{seam.name}"


def load() -> list[Release]:
    """The rows, by name and version."""
    return [Release(**row) for row in json.loads(FILE.read_text())]


def read(name: str, version: str, root: Path) -> Release:
    """A release's row, from its sources."""
    found = {
        key(seam): _parameters(root, seam.module, seam.name.split(".")) for seam in SEAMS[name]
    }
    return Release(name=name, version=version, parameters=found)


def _parameters(root: Path, module: str, names: list[str]) -> list[str] | None:
    node = _find(root, module, names[0])
    for name in names[1:]:
        body = node.body if isinstance(node, ast.ClassDef) else []
        node = next((one for one in body if getattr(one, "name", None) == name), None)
    if not isinstance(node, ast.FunctionDef):
        return None
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in every]


def _find(root: Path, module: str, name: str) -> ast.stmt | None:
    """What defines a name in a module, through whatever imports it from elsewhere."""
    path = root.joinpath(*module.split("."))
    package = path.is_dir()
    path = path / "__init__.py" if package else path.with_suffix(".py")
    if not path.exists():
        return None
    for node in _statements(ast.parse(path.read_text()).body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parts = module.split(".")
                    parts = parts[: len(parts) - node.level + package] if node.level else []
                    return _find(root, ".".join([*parts, *filter(None, [node.module])]), alias.name)
    return None


def _statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements([*node.body, *node.orelse])


def main() -> None:
    name, version, root = sys.argv[1:]
    rows = (
        [one for one in load() if (one.name, one.version) != (name, version)]
        if FILE.exists()
        else []
    )
    rows.append(read(name, version, Path(root)))
    rows.sort(key=lambda one: (one.name, tuple(map(int, one.version.split(".")))))
    FILE.write_text(json.dumps([vars(one) for one in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
