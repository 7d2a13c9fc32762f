"""The layers of both Python packages, from import-linter's contracts and the docstrings."""

from __future__ import annotations

import ast
from pathlib import Path
from xml.sax.saxutils import escape

from .tables import table

WIDTH, HEIGHT, GAP = 720, 34, 8


def section(root: Path, package: str) -> str:
    """A drawing of the layers, highest first, and a table of what each package is for."""
    layers = read_layers(root, package)
    folder = next(root.glob(f"*/{package}"))
    rows = [
        (f"`{name}`", purpose(folder / name))
        for layer in layers
        for name in layer
        if (folder / name).is_dir()
    ]
    return f"{drawing(layers)}\n\n" + table(("package", "purpose"), rows)


def read_layers(root: Path, package: str) -> list[list[str]]:
    """Names of each layer of a package, highest first."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # pytest brings it

    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    (contract,) = (
        one
        for one in project["tool"]["importlinter"]["contracts"]
        if one["type"] == "layers" and one["containers"] == [package]
    )
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def purpose(folder: Path) -> str:
    """The first paragraph of a package's docstring."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    return text.partition("\n\n")[0].replace("``", "`")


def drawing(layers: list[list[str]]) -> str:
    """Rows of boxes in SVG, in the colour of the text around it."""
    height = len(layers) * (HEIGHT + GAP) - GAP
    parts = []
    for row, layer in enumerate(layers):
        width = (WIDTH - GAP * (len(layer) - 1)) / len(layer)
        for column, name in enumerate(layer):
            x, y = column * (width + GAP), row * (HEIGHT + GAP)
            parts.append(
                f'<rect x="{x + 1:.0f}" y="{y + 1}" width="{width - 2:.0f}" '
                f'height="{HEIGHT - 2}" rx="4" fill="none" stroke="currentColor"/>'
                f'<text x="{x + width / 2:.0f}" y="{y + HEIGHT / 2 + 5:.0f}">{escape(name)}</text>'
            )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="layers, highest first" '
        'style="max-width: 45rem; font-size: 14px; text-anchor: middle; fill: currentColor">'
        f"{''.join(parts)}</svg>"
    )
