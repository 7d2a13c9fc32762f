"""Writes a wheel's description from the template in `wheels/`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.errors import PackagingError, count_text
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import CPU

MAX_PROBLEM_ROWS = 60
"""Longest problem table in a description, in rows; the bundle itself lists them all."""


def read_template(name: str) -> str:
    """Reads a template file, installed inside this package or in the source checkout.

    Raises:
        PackagingError: If the file is in neither place.
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
    """Reads a template file and replaces its ``$names`` with ``values``."""
    return Template(read_template(template)).substitute(values)


def cuda_versions(headers: Sequence[Header]) -> list[str]:
    """Returns the CUDA versions of all GPU targets, sorted."""
    return sorted({header.target.cuda for header in headers if header.target.arch != CPU})


def _install_commands(distributions: Sequence[str], cudas: Sequence[str]) -> str:
    """Returns commands that install the wheel files of the kernels and of nvgemm-aot.

    No registry has either, so they are installed by file: with one line, or one per CUDA version if
    the wheel has several. All parts are named, or pip would look for the others in a registry.
    """
    first, *others = (f"{name.replace('-', '_')}-*.whl" for name in distributions)
    rest = "".join(f" {wheel}" for wheel in others)
    if len(cudas) < 2:
        return f"pip install nvgemm_aot-*.whl {first}{rest}"
    return "\n".join(
        f'pip install nvgemm_aot-*.whl "$(echo ./{first})[{cuda}]"{rest}'
        f"  # beside a torch for CUDA {cuda.removeprefix('cu')}"
        for cuda in cudas
    )


def render_description(
    distribution: str,
    headers: Sequence[Header],
    summary: str,
    *,
    parts: Sequence[str] = (),
    cudas: Sequence[str] | None = None,
) -> str:
    """Writes a wheel's description, in Markdown.

    Args:
        distribution: The wheel's name.
        headers: Headers of its bundles.
        summary: One line about it.
        parts: Names of all wheels that it is installed with, itself among them; none if it is one.
        cudas: CUDA versions of all these wheels; by default those of its bundles.
    """
    bundles = [
        (
            f"`{header.target.key}`",
            ", ".join(header.devices),
            f"{len(header.kernels)}",
            f"{header.declared_count}",
            "; ".join(f"{item.kind} of {item.by} for {item.gpu}" for item in header.sources),
        )
        for header in headers
    ]
    tools = sorted({item for header in headers for item in header.toolchain.items()})
    return fill_template(
        "README.md.in",
        distribution=distribution,
        summary=summary.rstrip("."),
        install=_install_commands(
            parts or [distribution], cuda_versions(headers) if cudas is None else cudas
        ),
        bundles=_markdown_table(
            ("Target", "Tuned for", "Kernels", "Problems", "Order from"), bundles
        ),
        problems=_problem_table(headers),
        toolchain=_markdown_table(("Tool", "Version"), tools),
    )


def _problem_table(headers: Sequence[Header]) -> str:
    """Tabulates declared problems, one row for all m of a shape that the same targets declare."""
    targets: dict[Problem, list[str]] = {}
    for header in headers:
        for ranking in header.rankings:
            if ranking.is_declared:
                archs = targets.setdefault(ranking.problem, [])
                archs += [header.target.arch] if header.target.arch not in archs else []
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    for problem in sorted(targets):
        declaring = ", ".join(targets[problem])
        n, k, batch = str(problem.n), str(problem.k), str(problem.batch)
        rows.setdefault((f"`{problem.signature.key}`", n, k, batch, declaring), []).append(
            problem.m
        )
    shown = [
        (*row[:4], ", ".join(map(str, sizes)), row[4])
        for row, sizes in list(rows.items())[:MAX_PROBLEM_ROWS]
    ]
    table = _markdown_table(("Signature", "n", "k", "Batch", "m", "Targets"), shown)
    hidden = len(rows) - len(shown)
    return f"{table}\n\n… and {count_text(hidden, 'more row')}." if hidden else table


def _markdown_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return "None declared."
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)
