"""``nvgemm-aot merge`` and ``split``: bundles from bundles."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime import __version__
from nvgemm_runtime.errors import PackagingError
from nvgemm_runtime.installed.discover import BUNDLE_SUFFIX

from ..terminal.printing import (
    count_text,
    file_document,
    file_text,
    print_result,
)
from ..terminal.shared_options import ANY_PATH, ByteCount, json_option, out_directory_option

if TYPE_CHECKING:
    from ...bundle.parts.merge_bundles import Merged
    from ...rankings.join_rankings import Superseded

Document = dict[str, Any]

PROGRAM = f"nvgemm-aot {__version__}"


@click.command()
@click.argument("bundles", type=ANY_PATH, nargs=-1, required=True)
@click.option("-o", "--out", type=ANY_PATH, required=True, help="The bundle to write.")
@json_option
def merge(bundles: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Merge BUNDLES of one target and toolchain into one.

    The order of BUNDLES changes nothing. All parts that `split` made become the original again, to
    the byte. A kernel in several is stored once. A measurement comes before an estimate; of several
    measurements, the most reliable and newest stays, and the others confirm or contradict it. If
    $NVGEMM_AOT_SIGNING_KEY is set, OUT is signed.
    """
    from ...bundle.parts.merge_bundles import merge_bundles
    from ...rankings.join_rankings import joining
    from ...storage.signed_files import write_signable
    from ..signing.written import output_key, sign_written

    key = output_key()
    if out.suffix != BUNDLE_SUFFIX:
        raise click.UsageError(f"{out}: a bundle is named NAME{BUNDLE_SUFFIX}")
    paths = list({path.resolve(): path for path in bundles}.values())
    if out.resolve() in [path.resolve() for path in paths]:
        raise click.UsageError(f"{out} is among the bundles to merge; name another output")
    superseded: list[Superseded] = []
    merged = merge_bundles(
        paths,
        functools.partial(joining, keeps_untimed=False, on_superseded=superseded.append),
        generator=PROGRAM,
    )
    _require_service(paths, merged)
    write_signable({out: merged.data})
    sign_written([out], key)
    document = _merge_document(out, paths, merged, superseded)
    print_result(document, _merge_text, as_json=as_json)


def _require_service(paths: list[Path], merged: Merged) -> None:
    """Refuses a merged bundle that serves fewer operands than the bundles did."""
    from ...rankings.pruning import lost_service

    lost = lost_service(merged.contents, merged.content)
    if lost:
        names = " ".join(map(str, paths))
        raise PackagingError(
            f"{names}: a merged bundle would lack {count_text(len(lost), 'kernel')}, the first "
            f"{lost[0].operator} ({lost[0].id[:12]}), without which {lost[0].signature.key} takes "
            "fewer operands; only a ranking without measurements has it, for a problem that "
            f"another bundle measured: measure them together, nvgemm-aot tune {names}"
        )


def _merge_document(
    out: Path, paths: list[Path], merged: Merged, superseded: list[Superseded]
) -> Document:
    content = merged.content
    return {
        **file_document(out),
        "merged": [str(path) for path in paths],
        "target": content.target.key,
        "build_key": merged.header.build_key,
        "equals": merged.equals,
        "kernels": len(content.kernels),
        "problems": merged.header.declared_count,
        "products": list(merged.header.products),
        "left_out": merged.left_out,
        "superseded": sorted(
            (
                {
                    "problem": one.problem.key,
                    "gpu": one.gpu,
                    "kept": one.kept,
                    "dropped": one.dropped,
                    "relation": one.relation.value,
                    "reason": one.reason,
                }
                for one in superseded
            ),
            key=lambda entry: tuple(entry.values()),
        ),
    }


_LISTED = 8
"""Most superseded measurements that are printed."""


