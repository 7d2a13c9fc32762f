"""``nvgemm-aot rankings``: measured rankings as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvgemm_runtime.errors import RankingsError

from ..terminal.printing import count_text, file_document, file_text, print_result, table
from ..terminal.shared_options import ANY_PATH, json_option

if TYPE_CHECKING:
    from ...rankings.assess import Assessment
    from ...rankings.entries import Entry, Rankings

Document = dict[str, Any]

_out_option = click.option("-o", "--out", type=ANY_PATH, required=True, help="The file to write.")


@click.group()
def rankings() -> None:
    """Take measured rankings from bundles, merge them, compare them, show them.

    If $NVGEMM_AOT_SIGNING_KEY is set, `export` and `merge` sign the file.
    """


@rankings.command()
@click.argument("bundles", type=ANY_PATH, nargs=-1, required=True)
@_out_option
@json_option
def export(bundles: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Write the measured rankings of BUNDLES, which `tune` wrote, to a file."""
    from nvgemm_runtime.installed.policy_checks import open_checked

    from ...rankings.export import export as export_headers
    from ...rankings.file import write_rankings
    from ..signing.written import output_key, sign_written

    key = output_key()
    headers = []
    for path in bundles:
        with open_checked(path) as bundle:
            headers.append(bundle.header)
    exported = export_headers(headers)
    if not exported.entries:
        paths = ", ".join(map(str, bundles))
        raise RankingsError(
            f"{paths}: no ranking is measured, all are estimates; measure them on a GPU: "
            "nvgemm-aot tune"
        )
    write_rankings(out, exported)
    sign_written([out], key)
    document = {**file_document(out), **summary_document(exported)}
    print_result(document, _written_text, as_json=as_json)


