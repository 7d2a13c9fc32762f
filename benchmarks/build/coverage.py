"""Measures every shipped manifest's kernels, bytes and build time.

    python -m benchmarks.build.coverage [MANIFEST ...] [--directory DIR] [--plan] [--json out.json]

Builds each manifest for sm_100f, and int8 (tests/gpu/int8_sm100.yaml) for sm_100a, the only
Blackwell target with int8 operators. Each build starts with an empty cache and has one compiler
process. Minutes are the build's whole processor time, so other work on the machine does not count.
With ``--directory`` an interrupted run (Ctrl-C) continues, and a later run prints what is built.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import click

from benchmarks.cases import write_cases
from benchmarks.shared.resuming import this_run
from nvgemm_aot.cli.terminal.printing import report_progress, size_text, table
from nvgemm_aot.manifest.parse import Manifest, load_manifest
from nvgemm_aot.pipeline.pipeline import build, plan_build
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.storage.files import write_atomic
from nvgemm_aot.targets import build_target

ROOT = Path(__file__).parents[2]
MANIFESTS = (*sorted((ROOT / "manifests").glob("*.yaml")), ROOT / "tests/gpu/int8_sm100.yaml")
TARGET = "sm_100f"

PACKAGES = ("nvgemm-aot", "nvidia-cutlass-dsl", "nvidia-cutlass-operators", "torch")


@dataclass(frozen=True, kw_only=True)
class BuiltManifest:
    """One manifest's build result.

    Attributes:
        choices: Kernels over all problems, repeated ones included.
        kernels: Compiled kernels' ids, each once.
        failed: Kernels that did not compile, with the reason.
        file_bytes: The bundle's size.
        cpu_seconds: The build's processor time, over all its runs.
    """

    name: str
    target: str
    problems: int
    choices: int
    kernels: tuple[str, ...]
    failed: tuple[str, ...]
    file_bytes: int
    cpu_seconds: float


def load(path: Path) -> Manifest:
    """Loads a manifest for the one target that it is built for here."""
    manifest = load_manifest(path)
    archs = [target.target.arch for target in manifest.targets]
    wanted = TARGET if TARGET in archs else archs[0]
    return replace(manifest, targets=(build_target(wanted),))


def cpu_seconds() -> float:
    """Returns this process' processor time, with children that it has waited for."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(manifest: Manifest, directory: Path) -> BuiltManifest:
    """Builds a manifest, or returns an earlier run's measurement."""
    arch = manifest.targets[0].target.arch
    done, spent = directory / "built.json", directory / "spent.json"
    if done.exists():
        document = json.loads(done.read_text())
        lists = {key: tuple(document[key]) for key in ("kernels", "failed")}
        return BuiltManifest(**{**document, **lists})
    before = json.loads(spent.read_text()) if spent.exists() else 0.0
    begin = cpu_seconds()
    try:
        with report_progress(f"{manifest.name}: compiling") as progress:
            result = build(
                manifest, directory, Cache(directory / "cache"), jobs=1, progress=progress
            )
    finally:
        total = before + cpu_seconds() - begin
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(spent, json.dumps(total).encode())
    bundle = result.bundles[0]
    built = BuiltManifest(
        name=manifest.name,
        target=arch,
        problems=len(bundle.header.rankings),
        choices=sum(len(ranking.kernels) for ranking in bundle.header.rankings),
        kernels=tuple(kernel.id for kernel in bundle.header.kernels),
        failed=tuple(f"{f.task.candidate.operator}: {f.reason}" for f in bundle.failures),
        file_bytes=bundle.file_bytes,
        cpu_seconds=total,
    )
    write_atomic(done, json.dumps(asdict(built)).encode())
    return built


def plan(manifests: Sequence[Manifest], directory: Path) -> Iterator[tuple[object, ...]]:
    """Yields rows with the kernels that each manifest's build would compile."""
    for manifest in manifests:
        (planned,) = plan_build(manifest, Cache(directory / manifest.name / "cache"))
        yield (
            manifest.name,
            planned.target.target.arch,
            len(planned.plan.problems),
            sum(len(problem.choices) for problem in planned.plan.problems),
            len(planned.tasks),
        )


def row(built: BuiltManifest) -> tuple[object, ...]:
    return (
        built.name,
        built.target,
        built.problems,
        built.choices,
        len(built.kernels),
        size_text(built.file_bytes),
        round(built.cpu_seconds / 60, 1),
    )


def total(all_built: Sequence[BuiltManifest]) -> tuple[object, ...]:
    """Returns the sum over manifests; a shared kernel counts once."""
    return (
        "all",
        "",
        sum(built.problems for built in all_built),
        sum(built.choices for built in all_built),
        len({kernel for built in all_built for kernel in built.kernels}),
        size_text(sum(built.file_bytes for built in all_built)),
        round(sum(built.cpu_seconds for built in all_built) / 60, 1),
    )


@click.command()
@click.argument("manifests", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--directory", type=click.Path(path_type=Path), help="Keep caches and bundles here.")
@click.option("--plan", "plan_only", is_flag=True, help="Say what would be compiled, and stop.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
def main(
    manifests: tuple[Path, ...], directory: Path | None, plan_only: bool, json_path: Path | None
) -> None:
    """Build manifests and print what came out."""
    loaded = [load(path) for path in manifests or MANIFESTS]
    header = ("manifest", "target", "problems", "kernels", "unique")
    with tempfile.TemporaryDirectory() as temporary:
        place = directory or Path(temporary)
        if plan_only:
            click.echo(table(list(plan(loaded, place)), header))
            return
        all_built = [measure(manifest, place / manifest.name) for manifest in loaded]
    rows = [*map(row, all_built), *([total(all_built)] if len(all_built) > 1 else [])]
    click.echo(table(rows, (*header, "bundle", "CPU min")))
    for built in all_built:
        for failure in built.failed:
            click.echo(f"{built.name}: not compiled: {failure}")
    if json_path is not None:
        figures = {
            "versions": {package: version(package) for package in PACKAGES},
            "python": sys.version.split()[0],
            "cores": len(os.sched_getaffinity(0)),
            "manifests": [{**asdict(built), "kernels": len(built.kernels)} for built in all_built],
            "unique_kernels": len({kernel for built in all_built for kernel in built.kernels}),
        }
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
        write_cases(json_path, "build.coverage", figures, figures["versions"], **this_run())


if __name__ == "__main__":
    main()
