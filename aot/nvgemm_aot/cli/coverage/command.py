"""``nvgemm-aot coverage``: shows the GEMMs in a manifest that a set of bundles serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime.gemm.target import TargetName

from ..terminal.printing import count_text, percent_text, print_result, table
from ..terminal.shared_options import ANY_PATH, ARCHITECTURE_NAMES, TargetNameParam, json_option
from .names import WEIGHT_NAMES, ranked_as_text

if TYPE_CHECKING:
    from ...manifest.parse import Manifest
    from ...targets import BuildTarget
    from ...workload.coverage import GemmCoverage, TargetCoverage, Weight

Document = dict[str, Any]

_MOST_REFUSALS = 3


class _Percent(click.ParamType):  # type: ignore[type-arg]
    """A decimal percentage: 99.9 exactly, not the nearest binary fraction."""

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
@click.argument("manifest", type=ANY_PATH)
@click.argument("bundles", type=ANY_PATH, nargs=-1)
@click.option(
    "--target",
    "names",
    type=TargetNameParam(),
    multiple=True,
    help="Cover this architecture's GPUs instead of the manifest's targets: one of "
    f"{ARCHITECTURE_NAMES}. "
    "Platform and CUDA version are the manifest's unless named, as in sm_90a-linux_aarch64-cu12.",
)
@click.option(
    "--by",
    type=click.Choice(tuple(WEIGHT_NAMES)),
    default="count",
    show_default=True,
    help="Sort order, and the unit of --fail-under.",
)
@click.option("--fail-under", type=_Percent(), help="Exit with status 23 if less is covered.")
@click.option(
    "--declared-only",
    is_flag=True,
    help="For --fail-under: count problems served by signature as missed.",
)
@click.option(
    "--count-undeclarable",
    is_flag=True,
    help="Also count recorded GEMMs that no manifest can declare, e.g. in fp32, as missed.",
)
@click.option("--html", type=ANY_PATH, help="Also write a page with a chart of the shapes.")
@json_option
def coverage(
    manifest: Path,
    bundles: tuple[Path, ...],
    names: tuple[TargetName, ...],
    by: str,
    fail_under: Decimal | None,
    declared_only: bool,
    count_undeclarable: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Show which GEMMs of MANIFEST, recorded or written by hand, BUNDLES serve.

    MANIFEST is a file, or the name of a manifest that comes with nvgemm-aot. BUNDLES are bundle
    files, directories of them, or kernel wheels; without any, those that are installed or named in
    NVGEMM_AOT_BUNDLES count.
    """
    from ...workload.coverage import Weight, cover
    from ...workload.find_bundles import installed_bundles, read_bundles
    from .coverage_gate import require_coverage

    if declared_only and fail_under is None:
        raise click.UsageError("--declared-only needs --fail-under")
    recorded, undeclarable = _read_manifest(manifest, names)
    views, unusable = (read_bundles(bundles), []) if bundles else installed_bundles()
    weight = Weight(by)
    targets = cover(
        recorded, views, unusable=unusable, undeclarable=undeclarable if count_undeclarable else ()
    )
    if html is not None:
        from ...storage.files import write_atomic
        from .coverage_page import coverage_page

        write_atomic(html, coverage_page(recorded, targets, weight))
    print_result(coverage_document(recorded, targets, weight), coverage_text, as_json=as_json)
    if undeclarable and not count_undeclarable:
        uncounted = sum(gemm.count for gemm in undeclarable)
        click.echo(
            f"nvgemm-aot: not counted: {count_text(uncounted, 'GEMM')} that no manifest can "
            f"declare, such as {undeclarable[0].gemm}; --count-undeclarable counts them as missed",
            err=True,
        )
    if fail_under is not None:
        require_coverage(targets, fail_under, by=weight, declared_only=declared_only)


def _read_manifest(
    manifest: Path, names: tuple[TargetName, ...]
) -> tuple[Manifest, tuple[GemmCoverage, ...]]:
    """Reads a manifest and, for a recording, the GEMMs that it cannot declare."""
    from ...manifest.parse import parse_manifest
    from ...manifest.shipped_manifests import find_manifest
    from ...manifest.source import read_text
    from ...workload.coverage import read_undeclarable

    path = find_manifest(manifest)
    text = read_text(path)  # only once, as it may be a pipe
    recorded = parse_manifest(path, text)
    if names:
        recorded = replace(recorded, targets=_named_targets(names, recorded.targets))
    return recorded, read_undeclarable(text)


