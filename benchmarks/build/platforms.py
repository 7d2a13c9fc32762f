"""Measures builds for Arm and CUDA 12 against a build for x86-64 alone.

    python -m benchmarks.build.platforms [--candidates 6] [--rounds 1]

Builds a manifest with one problem for `sm_90a`: for x86-64, for Arm, for both, and for both with
both CUDA versions. Each build has its own process, an empty cache and one compiler process. Seconds
are the build's whole processor time, so other work counts little; the least over rounds is shown.
Fails if a CUDA version's device code differs between builds or platforms.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import click

from benchmarks.record import Baseline, Case
from benchmarks.shared.resuming import recording, records_option
from nvgemm_aot.cli.terminal.printing import table
from nvgemm_aot.verify.device.cubin import read_cubins
from nvgemm_runtime.bundle.reader import Bundle

X86, ARM = "platform: linux_x86_64", "platform: linux_aarch64"
BUILDS = {
    "x86-64, cu13": (X86,),
    "Arm, cu13": (ARM,),
    "both, cu13": (X86, ARM),
    "both, cu13 and cu12": (X86, ARM, f"{X86}, cuda: cu12", f"{ARM}, cuda: cu12"),
}
"""Target entries besides the architecture, by build name. The first is the reference."""

PACKAGES = ("nvgemm-aot", "nvidia-cutlass-dsl", "nvidia-cutlass-operators", "ziglang")


def manifest_text(targets: Sequence[str], candidates: int) -> str:
    """Returns a manifest with one problem for these targets."""
    listed = ", ".join(f"{{arch: sm_90a, {target}}}" for target in targets)
    return (
        f"version: 1\nname: platforms\ntargets: [{listed}]\ncandidates: {candidates}\n"
        "providers: [cutlass_operators]\ngemms:\n  - {dtype: bf16, mnk: [[2048, 4096, 4096]]}\n"
    )


def build(targets: Sequence[str], candidates: int, directory: Path) -> tuple[float, list[Path]]:
    """Runs a build; returns its processor seconds and bundles."""
    (directory / "platforms.yaml").write_text(manifest_text(targets, candidates))
    command = [sys.executable, "-m", "nvgemm_aot", "build", "platforms.yaml", "--jobs", "1"]
    command += ["--out", "out", "--cache-dir", "cache", "--estimates-only"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, sorted((directory / "out").glob("*.nvgemm"))


def device_code(path: Path) -> tuple[str, list[bytes]]:
    """Returns a bundle's CUDA version and its payloads' cubins, in order."""
    with Bundle(path) as bundle:
        payloads = [bundle.payload(kernel) for kernel in bundle.header.kernels]
        cubins = [cubin.content for payload in payloads for cubin in read_cubins(payload)]
        return bundle.header.target.cuda, sorted(cubins)


@click.command()
@click.option("--candidates", default=6, show_default=True, help="Kernels of a target.")
@click.option("--rounds", default=1, show_default=True, help="Builds of each kind.")
@records_option
def main(candidates: int, rounds: int, records_path: Path | None) -> None:
    """Build for each set of targets and print what it costs."""
    least: dict[str, float] = {}
    codes: dict[str, list[bytes]] = {}
    rows = []
    for name, targets in BUILDS.items():
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as temporary:
                seconds, bundles = build(targets, candidates, Path(temporary))
                found = [device_code(path) for path in bundles]
            least[name] = min(seconds, least.get(name, seconds))
        for cuda, cubins in found:
            same = codes.setdefault(cuda, cubins) == cubins
            if not same:
                raise SystemExit(f"{name}: device code for {cuda} differs between platforms")
        kernels = sum(len(cubins) for _, cubins in found)
        ratio = least[name] / least[next(iter(BUILDS))]
        rows.append((name, kernels, f"{least[name]:.0f}", f"{ratio:.2f}", "equal to the byte"))
        click.echo(f"{name}: {least[name]:.0f} s", err=True)
    with recording(records_path, "build.platforms", {"nvgemm-aot": version("nvgemm-aot")}) as cases:
        first = Baseline(name=rows[0][0], value=least[rows[0][0]])
        for name, kernels, *_ in rows:
            title = f"{name}, {kernels} kernels"
            unit = "s of processor time"
            cases.append(Case(name=title, figure=least[name], unit=unit, baseline=first))
    named = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    load = os.getloadavg()[0]
    click.echo(f"{named}; {len(os.sched_getaffinity(0))} cores, load {load:.1f} at the end\n")
    header = (
        "build for sm_90a",
        "kernels",
        "CPU s",
        "to the first",
        "device code of a CUDA version",
    )
    click.echo(table(rows, header))


if __name__ == "__main__":
    main()
