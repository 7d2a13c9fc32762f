"""``nvgemm-aot inspect``, ``verify``, ``list`` and ``wheel``: commands for finished bundles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import (
    BundleFormatError,
    NvgemmError,
    SignatureError,
    StorageError,
    VerificationError,
)
from nvgemm_runtime.installed.signatures import bundle_subject

from ..build.packing import prepare_wheels, wheel_lines, write_wheels
from ..bundle_texts import (
    Document,
    bundle_document,
    bundle_text,
    installed_document,
    installed_text,
    verification_text,
)
from ..signing.signed_by import signatures_document, signatures_text
from ..terminal.printing import (
    count_text,
    print_result,
    report_progress,
)
from ..terminal.shared_options import ANY_PATH, json_option, out_directory_option

if TYPE_CHECKING:
    from ...verify.bundle import Report
    from ...workload.find_bundles import NamedBundle


@click.command()
@click.argument("bundles", type=ANY_PATH, nargs=-1, required=True)
@out_directory_option("Directory for the wheel.")
@click.option("--name", required=True, help="The wheel is called nvgemm-kernels-NAME.")
@click.option("--version", "wheel_version", default=__version__, show_default=True)
@click.option("--summary", help="One line about the purpose of the kernels.")
@click.option(
    "--confirmed",
    type=ANY_PATH,
    multiple=True,
    help="Also pack this file, which nvgemm-aot confirm wrote; may be repeated.",
)
def wheel(
    bundles: tuple[Path, ...],
    out: Path,
    name: str,
    wheel_version: str,
    summary: str | None,
    confirmed: tuple[Path, ...],
) -> None:
    """Pack BUNDLES, one per target, into a wheel, and nvgemm-aot itself into another.

    Kernels too large for a package index, above 95 MiB, become several wheels: the first has the
    name and requires the others. Signatures beside BUNDLES are packed. Parts of a signed bundle are
    signed with $NVGEMM_AOT_SIGNING_KEY.
    """
    from ..signing.written import output_key

    key = output_key()
    runtime = prepare_wheels(out, name=name, version=wheel_version)
    with Bundle(bundles[0]) as first:
        platform = first.header.target.platform
    document = write_wheels(
        {platform: bundles},
        runtime,
        name=name,
        version=wheel_version,
        summary=summary,
        out=out,
        confirmed=confirmed,
        key=key,
    )
    click.echo("\n".join(wheel_lines(document)))


@click.command()
@click.argument("bundle", type=ANY_PATH)
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds: target, kernels, rankings, sizes, toolchain, and who signed it.

    BUNDLE may also be a wheel, or a directory of either: each is shown; --json prints a list.
    """
    from ...workload.find_bundles import find_bundles

    documents = []
    for entry in find_bundles(bundle):
        with entry.named_in_errors(), Bundle(entry.file) as opened:
            documents.append(
                {
                    **bundle_document(opened),
                    **signatures_document(
                        entry.file, bundle_subject(opened.prefix), name=entry.name
                    ),
                    "path": entry.name,
                }
            )
    if bundle.is_dir() or bundle.suffix == ".whl":
        print_result(
            documents, lambda listed: "\n\n".join(map(bundle_text, listed)), as_json=as_json
        )
    else:
        print_result(documents[0], bundle_text, as_json=as_json)


@click.command()
@click.argument("bundles", type=ANY_PATH, nargs=-1, required=True)
@click.option(
    "--disassemble/--no-disassemble",
    default=None,
    help="Require or skip proofs from disassembled code. Default: if tools are installed.",
)
@click.option("-j", "--jobs", type=click.IntRange(1), help="Disassembler processes.")
@json_option
def verify(
    bundles: tuple[Path, ...],
    disassemble: bool | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Check every rule, hash and kernel of BUNDLES, and print the evidence.

    BUNDLES are bundles, wheels, and directories of either. The wheel of nvgemm-aot itself, which
    dist/*.whl includes, is skipped.

    The exit status is 0 if all bundles are good. If one is bad, the status tells its fault: 16 if
    it cannot be read, 20 if it breaks its format, 21 for a finding, 28 for a signature of other
    content, or if $NVGEMM_AOT_POLICY refuses it. If several are bad, it is 21.
    """
    from ...pipeline.compiler_limits import default_jobs
    from ...workload.find_bundles import find_bundles, without_runtime

    documents: list[Document] = []
    texts: list[str] = []
    failed: list[NvgemmError] = []

    def add_failure(name: str, error: NvgemmError) -> None:
        documents.append({"path": name, "ok": False, "error": str(error)})
        texts.append(f"{name}: FAILED")
        failed.append(error)

    for path in without_runtime(bundles):
        try:
            for bundle in find_bundles(path, headers_only=False):
                try:
                    report = _verify(bundle, disassemble, jobs or default_jobs())
                except (BundleFormatError, StorageError) as error:
                    add_failure(bundle.name, error)
                    continue
                signed = _signatures(bundle)
                documents.append({**report.to_json(), **signed})
                texts.append(f"{verification_text(report)}\n{signatures_text(signed)}")
                if not report.ok:
                    count = count_text(len(report.findings), "finding")
                    failed.append(VerificationError(f"{bundle.name}: {count}"))
                elif signed["refusal"] is not None:
                    failed.append(SignatureError(signed["refusal"]))
        except StorageError as error:
            add_failure(str(path), error)
    print_result(documents, lambda _: "\n\n".join(texts), as_json=as_json)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise VerificationError(
            f"{len(failed)} of {count_text(len(documents), 'bundle')} failed:\n"
            + "\n".join(map(str, failed))
        )


def _verify(bundle: NamedBundle, disassemble: bool | None, jobs: int) -> Report:
    from ...verify.bundle import verify_bundle

    with bundle.named_in_errors(), report_progress("Verifying") as progress:
        report = verify_bundle(bundle.file, disassemble=disassemble, jobs=jobs, progress=progress)
    return replace(report, path=Path(bundle.name))


def _signatures(bundle: NamedBundle) -> Document:
    with Bundle(bundle.file) as opened:
        return signatures_document(bundle.file, bundle_subject(opened.prefix), name=bundle.name)


@click.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """Show the bundles of installed wheels."""
    from nvgemm_runtime.installed.discover import find_wheel_bundles

    print_result(installed_document(find_wheel_bundles()), installed_text, as_json=as_json)