@rankings.command()
@click.argument("files", type=ANY_PATH, nargs=-1, required=True)
@_out_option
@json_option
def merge(files: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Merge rankings FILES into one, and show which measurements confirm or contradict each other.

    The rankings that come with nvgemm-aot are named shipped, or by the manifest whose problems they
    measure.
    """
    from ...rankings.entries import merge as merge_rankings
    from ...rankings.file import write_rankings
    from ...rankings.shipped_rankings import read_named
    from ..signing.written import output_key, sign_written

    key = output_key()
    parts = [read_named(path) for path in files]
    merged = merge_rankings(parts)
    write_rankings(out, merged)
    sign_written([out], key)
    document = {
        **file_document(out),
        **summary_document(merged),
        "duplicates": sum(len(part.entries) for part in parts) - len(merged.entries),
    }
    print_result(document, _written_text, as_json=as_json)


@rankings.command()
@click.argument("files", type=ANY_PATH, nargs=-1)
@click.option(
    "--standing",
    type=click.Choice(["confirmed", "repeated", "measured once", "doubtful"]),
    help="Only problems with this standing.",
)
@json_option
def show(files: tuple[Path, ...], standing: str | None, as_json: bool) -> None:
    """Show what FILES hold together: one line per problem.

    Without FILES, all rankings that come with nvgemm-aot are shown, which are named shipped; parts
    of them are named by the manifest whose problems they measure.
    """
    from ...rankings.entries import merge as merge_rankings
    from ...rankings.shipped_rankings import SHIPPED, read_named

    paths = files or (Path(SHIPPED),)
    parts = [read_named(path, is_only_shown=True) for path in paths]
    document = summary_document(merge_rankings(parts))
    if standing is not None:
        document["problems"] = [
            problem for problem in document["problems"] if problem["standing"] == standing
        ]
    print_result({"paths": list(map(str, paths)), **document}, _shown_text, as_json=as_json)


@rankings.command()
@click.argument("before", type=ANY_PATH)
@click.argument("now", type=ANY_PATH)
@json_option
def diff(before: Path, now: Path, as_json: bool) -> None:
    """Show what differs between the rankings files BEFORE and NOW.

    The rankings that come with nvgemm-aot are named shipped, or by the manifest whose problems they
    measure. The status is 0 whether anything differs or not.
    """
    from ...rankings.shipped_rankings import read_named

    old, new = (read_named(path, is_only_shown=True) for path in (before, now))
    document = _diff_document(old, new)
    print_result({"before": str(before), "now": str(now), **document}, _diff_text, as_json=as_json)


def summary_document(rankings: Rankings) -> Document:
    """Describes rankings: each problem's standing, and the GPUs that measured it."""
    from ...rankings.assess import assess

    assessed = [(entries, assess(entries)) for entries in rankings.groups.values()]
    gpus = Counter(entry.origin.conditions.gpu_sha256 for entry in rankings.entries)
    again = Counter(name for _, assessment in assessed for name in assessment.measured_again)
    return {
        "measurements": len(rankings.entries),
        "gpus": [
            {"gpu_sha256": gpu, "measurements": count}
            for gpu, count in sorted(gpus.items(), key=lambda item: item[0] or "")
        ],
        "standings": dict(
            sorted(Counter(assessment.standing for _, assessment in assessed).items())
        ),
        "measured_again": dict(sorted(again.items())),
        "problems": [_problem_document(entries, assessment) for entries, assessment in assessed],
    }


def _problem_document(entries: Sequence[Entry], assessment: Assessment) -> Document:
    entry = assessment.entry
    operator, timing = entry.kernels[0]
    conditions = entry.origin.conditions
    return {
        "problem": entry.problem.key,
        "arch": entry.origin.arch,
        "gpu": entry.origin.gpu,
        "standing": assessment.standing,
        "doubts": list(assessment.doubts),
        "confirmed_by": list(assessment.confirmed_by),
        "repeated": assessment.repeated,
        "winner": entry.measurement.winner,
        "kernel": {"provider": operator.provider, "operator": operator.operator},
        "time_ns": timing.time_ns,
        "spread_ns": timing.spread_ns,
        "aten_ns": entry.aten and entry.aten.time_ns,
        "kernels": len(entry.kernels),
        "launches": conditions.launches,
        "cache": entry.origin.cache,
        "driver": conditions.driver,
        "torch": conditions.torch,
        "cuda": conditions.cuda,
        "toolchain": dict(entry.origin.toolchain),
        "dates": sorted({measurement.origin.conditions.date for measurement in entries}),
        "measurements": len(entries),
    }


def _summary_lines(document: Document) -> Iterable[str]:
    counts = ", ".join(f"{count} {standing}" for standing, count in document["standings"].items())
    known = sum(gpu["gpu_sha256"] is not None for gpu in document["gpus"])
    yield (
        f"{count_text(document['measurements'], 'measurement')} on "
        f"{count_text(known, 'known GPU')}; problems: {counts or 'none'}"
    )
    if document.get("duplicates"):
        yield f"duplicates dropped: {document['duplicates']}"
    for gpu, count in document["measured_again"].items():
        yield (
            f"GPU {gpu} (digest of its UUID) measured {count_text(count, 'problem')} more than "
            "once: that confirms nothing"
        )
    for problem in document["problems"]:
        if problem["doubts"]:
            yield f"doubtful: {problem['problem']}: {'; '.join(problem['doubts'])}"


def _written_text(document: Document) -> str:
    return "\n".join([file_text(document), *_summary_lines(document)])


_COLUMNS = ("problem", "GPU", "standing", "first", "bundled, us", "ATen, us", "over ATen", "kernel")


def _shown_text(document: Document) -> str:
    rows = [
        [
            problem["problem"],
            problem["gpu"],
            problem["standing"],
            "ATen" if problem["winner"] == "aten" else "bundled",
            f"{problem['time_ns'] / 1e3:.2f}",
            "-" if problem["aten_ns"] is None else f"{problem['aten_ns'] / 1e3:.2f}",
            "-" if problem["aten_ns"] is None else f"{problem['time_ns'] / problem['aten_ns']:.3f}",
            problem["kernel"]["operator"],
        ]
        for problem in document["problems"]
    ]
    parts = [table(rows, _COLUMNS)] if rows else []
    return "\n".join([*parts, *_summary_lines(document)])


def _diff_document(before: Rankings, now: Rankings) -> Document:
    from ...rankings.assess import assess

    old, new = (
        {key: (entries, assess(entries)) for key, entries in part.groups.items()}
        for part in (before, now)
    )
    changed = []
    for key in sorted(old.keys() & new.keys()):
        old_problem, new_problem = _problem_document(*old[key]), _problem_document(*new[key])
        changes = _changes(old_problem, new_problem)
        if changes:
            changed.append(
                {"problem": old_problem["problem"], "gpu": old_problem["gpu"], "changes": changes}
            )
    return {
        "only_before": [problem.key for problem, _ in sorted(old.keys() - new.keys())],
        "only_now": [problem.key for problem, _ in sorted(new.keys() - old.keys())],
        "changed": changed,
        "common": len(old.keys() & new.keys()),
    }


def _changes(old: Document, new: Document) -> list[str]:
    changes = [
        f"{name} was {old[name]}, is {new[name]}"
        for name in ("winner", "standing")
        if old[name] != new[name]
    ]
    if (old["time_ns"], old["aten_ns"]) != (new["time_ns"], new["aten_ns"]):
        changes.append(
            f"fastest kernel {old['time_ns']} -> {new['time_ns']} ns, ATen {old['aten_ns']} -> "
            f"{new['aten_ns']} ns"
        )
    if old["measurements"] != new["measurements"]:
        changes.append(f"measurements {old['measurements']} -> {new['measurements']}")
    return changes


def _diff_text(document: Document) -> str:
    lines = [f"only in {document['before']}: {key}" for key in document["only_before"]]
    lines += [f"only in {document['now']}: {key}" for key in document["only_now"]]
    lines += [
        f"{problem['problem']} on {problem['gpu']}: {'; '.join(problem['changes'])}"
        for problem in document["changed"]
    ]
    count = count_text(document["common"], "problem")
    lines.append(f"{count} in both, {len(document['changed'])} differ")
    return "\n".join(lines)
