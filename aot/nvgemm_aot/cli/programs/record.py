"""``nvgemm-aot record``: runs a program and writes its GEMMs into a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvgemm_runtime.gemm.target import DEFAULT_ARCHITECTURE, TargetName

from ..terminal.printing import count_text, failed_text
from ..terminal.shared_options import ANY_PATH, ARCHITECTURE_NAMES, TargetNameParam

if TYPE_CHECKING:
    from ...workload.record_program import Recorded


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-o",
    "--out",
    type=ANY_PATH,
    default=Path("recorded.yaml"),
    show_default=True,
    help="Manifest to write. An earlier recording is merged with the new one.",
)
@click.option(
    "--target",
    type=TargetNameParam(),
    help=f"Target to build for: one of {ARCHITECTURE_NAMES}, for platform and CUDA version of "
    "COMMAND's process, unless named, as in sm_90a-linux_aarch64-cu12. Default: the GPU that runs "
    f"the GEMMs, or {DEFAULT_ARCHITECTURE} without a GPU.",
)
@click.option(
    "--fake",
    is_flag=True,
    help="Run COMMAND, a Python program, under fake tensors, with no GPU, and record its calls.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def record(
    ctx: click.Context, out: Path, target: TargetName | None, fake: bool, command: tuple[str, ...]
) -> None:
    """Run COMMAND and write each GEMM that torch.compile sees to a manifest.

    For example: nvgemm-aot record -o mine.yaml -- python serve.py. Torch's compile caches are off
    while it runs.

    The exit status is the command's, 128 + N if signal N ended it, and 2 if it cannot be started.
    Signals are passed on to it. If it succeeds and leaves OUT damaged: 17.
    """
    from ...workload.record_program import record_program
    from ...workload.run_command import CannotStartError

    try:
        recorded = record_program(command, out, target=target, fake=fake)
    except CannotStartError as error:
        raise click.UsageError(f"cannot run {command[0]}: {error.strerror}") from None
    click.echo(f"nvgemm-aot: {_summary(recorded, fake)}", err=True)
    ctx.exit(recorded.status)


def _summary(recorded: Recorded, fake: bool) -> str:
    problems, undeclarable = recorded.problems, recorded.undeclarable
    if recorded.file_error is not None:
        return f"error: {recorded.file_error}"
    if not problems and not undeclarable:
        interpreter = None if recorded.interpreter is None else str(recorded.interpreter)
        if recorded.status:
            return f"{recorded.path}: {failed_text(recorded.status, interpreter)}"
        reason = (
            "the program called none on a tensor of its main thread"
            if fake
            else "torch.compile's Inductor compiled none, or nvgemm-aot does not support this "
            "torch version"
        )
        where = "" if interpreter is None else f" ({interpreter})"
        return f"{recorded.path}: no GEMM was recorded: {reason}{where}"
    text = (
        f"{recorded.path}: {count_text(problems.total(), 'GEMM')} recorded, {len(problems)} "
        f"distinct, {recorded.new} new in the file"
    )
    if undeclarable:
        text += (
            f"; without a kernel to build: {undeclarable.total()} ({len(undeclarable)} distinct), "
            "listed in the file's last lines"
        )
    return text