def _merge_text(document: Document) -> str:
    lines = [
        f"{file_text(document)}, {count_text(document['kernels'], 'kernel')} for "
        f"{count_text(document['problems'], 'problem')}"
        + (f", equal to {document['equals']}" if document["equals"] else "")
    ]
    if document["left_out"]:
        lines.append(
            f"left out: {count_text(len(document['left_out']), 'kernel')} that the measurements "
            "kept have no time for; to measure them together, run: nvgemm-aot tune "
            f"{' '.join(document['merged'])}"
        )
    superseded = document["superseded"]
    if superseded:
        counts = Counter(entry["relation"] for entry in superseded)
        texts = {
            "confirms": "confirm",
            "contradicts": "contradict",
            "neither": "neither confirm nor contradict",
        }
        counted = ", ".join(
            f"{counts[name]} {text}" for name, text in texts.items() if counts[name]
        )
        lines.append(
            f"times of {count_text(len(superseded), 'measurement')} not kept ({counted} the one "
            "kept); nvgemm-aot rankings export keeps them all"
        )
        lines += (
            f"  {entry['problem']} on {entry['gpu']}: kept {entry['kept']}, not "
            f"{entry['dropped']}" + (f": {entry['reason']}" if entry["reason"] else "")
            for entry in superseded[:_LISTED]
        )
        if len(superseded) > _LISTED:
            lines.append(f"  and {len(superseded) - _LISTED} more, which --json lists")
    return "\n".join(lines)


@click.command()
@click.argument("bundle", type=ANY_PATH)
@click.option("--parts", type=click.IntRange(1), help="Number of parts.")
@click.option("--max-size", type=ByteCount(), help="Largest part, such as 90M or 95MiB.")
@out_directory_option("Directory for the parts.")
@json_option
def split(bundle: Path, parts: int | None, max_size: int | None, out: Path, as_json: bool) -> None:
    """Split BUNDLE into parts that each serve alone, named NAME-1of3-TARGET.nvgemm.

    All m of one signature, n and k stay together, and whole signatures where they fit. A kernel
    that problems in two parts need is in both. `merge` of all parts gives BUNDLE again. If
    $NVGEMM_AOT_SIGNING_KEY is set, the parts are signed.
    """
    from nvgemm_runtime.installed.policy_checks import open_checked

    from ...bundle.parts.copied_frames import open_whole
    from ...bundle.parts.split_bundle import part_name, split_below, split_into, split_name
    from ...storage.signed_files import write_signable
    from ..signing.written import output_key, sign_written

    key = output_key()
    if (parts is None) == (max_size is None):
        raise click.UsageError("name either --parts or --max-size")
    with open_checked(bundle) as opened:
        whole = open_whole(opened)
    made = split_into(whole, parts) if parts else split_below(whole, max_size or 0)
    target = whole.header.target.key
    names = [part_name(bundle, target, number, len(made)) for number in range(1, len(made) + 1)]
    _refuse_other_parts(out, split_name(bundle, target), target, names)
    write_signable({out / name: part.data for name, part in zip(names, made)})
    sign_written([out / name for name in names], key)
    print_result(
        {
            "bundle": str(bundle),
            "target": target,
            "parts": [
                {
                    **file_document(out / name),
                    "kernels": len(part.header.kernels),
                    "problems": part.header.declared_count,
                    "build_key": part.header.build_key,
                }
                for name, part in zip(names, made)
            ],
            "copies": sum(len(part.header.kernels) for part in made) - len(whole.header.kernels),
        },
        _split_text,
        as_json=as_json,
    )


def _refuse_other_parts(directory: Path, name: str, target: str, names: list[str]) -> None:
    """Refuses a directory with parts of another division of the same bundle."""
    form = re.compile(rf"{re.escape(name)}-\d+of\d+-{re.escape(target)}{re.escape(BUNDLE_SUFFIX)}")
    existing = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    for other in existing:
        if form.fullmatch(other) and other not in names:
            raise PackagingError(
                f"{directory / other} is a part of another division, and would be used beside "
                "these: remove it, or choose another directory with --out"
            )


def _split_text(document: Document) -> str:
    lines = [
        f"{file_text(part)}, {count_text(part['kernels'], 'kernel')} for "
        f"{count_text(part['problems'], 'problem')}"
        for part in document["parts"]
    ]
    if document["copies"]:
        lines.append(f"kernels in more than one part: {document['copies']} copies")
    return "\n".join(lines)
