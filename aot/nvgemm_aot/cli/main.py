"""The ``nvgemm-aot`` command: parses, prints, and maps errors to exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from nvgemm_runtime import __version__
from nvgemm_runtime.errors import (
    BundleFormatError,
    NvgemmError,
    StorageError,
    ToolchainError,
    UnhealthyError,
    VerificationError,
)

from . import interrupts, render, render_bundle, render_doctor, render_explain
from .cache_commands import cache as cache_commands
from .coverage_command import coverage
from .manifest_commands import manifest as manifest_commands
from .progress import report_progress
from .record_command import record
from .rejection_log import open_rejection_log
from .tune_command import tune

Command = TypeVar("Command", bound=Callable[..., Any])

ANY_PATH = click.Path(path_type=Path)
"""Whether a path is there is for the command to say, with its own error."""


class _Group(click.Group):
    """Runs a command and turns the project's errors into a message and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interrupts.raised():
                return super().invoke(ctx)
        except NvgemmError as error:
            click.echo(f"nvgemm-aot: error: {error}", err=True)
            ctx.exit(error.exit_code)
        except ModuleNotFoundError as error:
            module = (error.name or "").partition(".")[0]
            if module in ("", "nvgemm_aot", "nvgemm_runtime"):
                raise
            click.echo(
                f"nvgemm-aot: error: the Python module {module} is not installed, as after "
                "pip install --no-deps; run: pip install nvgemm-aot",
                err=True,
            )
            ctx.exit(ToolchainError.exit_code)
        except KeyboardInterrupt:
            click.echo("nvgemm-aot: interrupted; what was compiled is kept", err=True)
            ctx.exit(interrupts.INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nvgemm-aot")
@click.option("-v", "--verbose", count=True, help="Log more; twice for debug messages.")
def main(verbose: int) -> None:
    """Compile GEMM kernels ahead of time, check them, and pack them into wheels."""
    # Torch says so at its import; nothing here uses NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    levels = {0: logging.WARNING, 1: logging.INFO}
    logging.basicConfig(
        level=levels.get(verbose, logging.DEBUG), format="%(name)s: %(message)s", stream=sys.stderr
    )


main.add_command(cache_commands)
main.add_command(manifest_commands)


def _cache_option(command: Command) -> Command:
    return click.option(
        "--cache-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Build cache; default $NVGEMM_AOT_CACHE or the user's cache directory.",
    )(command)


def _out_option(text: str) -> Callable[[Command], Command]:
    return click.option(
        "-o",
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("dist"),
        show_default=True,
        help=text,
    )


def _json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


@main.command()
@click.argument("manifest", type=ANY_PATH)
@_out_option("Directory for the bundles (and the wheel).")
@click.option("-j", "--jobs", type=click.IntRange(1), help="Compiler processes.")
@click.option("--strict", is_flag=True, help="Fail if a target lacks any kernel.")
@click.option("--dry-run", is_flag=True, help="Print the plan and compile nothing.")
@click.option(
    "--rejections",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="With --dry-run: write every operator not chosen, and why, as JSON lines.",
)
@click.option("--wheel", is_flag=True, help="Also pack the bundles into a wheel.")
@click.option("--wheel-version", help="Version of the wheel; default is nvgemm-aot's own.")
@_cache_option
@_json_option
def build(
    manifest: Path,
    out: Path,
    jobs: int | None,
    strict: bool,
    dry_run: bool,
    rejections: Path | None,
    wheel: bool,
    wheel_version: str | None,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Compile the kernels that MANIFEST declares, into one bundle a target.

    MANIFEST is a file, or the name of a manifest that comes with nvgemm-aot, such as llama-3.1-8b.

    A kernel whose compiler takes longer than $NVGEMM_AOT_COMPILE_TIMEOUT seconds, by default 300,
    counts as one that does not compile.
    """
    from ..build import pipeline
    from ..build.plan import require_served
    from ..manifest.parse import load_manifest
    from ..manifest.shipped import find_manifest
    from ..storage.cache import Cache, default_directory

    if rejections and not dry_run:
        raise click.UsageError("--rejections goes with --dry-run")
    if wheel_version and not wheel:
        raise click.UsageError("--wheel-version goes with --wheel")
    declared = load_manifest(find_manifest(manifest))
    cache = Cache(cache_dir or default_directory())
    if dry_run:
        with open_rejection_log(rejections) as on_rejection:
            planned = pipeline.plan_build(declared, cache, on_rejection=on_rejection)
        _print(render.plan_document(planned, jobs), render.plan_text, as_json)
        require_served(pipeline.without_operator(planned), 1 if strict else len(planned))
        return
    if wheel:
        from ..bundle.wheel import check_identity, write_wheel

        check_identity(declared.name, wheel_version or __version__)
    with report_progress("Compiling") as report:
        result = pipeline.build(declared, out, cache, jobs=jobs, strict=strict, progress=report)
    document = render.build_document(result)
    if wheel:
        document["wheel"] = render.file_document(
            write_wheel(
                [bundle.path for bundle in result.bundles],
                name=declared.name,
                version=wheel_version or __version__,
                out_dir=out,
                summary=declared.description or None,
            )
        )
    _print(document, render.build_text, as_json)
    require_served(result.unserved, len(declared.targets))


@main.command()
@click.argument("bundles", type=ANY_PATH, nargs=-1, required=True)
@_out_option("Directory for the wheel.")
@click.option("--name", required=True, help="The wheel is called nvgemm-kernels-NAME.")
@click.option("--version", "wheel_version", default=__version__, show_default=True)
@click.option("--summary", help="One line on what the kernels are for.")
def wheel(
    bundles: tuple[Path, ...], out: Path, name: str, wheel_version: str, summary: str | None
) -> None:
    """Pack BUNDLES, one a target, into a wheel."""
    from ..bundle.wheel import write_wheel

    path = write_wheel(bundles, name=name, version=wheel_version, out_dir=out, summary=summary)
    click.echo(render.file_text(render.file_document(path)))


@main.command()
@click.argument("bundle", type=ANY_PATH)
@_json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds: target, kernels, rankings, sizes, toolchain."""
    from nvgemm_runtime.bundle.reader import Bundle

    with Bundle(bundle) as opened:
        _print(render_bundle.bundle_document(opened), render_bundle.bundle_text, as_json)


@main.command()
@click.argument("bundles", type=ANY_PATH, nargs=-1, required=True)
@click.option(
    "--disassemble/--no-disassemble",
    default=None,
    help="Require, or skip, the proofs from disassembled code. Default: where tools are installed.",
)
@click.option("-j", "--jobs", type=click.IntRange(1), help="Disassembler processes.")
@_json_option
def verify(
    bundles: tuple[Path, ...], disassemble: bool | None, jobs: int | None, as_json: bool
) -> None:
    """Check every rule, hash and kernel of BUNDLES, and print the evidence."""
    from ..build.compiler import default_jobs
    from ..verify.bundle import verify_bundle

    documents: list[Any] = []
    texts: list[str] = []
    failed: list[NvgemmError] = []
    for path in bundles:
        try:
            with report_progress("Verifying") as progress:
                report = verify_bundle(
                    path, disassemble=disassemble, jobs=jobs or default_jobs(), progress=progress
                )
        except (BundleFormatError, StorageError) as error:
            documents.append({"path": str(path), "ok": False, "error": str(error)})
            texts.append(f"{path}: FAILED\n{error}")
            failed.append(error)
            continue
        documents.append(report.to_json())
        texts.append(render_bundle.verification_text(report))
        if not report.ok:
            failed.append(VerificationError(f"{path}: {len(report.findings)} findings"))
    _print(documents, lambda _: "\n\n".join(texts), as_json)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise VerificationError(
            f"{len(failed)} of {len(bundles)} bundles fail:\n" + "\n".join(map(str, failed))
        )


@main.command(name="list")
@_json_option
def list_(as_json: bool) -> None:
    """Show the bundles of installed wheels."""
    from nvgemm_runtime.installed.discover import installed_bundles

    _print(render.installed_document(installed_bundles()), render.installed_text, as_json)


@main.command()
@_json_option
def doctor(as_json: bool) -> None:
    """Say whether this machine can run prebuilt kernels, and if not, what is missing.

    The exit status is 0 where it can, and 32 where it cannot.
    """
    from .doctor import diagnose

    with _without_warnings("nvgemm_runtime.installed.registry"):
        diagnosis = diagnose()  # what is wrong with bundles is part of the answer
    _print(diagnosis.to_json(), render_doctor.diagnosis_text, as_json)
    if not diagnosis.healthy:
        count = len(diagnosis.problems)
        raise UnhealthyError(f"{count} problem{'s' * (count > 1)}; see above")


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON alone: what COMMAND prints goes to standard error.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def explain(ctx: click.Context, as_json: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND and show what torch.compile did with each of its GEMMs.

    For example: nvgemm-aot explain -- python model.py. Torch's compile caches are off in it.

    The exit status is the command's, 128 + N where signal N ended it, and 2 where it cannot be
    started.
    """
    from ..workload.explain import explain as run_and_collect

    try:
        explanation = run_and_collect(command, quiet=as_json)
    except OSError as error:
        raise click.UsageError(f"cannot run {command[0]}: {error.strerror}") from None
    _print(explanation.to_json(), render_explain.explain_text, as_json)
    if explanation.unreadable_lines:
        click.echo(
            f"nvgemm-aot: {explanation.unreadable_lines} events are left out: their lines could "
            "not be read, as when a process is killed while it writes one",
            err=True,
        )
    ctx.exit(explanation.status)


main.add_command(record)
main.add_command(coverage)
main.add_command(tune)


@main.command()
def schema() -> None:
    """Print the JSON Schema of manifests, for editors."""
    from ..manifest.parse import json_schema

    click.echo(json.dumps(json_schema(), indent=2))


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Keep a logger from saying what is printed anyway."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _print(document: Any, as_text: Callable[[Any], str], as_json: bool) -> None:
    click.echo(json.dumps(document, indent=2) if as_json else as_text(document))
