"""``nvgemm-aot coverage``."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..targets import DEFAULT_DEVICE

if TYPE_CHECKING:
    from ..manifest.parse import Manifest
    from ..workload.undeclarable import Undeclarable

_ANY_PATH = click.Path(path_type=Path)
_WEIGHTS = ("problems", "count", "flops")


class _Percent(click.ParamType):  # type: ignore[type-arg]
    """An exact percentage: 99.9 is not the binary fraction beside it."""

    name = "percent"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Decimal:
        try:
            percent = Decimal(value)
        except InvalidOperation:
            self.fail(f"{value!r} is not a number", param, ctx)
        if not (percent.is_finite() and 0 <= percent <= 100):
            self.fail(f"{value} is not in 0..100", param, ctx)
        return percent


@click.command()
@click.argument("manifest", type=_ANY_PATH)
@click.argument("bundles", type=_ANY_PATH, nargs=-1)
@click.option(
    "--target",
    "archs",
    type=click.Choice(sorted(DEFAULT_DEVICE)),
    multiple=True,
    help="Look at this architecture, on its usual GPU, and not at the manifest's targets.",
)
@click.option(
    "--by",
    type=click.Choice(_WEIGHTS),
    default="count",
    show_default=True,
    help="What to sort by, and what --fail-under is a percentage of.",
)
@click.option("--fail-under", type=_Percent(), help="Exit with 23 where less is covered.")
@click.option(
    "--declared-only", is_flag=True, help="For --fail-under: what is served by signature is missed."
)
@click.option(
    "--count-undeclarable",
    is_flag=True,
    help="Count as missed, too, what a recording met and no manifest can declare, such as a bias.",
)
@click.option("--html", type=_ANY_PATH, help="Also write a page with a picture of the shapes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def coverage(
    manifest: Path,
    bundles: tuple[Path, ...],
    archs: tuple[str, ...],
    by: str,
    fail_under: Decimal | None,
    declared_only: bool,
    count_undeclarable: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Say which GEMMs of MANIFEST, recorded or written by hand, BUNDLES serve.

    MANIFEST is a file, or the name of a manifest that comes with nvgemm-aot. BUNDLES are bundle
    files, directories of them, or kernel wheels; without any, those that are installed or named in
    NVGEMM_AOT_BUNDLES count.
    """
    from ..workload.coverage import Weight, cover
    from ..workload.find_bundles import installed_bundles, read_bundles
    from .coverage_gate import require_coverage
    from .render_coverage import coverage_document, coverage_text

    if declared_only and fail_under is None:
        raise click.UsageError("--declared-only goes with --fail-under")
    recorded, undeclarable = _load(manifest, archs)
    found = read_bundles(bundles) if bundles else installed_bundles()
    weight = Weight(by)
    targets = cover(
        recorded,
        found.views,
        unusable=found.unusable,
        undeclarable=undeclarable if count_undeclarable else (),
    )
    if html is not None:
        from ..storage.files import write_atomic
        from .coverage_page import coverage_page

        write_atomic(html, coverage_page(recorded, targets, weight))
    document = coverage_document(recorded, targets, weight)
    click.echo(json.dumps(document, indent=2) if as_json else coverage_text(document))
    if undeclarable and not count_undeclarable:
        met = sum(gemm.count for gemm in undeclarable)
        click.echo(
            f"nvgemm-aot: not counted: {met} GEMMs that no manifest can declare, such as "
            f"{undeclarable[0].gemm}; --count-undeclarable counts them as missed",
            err=True,
        )
    if fail_under is not None:
        require_coverage(targets, fail_under, by=weight, declared_only=declared_only)


def _load(manifest: Path, archs: tuple[str, ...]) -> tuple[Manifest, tuple[Undeclarable, ...]]:
    """Read a manifest, and what a recording met beside it."""
    from ..manifest.parse import parse_manifest
    from ..manifest.shipped import find_manifest
    from ..manifest.yaml_nodes import read_text
    from ..targets import build_target
    from ..workload.undeclarable import read_undeclarable

    path = find_manifest(manifest)
    text = read_text(path)  # once, for a pipe can be read once only
    recorded = parse_manifest(path, text)
    if archs:
        recorded = replace(recorded, targets=tuple(map(build_target, sorted(set(archs)))))
    return recorded, read_undeclarable(text)
