"""Finds and runs NVIDIA's disassembler."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.errors import ToolchainError, install_command

INSTALL_COMMAND = install_command("build")
"""Command that installs the disassembler."""

TIMEOUT_SECONDS = 120
"""Time limit for a kernel; nvdisasm takes about 0.3 s."""


class DisassemblyError(Exception):
    """Disassembler error for an image; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class Disassembler:
    """Installed ``nvdisasm``.

    ``version`` is printed by the program, e.g. ``V13.5.37``.
    """

    path: Path
    version: str

    def __str__(self) -> str:
        return f"nvdisasm {self.version} ({self.path})"

    def disassemble(self, cubin: bytes) -> str:
        """Disassembles a cubin's code in a separate process.

        Raises:
            DisassemblyError: If it fails or takes too long.
        """
        with tempfile.TemporaryDirectory(prefix="nvgemm-") as folder:
            image = Path(folder) / "kernel.cubin"
            image.write_bytes(cubin)
            try:
                result = _run([str(self.path), "-c", str(image)])
            except (OSError, subprocess.TimeoutExpired) as error:
                raise DisassemblyError(f"{self} fails: {error}") from error
        if result.returncode:
            text = (result.stderr or result.stdout).strip().replace(str(image), "the cubin")
            raise DisassemblyError(
                f"{self} exits with {result.returncode}: {text[:200] or 'no message'}"
            )
        return result.stdout


def find_disassembler() -> Disassembler | None:
    """Finds ``nvdisasm``: in its Python package, then on PATH, then under CUDA_HOME."""
    for path in _possible_paths():
        try:
            result = _run([str(path), "--version"])
        except (OSError, subprocess.TimeoutExpired):
            continue
        version = re.search(r"\bV[0-9]+(?:\.[0-9]+)+", result.stdout)
        if result.returncode == 0 and version:
            return Disassembler(path=path, version=version[0])
    return None


def require_disassembler() -> Disassembler:
    """Finds ``nvdisasm`` as `find_disassembler` does.

    Raises:
        ToolchainError: If no disassembler is found; the message has the command that installs it.
    """
    disassembler = find_disassembler()
    if disassembler is None:
        searched = ", ".join(map(str, _possible_paths())) or "none found"
        raise ToolchainError(
            f"no working nvdisasm (searched package nvidia.cu13, PATH, CUDA_HOME: {searched}); "
            f"run: {INSTALL_COMMAND}"
        )
    return disassembler


def _possible_paths() -> Iterator[Path]:
    try:
        package = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        package = None
    paths = [
        Path(root) / "bin" / "nvdisasm"
        for root in (package and package.submodule_search_locations) or ()
    ]
    if on_path := shutil.which("nvdisasm"):
        paths.append(Path(on_path))
    if home := os.environ.get("CUDA_HOME"):
        paths.append(Path(home) / "bin" / "nvdisasm")
    yield from (path for path in paths if path.is_file())


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