def _named_targets(
    names: Sequence[TargetName], declared: Sequence[BuildTarget]
) -> tuple[BuildTarget, ...]:
    """Returns the named targets; platform and CUDA default to those of each declared target."""
    from ...targets import build_targets

    targets = {
        name.resolve(platform=default.target.platform, cuda=default.target.cuda)
        for name in names
        for default in declared
    }
    return tuple(
        resolved
        for target in sorted(targets)
        for resolved in build_targets(target.arch, platform=target.platform, cuda=target.cuda)
    )


def coverage_document(
    manifest: Manifest, targets: Sequence[TargetCoverage], by: Weight
) -> Document:
    """Describes coverage; GEMMs are sorted by the weight ``by``, heaviest first."""
    return {
        "manifest": manifest.name,
        "by": by.value,
        "targets": [_target_document(target, by) for target in targets],
    }


def _target_document(target: TargetCoverage, by: Weight) -> Document:
    from ...workload.coverage import SERVED, Status, Weight

    groups = {"covered": SERVED, **{status.value: frozenset({status}) for status in Status}}
    return {
        "target": target.target.target.key,
        "device": target.target.device.name,
        "runtime_library": target.runtime_library,
        "bundles": target.bundles,
        "refusals": target.refusals,
        "totals": {weight.value: target.weight(weight) for weight in Weight},
        "percent": {
            weight.value: {
                name: float(target.percent(weight, statuses)) for name, statuses in groups.items()
            }
            for weight in Weight
        },
        "gemms": [_gemm_document(gemm) for gemm in target.heaviest(by, frozenset(Status))],
    }


def _gemm_document(gemm: GemmCoverage) -> Document:
    from ...workload.coverage import Weight

    return {
        "gemm": gemm.gemm,
        "status": gemm.status.value,
        "count": gemm.count,
        "flops": gemm.weight(Weight.FLOPS),
        "ranked_as": gemm.ranked_as and gemm.ranked_as.key,
        "split": gemm.is_split,
        "kernels": gemm.kernels,
        "bundle": gemm.bundle,
        "reasons": gemm.reasons,
    }


def coverage_text(document: Document) -> str:
    """Renders coverage: for each target its GEMMs, the reasons for misses, and the percentages."""
    return "\n\n".join("\n".join(_target_lines(target)) for target in document["targets"])


def _target_lines(target: Document) -> Iterator[str]:
    reasons = _number_reasons(target["gemms"])
    header = ("GEMM", "found as", "count", "% of count", "% of FLOPs", "ranked as")
    shares = [
        [
            percent_text(100 * gemm[weight] / target["totals"][weight]).rjust(len(title))
            for gemm in target["gemms"]
        ]
        for weight, title in (("count", header[3]), ("flops", header[4]))
    ]
    rows = [
        (gemm["gemm"], gemm["status"], gemm["count"], count, flops, _ranked_as(gemm, reasons))
        for gemm, count, flops in zip(target["gemms"], *shares)
    ]
    yield f"{target['target']} on {target['device']}"
    yield table(rows, header)
    yield from _miss_lines(target, reasons)
    yield ""
    columns = {"covered": "covered", "declared": "declared", "signature": "by signature"}
    percentages = [
        (
            f"by {title}",
            *(
                percent_text(target["percent"][weight][name]).rjust(len(column))
                for name, column in columns.items()
            ),
        )
        for weight, title in WEIGHT_NAMES.items()
    ]
    yield table(percentages, ("", *columns.values()))


def _number_reasons(gemms: Sequence[Document]) -> dict[str, int]:
    """Numbers the first reasons for misses, most of which a model's layers share."""
    different = dict.fromkeys(gemm["reasons"][0] for gemm in gemms if gemm["reasons"])
    return {reason: number for number, reason in enumerate(different, start=1)}


def _ranked_as(gemm: Document, reasons: dict[str, int]) -> str:
    if gemm["ranked_as"] is None:
        return f"see [{reasons[gemm['reasons'][0]]}]"
    return ranked_as_text(gemm["gemm"], gemm["ranked_as"], is_split=gemm["split"])


def _miss_lines(target: Document, reasons: dict[str, int]) -> Iterator[str]:
    if not reasons:
        return
    yield ""
    for reason, number in reasons.items():
        yield f"[{number}] {reason}"
    refusals = target["refusals"]
    if refusals:
        yield "left out:"
    yield from (f"  {refusal}" for refusal in refusals[:_MOST_REFUSALS])
    if len(refusals) > _MOST_REFUSALS:
        yield f"  … and {len(refusals) - _MOST_REFUSALS} more (--json has them all)"
