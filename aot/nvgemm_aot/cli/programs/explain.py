"""``nvgemm-aot explain``: shows what torch.compile did with a program's GEMMs."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable
from typing import Any

import click

from nvgemm_runtime.errors import one_line

from ..terminal.printing import count_text, failed_text, print_result, table

Document = dict[str, Any]


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print only JSON; COMMAND's output goes to standard error.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def explain(ctx: click.Context, as_json: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND and show what torch.compile did with each of its GEMMs.

    For example: nvgemm-aot explain -- python model.py. Torch's compile caches are off while it
    runs.

    The exit status is the command's, 128 + N if signal N ended it, and 2 if it cannot be started.
    Signals are passed on to it.
    """
    from ...workload.decisions import explain_program
    from ...workload.run_command import CannotStartError

    try:
        document = explain_program(command, quiet=as_json)
    except CannotStartError as error:
        raise click.UsageError(f"cannot run {command[0]}: {error.strerror}") from None
    print_result(document, explain_text, as_json=as_json)
    if document["unreadable_lines"]:
        click.echo(
            f"nvgemm-aot: ignored {count_text(document['unreadable_lines'], 'event')} with "
            "unreadable lines, as when a process is killed while it writes",
            err=True,
        )
    ctx.exit(document["status"])


_WIDTH = 100
_MOST_REASONS = 3
_MOST_CHARACTERS = 60
"""Most characters of a GEMM's name in the table."""

_NO_GEMM = """\
torch.compile reported no GEMM. Possible reasons:
  - nothing was compiled with max-autotune (torch.compile(model, mode="max-autotune")), and no
    bundle is installed, or NVGEMM_AOT_DEFAULT_MODE is 0;
  - the compiled code has no GEMM, or Inductor replaced it by other operations;
  - the plug-in is off (NVGEMM_AOT=off), not installed in the command's Python, or does not
    support its torch.
To check whether kernels can be used there, run `nvgemm-aot doctor` where the command runs."""


_NO_EVENT_READ = "no result: no event of the run could be read"


def explain_text(document: Document) -> str:
    """Renders a table of the GEMMs, the kernels in use, and the reasons for GEMMs without one."""
    gemms = document["gemms"]
    failed = _failed_lines(document["failed"])
    if not gemms:
        text = _NO_EVENT_READ if document["unreadable_lines"] else _no_gemm_text(document)
        return "\n".join([text, *failed])
    header = ("GEMM", "graphs", "found as", "offered", "bundled, us", "others, us", "in the code")
    rows = [
        (
            _short_name(gemm),
            gemm["graphs"],
            gemm["basis"],
            len(gemm["offered"]),
            _least_time(gemm, bundled=True).rjust(len(header[4])),
            _least_time(gemm, bundled=False).rjust(len(header[5])),
            _computed_by(gemm),
        )
        for gemm in gemms
    ]
    below = [
        *_kernel_lines(gemms),
        *failed,
        *_measured_lines(gemms),
        *_miss_lines(gemms),
    ]
    return "\n".join([table(rows, header), "", _summary(gemms), *below, *_tune_lines(gemms)])


def _no_gemm_text(document: Document) -> str:
    interpreter = document["interpreter"]
    if document["status"]:
        return failed_text(document["status"], interpreter)
    return _NO_GEMM if interpreter is None else f"{_NO_GEMM}\n{interpreter}"


def _short_name(gemm: Document) -> str:
    name: str = gemm["gemm"]
    return name if len(name) <= _MOST_CHARACTERS else f"{name[: _MOST_CHARACTERS - 1]}…"


def _least_time(gemm: Document, *, bundled: bool) -> str:
    times = [
        time
        for name, time in gemm["times_ms"].items()
        if time is not None and (name in gemm["offered"]) == bundled
    ]
    return f"{min(times) * 1e3:.1f}" if times else "-"


def _computed_by(gemm: Document) -> str:
    """Names what computes a GEMM; only generated calls of bundled kernels are certain."""
    if not gemm["graphs"]:
        return "tried, slower than separate operations"
    if gemm["used"]:
        calls = sum(gemm["used"].values())
        text = ", ".join(gemm["used"])
        return text if calls >= gemm["graphs"] else f"{text} ({calls} of {gemm['graphs']})"
    if gemm["fastest"] in gemm["offered"]:
        return "another choice"
    if gemm["fastest"] is not None:
        return str(gemm["fastest"])
    if _is_left_to_aten(gemm):
        return "ATen, as measured"
    return "not timed" if gemm["offered"] else "the only choice"


