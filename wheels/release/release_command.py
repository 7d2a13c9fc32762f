"""Builds and checks all wheels of a release, on an x86-64 machine without a GPU or Arm compiler.

    python wheels/release --output DIR

These are the runtime's wheels for x86-64 and aarch64, and kernel wheels of the manifests of models
for both, with kernels for CUDA 12 and 13. Run it by the Python of an environment in which
``pip install -c constraints.txt '.[build,cross,release]'`` was run in the same checkout.
docs/develop/releasing.md says what is checked.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING

from steps import run_module, stop

if TYPE_CHECKING:
    from kernel_wheels import KernelWheels

NEEDED_BY_RUNTIME = ("ziglang", "wheel", "elftools", "cyclonedx", "jsonschema", "torch")
NEEDED_BY_KERNELS = ("nvgemm_aot", "yaml", "ziglang", "cutlass.operators")
PROCESSORS = ("aarch64", "x86_64")


def main(words: list[str] | None = None) -> None:
    """The command."""
    options = parse(words)
    require(
        "twine",
        *(() if options.kernels_only else NEEDED_BY_RUNTIME),
        *(() if options.runtime_only else NEEDED_BY_KERNELS),
    )
    ready_made = [] if options.runtime_only else find_manifests(options)  # before time is spent
    wheels = [] if options.kernels_only else runtime_wheels(options)
    wheels += kernel_wheels(ready_made, options)
    run_module("twine", "check", "--strict", *wheels)
    (options.output / "SHA256SUMS").write_text(checksums(wheels))
    sys.stdout.write(f"{options.output}: {len(wheels)} wheels and SHA256SUMS\n")


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line, with every default filled in."""
    parser = argparse.ArgumentParser(
        prog="wheels/release", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--output", type=Path, required=True, help="directory of the wheels")
    parser.add_argument(
        "--platform", action="append", choices=PROCESSORS, help="only this; may be repeated"
    )
    parser.add_argument(
        "--cuda", action="append", choices=("cu12", "cu13"), help="only this; may be repeated"
    )
    parser.add_argument(
        "--kernels",
        action="append",
        metavar="MANIFEST",
        help="kernel wheels of this manifest, a name or a file, in place of all models'; "
        "may be repeated",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--runtime-only", action="store_true", help="no kernel wheels")
    only.add_argument("--kernels-only", action="store_true", help="no wheels of the runtime")
    parser.add_argument(
        "--once", action="store_true", help="build once: do not check that wheels are reproducible"
    )
    options = parser.parse_args(words)
    if options.runtime_only and (options.kernels or options.cuda):
        parser.error("--kernels and --cuda go without --runtime-only")
    options.platform = sorted(set(options.platform or PROCESSORS))
    options.cuda = sorted(set(options.cuda or ("cu12", "cu13")))
    if options.output.exists() and any(options.output.iterdir()):
        parser.error(f"{options.output} is not empty: name another directory")
    return options


def require(*modules: str) -> None:
    """Stop if a module is missing, with what installs it."""
    for module in modules:
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package that it is in
            is_there = False
        if not is_there:
            stop(
                f"{module} is not installed; run in the checkout: {sys.executable} -m pip install "
                "-c constraints.txt '.[build,cross,release]'"
            )


def runtime_wheels(options: argparse.Namespace) -> list[Path]:
    """Build and check a wheel for each processor."""
    import runtime_wheel

    wheels = []
    for processor in options.platform:
        wheel = runtime_wheel.build(processor, options.output)
        runtime_wheel.check(wheel, processor)
        wheels.append(wheel)
        if not options.once:
            with tempfile.TemporaryDirectory() as scratch:
                again = runtime_wheel.build(processor, Path(scratch), cache=Path(scratch, "cache"))
                compare([wheel], [again])
    return wheels


def find_manifests(options: argparse.Namespace) -> list[KernelWheels]:
    """Find the manifests whose kernel wheels are built."""
    import kernel_wheels
    import runtime_wheel

    installed, here = installed_version("nvgemm-aot"), runtime_wheel.project_version()
    if installed != here:
        stop(f"nvgemm-aot {installed} is installed, and this checkout is {here}: install it first")
    named = options.kernels or kernel_wheels.READY_MADE
    return [kernel_wheels.find(name, options.platform, options.cuda) for name in named]


def kernel_wheels(every: Sequence[KernelWheels], options: argparse.Namespace) -> list[Path]:
    """Build and check the wheels of each manifest, one a processor."""
    wheels = []
    for one in every:
        built = one.build(options.output)
        wheels += built
        if not options.once:
            with tempfile.TemporaryDirectory() as scratch:
                compare(built, one.build(Path(scratch), cache=Path(scratch, "cache")))
    return wheels


def compare(wheels: Sequence[Path], again: Sequence[Path]) -> None:
    """Stop if wheels of a second build have other bytes than those of the first."""
    for first, second in zip(wheels, again, strict=True):
        if (first.name, first.read_bytes()) != (second.name, second.read_bytes()):
            stop(f"{first.name}: a second build gave other bytes")


def checksums(wheels: Iterable[Path]) -> str:
    """Lines for ``sha256sum --check``, by name."""
    return "".join(
        f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n"
        for wheel in sorted(wheels, key=lambda path: path.name)
    )
