"""``nvgemm-aot confirm``: measures installed kernels beside this torch's ATen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime.installed.discover import CONFIRMED_SUFFIX

from ..terminal.interrupts import INTERRUPTED
from ..terminal.printing import count_text, print_result, report_progress, table
from ..terminal.shared_options import ANY_PATH, Duration, json_option

if TYPE_CHECKING:
    from ...tuning.confirming.confirm_kernels import Confirmed

Document = dict[str, Any]

_DURATION = Duration(
    r"[0-9]+(?:\.[0-9]+)?", {"s": 1, "m": 60}, "is not a duration such as 30s or 2m"
)


@click.command()
@click.option(
    "-o",
    "--out",
    type=ANY_PATH,
    help=f"The file to write, NAME{CONFIRMED_SUFFIX}; default: one for this GPU product, torch and "
    "CUDA in this user's configuration.",
)
@click.option(
    "--budget",
    type=_DURATION,
    help="Time for measuring, e.g. 30s, 2m; GEMMs that are left out run on ATen.",
)
@click.option(
    "--hang-after",
    type=_DURATION,
    default="60s",
    show_default=True,
    help="Drop a kernel that has not returned after this time.",
)
@json_option
@click.pass_context
def confirm(
    ctx: click.Context,
    out: Path | None,
    budget: float | None,
    hang_after: float,
    as_json: bool,
) -> None:
    """Confirm on this GPU which installed kernels beat this torch's ATen.

    A bundle's rankings hold ATen's time for one torch. This command times the kernels that plain
    torch.compile would use beside ATen, twice, and writes a file that counts on machines with this
    GPU product, minor torch version and CUDA version. From then on, plain torch.compile uses the
    kernels with the installed torch. Times from earlier runs stay for GEMMs that are not measured
    now.

    The bundles are those of installed wheels and of NVGEMM_AOT_BUNDLES. Run it again after one of
    them, or torch, changes. For other machines, pack the file: nvgemm-aot wheel --confirmed.
    If $NVGEMM_AOT_SIGNING_KEY is set, the file is signed.
    """
    from ...tuning.confirming import confirm_watched
    from ...tuning.confirming.confirmed_output import (
        refuse_uncounted,
        refuse_unread,
        write_confirmations,
    )
    from ..signing.written import output_key, sign_written

    if out is not None and not out.name.endswith(CONFIRMED_SUFFIX):
        raise click.UsageError(f"{out}: the file is named NAME{CONFIRMED_SUFFIX}")
    key = output_key()
    if out is None:
        refuse_unread()
    try:
        with report_progress("Confirming", "measurement") as progress:
            confirmed = confirm_watched.confirm_watched(
                budget_s=budget, hang_s=hang_after, progress=progress
            )
    except KeyboardInterrupt:
        click.echo("nvgemm-aot: interrupted; no file is written or changed", err=True)
        ctx.exit(INTERRUPTED)
    refuse_uncounted(confirmed)
    path = write_confirmations(confirmed.confirmations, out, confirmed.rejected)
    sign_written([path], key)
    print_result(confirmed_document(confirmed, path), confirmed_text, as_json=as_json)


def confirmed_document(confirmed: Confirmed, path: Path) -> Document:
    """Describes the measurements and the written file."""
    confirmations = confirmed.confirmations
    conditions = confirmations.conditions
    return {
        "path": str(path),
        "gpu": confirmations.gpu,
        "torch": conditions.torch,
        "cuda": conditions.cuda,
        "seconds": round(confirmed.elapsed_s, 1),
        "used": list(confirmed.used),
        "problems": {
            key: {
                "kernels": [
                    [id_, timing.time_ns, timing.spread_ns] for id_, timing in times.kernels.items()
                ],
                "aten": [times.aten.time_ns, times.aten.spread_ns],
                "gain": round(confirmed.gains[key], 4),
                "doubts": list(times.doubts),
            }
            for key, times in confirmations.problems.items()
        },
        "left_out": dict(confirmed.left_out),
        "rejected": dict(confirmed.rejected),
    }


def confirmed_text(document: Document) -> str:
    """Renders a table by signature, then problems in doubt, and the written file."""
    return "\n".join([_table(document), *_fault_lines(document), *_summary_lines(document)])


def _table(document: Document) -> str:
    problems, used = document["problems"], set(document["used"])
    by_signature: dict[str, list[str]] = {}
    for key in problems:
        by_signature.setdefault(key.split("/")[0], []).append(key)
    rows = [
        [
            signature,
            len(keys),
            sum(key in used for key in keys),
            sum(bool(problems[key]["doubts"]) for key in keys),
            f"{max(problems[key]['gain'] for key in keys):.1%}",
        ]
        for signature, keys in by_signature.items()
    ]
    return table(rows, ["GEMMs", "measured", "use a kernel", "in doubt", "largest gain"])


def _fault_lines(document: Document) -> Iterator[str]:
    for id_, fault in document["rejected"].items():
        yield f"kernel {id_[:12]} is dropped: {fault}"
    doubts = Counter(
        "; ".join(problem["doubts"])
        for problem in document["problems"].values()
        if problem["doubts"]
    )
    for doubt, count in doubts.items():
        yield f"in doubt, so ATen computes it ({count}): {doubt}"
    for reason, count in Counter(document["left_out"].values()).items():
        yield f"not measured, so ATen computes it ({count}): {reason}"


def _summary_lines(document: Document) -> Iterator[str]:
    problems, used = document["problems"], document["used"]
    yield (
        f"{document['path']}: written in {document['seconds']:.1f} s; plain torch.compile uses "
        f"kernels for {len(used)} of {count_text(len(problems), 'measured problem')} on every "
        f"{document['gpu']} with torch {document['torch']}, CUDA {document['cuda']}, that has it"
    )
    yield (
        f"for other such machines: nvgemm-aot wheel BUNDLE... --name NAME --confirmed "
        f"{document['path']}"
    )