def _is_left_to_aten(gemm: Document) -> bool:
    """Returns True if no kernel was offered because ATen was measured to be the fastest."""
    return bool(gemm["measured"]) and _is_unoffered(gemm) and gemm["fastest"] is None


def _is_unoffered(gemm: Document) -> bool:
    """Returns True if bundles serve a GEMM but none of their kernels was offered for it."""
    return gemm["basis"] != "miss" and not gemm["offered"] and not gemm["used"]


def _summary(document: list[Document]) -> str:
    gemms = [gemm for gemm in document if gemm["graphs"]]  # without epilogue fusions that lost
    used = sum(bool(gemm["used"]) for gemm in gemms)
    missed = sum(gemm["basis"] == "miss" for gemm in gemms)
    atens = sum(map(_is_left_to_aten, gemms))
    unoffered = sum(map(_is_unoffered, gemms)) - atens
    others = len(gemms) - used - missed - atens - unoffered
    return (
        f"{count_text(len(gemms), 'GEMM')}: {used} on bundled kernels, "
        f"{others} on others though bundled kernels were offered, "
        f"{f'{atens} on ATen, as measured, ' if atens else ''}"
        f"{f'{unoffered} on others, because none was offered, ' if unoffered else ''}"
        f"{missed} without a bundled kernel"
    )


def _kernel_lines(gemms: list[Document]) -> Iterable[str]:
    operators = {name: gemm["offered"].get(name, "") for gemm in gemms for name in gemm["used"]}
    lines = [f"  {name}  {operator}".rstrip() for name, operator in operators.items()]
    return ["\nbundled kernels in the code:", *lines] if lines else []


def _failed_lines(failed: dict[str, str]) -> Iterable[str]:
    lines = [f"  {kernel_id[:12]}  {one_line(reason)}" for kernel_id, reason in failed.items()]
    return ["\nkernels that failed, so that ATen computes their GEMMs:", *lines] if lines else []


def _measured_lines(gemms: list[Document]) -> Iterable[str]:
    lines = [f"  {gemm['gemm']}\n    {gemm['measured']}" for gemm in gemms if gemm["measured"]]
    return ["\nrankings:", *lines] if lines else []


_TO_TUNE = {
    "doubtful": "to measure uncertain problems on this GPU:",
    "unconfirmed": "to repeat measurements, or confirm them on another GPU of this product:",
}
"""Purpose of tuning bundles, by field of a GEMM."""


def _tune_lines(gemms: list[Document]) -> Iterable[str]:
    number = 0
    for field, purpose in _TO_TUNE.items():
        runs = sorted({tuple(files) for gemm in gemms for files in gemm[field]})
        if runs:
            yield f"\n{purpose}"
        for files in runs:
            number += 1
            output = f"tuned{f'-{number}' * (number > 1)}.nvgemm"
            yield f"  nvgemm-aot tune {shlex.join(files)} -o {output}"


def _miss_lines(gemms: list[Document]) -> Iterable[str]:
    """Yields missed GEMMs grouped by reasons, most of which a model's layers share."""
    missed: dict[tuple[str, ...], list[str]] = {}
    for gemm in gemms:
        if gemm["reasons"] or gemm["basis"] == "miss":
            missed.setdefault(tuple(gemm["reasons"]), []).append(gemm["gemm"])
    for reasons, names in missed.items():
        yield f"\nno bundled kernel for {count_text(len(names), 'GEMM')}:"
        yield from _wrapped(names)
        yield "because" if reasons else "no reason was given"
        yield from (f"  {reason}" for reason in reasons[:_MOST_REASONS])
        if len(reasons) > _MOST_REASONS:
            more = count_text(len(reasons) - _MOST_REASONS, "more reason")
            yield f"  … and {more} (--json has them all)"


def _wrapped(names: list[str]) -> list[str]:
    """Wraps names without breaking any of them, because people search for them."""
    unbreakable = "; ".join(name.replace(" ", "\0") for name in names)
    lines = textwrap.wrap(unbreakable, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [f"  {line}".replace("\0", " ") for line in lines]
