"""The texts of a kernel wheel: the files of the template, and what fills them in."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.errors import PackagingError
from nvgemm_runtime.gemm.problem import Problem

MAX_PROBLEM_ROWS = 60
"""Longest table of problems in a description, in rows; the bundle itself lists them all."""


def read_template(name: str) -> str:
    """Read a file of the template, installed inside this package or in the source checkout.

    Raises:
        PackagingError: If it is in neither place.
    """
    installed = resources.files("nvgemm_aot").joinpath("wheels").joinpath(name)
    checkout = Path(__file__).resolve().parents[3] / "wheels" / name
    for candidate in (installed, checkout):
        if candidate.is_file():
            return candidate.read_text(encoding="utf-8")
    raise PackagingError(
        f"the wheel template {name} is neither at {installed} nor at {checkout}: "
        "reinstall nvgemm-aot"
    )


def fill_template(template: str, **values: str) -> str:
    """Read a file of the template and put ``values`` in place of their ``$names``."""
    return Template(read_template(template)).substitute(values)


def render_description(distribution: str, headers: Sequence[Header], summary: str) -> str:
    """Write a wheel's description, in Markdown.

    Args:
        distribution: Name of the wheel's distribution.
        headers: Headers of its bundles.
        summary: One line about it.
    """
    bundles = [
        (
            f"`{header.target.key}`",
            header.device,
            f"{len(header.kernels)}",
            f"{len(header.rankings)}",
            "; ".join(f"{item.kind} of {item.by} for {item.gpu}" for item in header.sources),
        )
        for header in headers
    ]
    tools = sorted({item for header in headers for item in header.toolchain.items()})
    return fill_template(
        "README.md.in",
        distribution=distribution,
        summary=summary.rstrip("."),
        bundles=_table(("Target", "Tuned for", "Kernels", "Problems", "Order from"), bundles),
        problems=_problems(headers),
        toolchain=_table(("Tool", "Version"), tools),
    )


def _problems(headers: Sequence[Header]) -> str:
    """Tabulate declared problems, one row for all m of a shape that the same targets declare."""
    targets: dict[Problem, list[str]] = {}
    for header in headers:
        for ranking in header.rankings:
            targets.setdefault(ranking.problem, []).append(header.target.arch)
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    for problem in sorted(targets):
        archs = ", ".join(targets[problem])
        n, k, batch = str(problem.n), str(problem.k), str(problem.batch)
        rows.setdefault((f"`{problem.signature.key}`", n, k, batch, archs), []).append(problem.m)
    shown = [
        (*row[:4], ", ".join(map(str, sizes)), row[4])
        for row, sizes in list(rows.items())[:MAX_PROBLEM_ROWS]
    ]
    table = _table(("Signature", "n", "k", "Batch", "m", "Targets"), shown)
    hidden = len(rows) - len(shown)
    return f"{table}\n\n… and {hidden} more rows." if hidden else table


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return "None declared."
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)
