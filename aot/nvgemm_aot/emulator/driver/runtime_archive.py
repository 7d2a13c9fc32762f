"""Links NVIDIA's launch functions, which payloads import, with the stand-in."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from nvgemm_runtime.bundle.imported_symbols import DEVICE_SYMBOLS
from nvgemm_runtime.errors import ToolchainError, install_command
from nvgemm_runtime.matching.device import find_runtime_library

from ...pipeline.linker import c_compiler

ARCHIVE = "libcuda_dialect_runtime_static.a"
"""NVIDIA's archive, beside libcute_dsl_runtime.so in nvidia-cutlass-dsl-libs-cu12 and -cu13."""


def link_archive(cuda: str, stand_in: Path, directory: Path) -> Path:
    """Links the archive for a CUDA version into a library over the stand-in.

    Args:
        cuda: CUDA major version, e.g. ``cu13``.
        stand_in: The stand-in's library.
        directory: Destination for the library. It is for this machine alone: the archive's licence
            does not allow distributing it.

    Raises:
        ToolchainError: If the archive or a linker is missing, or the archive calls functions that
            the stand-in lacks.
    """
    runtime = find_runtime_library(cuda)
    archive = None if runtime is None else runtime.path.with_name(ARCHIVE)
    if archive is None or not archive.is_file():
        raise ToolchainError(
            f"{ARCHIVE} for {cuda}, by which emulated kernels are launched, is not installed; "
            f"run: {install_command('build')}"
        )
    library = directory / f"emulated-launches-{cuda}.so"
    needed = [f"-Wl,-u,{symbol}" for symbol in sorted(DEVICE_SYMBOLS)]
    flags = ("-shared", "-nostartfiles", "-Wl,-z,defs", "-Wl,-z,now")
    command = [*c_compiler(), *flags, *needed, "-o", str(library), str(archive), str(stand_in)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ToolchainError(
            f"cannot link {archive} with the emulated driver: {result.stderr.strip()[-500:]}; "
            f"the command was: {shlex.join(command)}"
        )
    return library
