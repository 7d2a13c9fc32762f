"""Installed packages that bring a provider: real ones, and a few files that look like one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from repository import TESTS

PACKAGE = TESTS / "provider_package"


def install_provider_package(directory: Path) -> Path:
    """Build and install tests/provider_package, without a registry; returns where it lies."""
    source = directory / "source"
    shutil.copytree(PACKAGE, source)  # a build writes beside the sources
    site = directory / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(site), str(source)], check=True)
    return site


def write_package(
    site: Path,
    module: str,
    text: str,
    *,
    distribution: str = "foreign",
    version: str = "1.0",
    names: tuple[str, ...] = ("foreign",),
    attribute: str = "Foreign",
) -> None:
    """Write a module, and a distribution whose entry points name its class."""
    site.mkdir(exist_ok=True)
    (site / f"{module}.py").write_text(text, encoding="utf-8")
    info = site / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8"
    )
    points = "".join(f"{name} = {module}:{attribute}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[nvgemm_aot.providers]\n{points}", encoding="utf-8")


MANIFEST = """
version: 1
name: tiny
targets: [sm_90a]
providers: [tiny_gemm]
candidates: 1
gemms:
  - {dtype: bf16, mnk: [[100, 75, 33]]}
"""


class BuiltPackage:
    """What the command made of `MANIFEST`, with the package on its path."""

    def __init__(self, directory: Path) -> None:
        self.site = install_provider_package(directory)
        self.out = directory / "out"
        self.manifest = directory / "tiny.yaml"
        self.manifest.write_text(MANIFEST, encoding="utf-8")
        self.document = json.loads(
            self.run("build", str(self.manifest), "-o", str(self.out), "--wheel", "--json", "-j1")
        )

    def run(self, *arguments: str, status: int = 0) -> str:
        code = "from nvgemm_aot.__main__ import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": str(self.site)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr * bool(status)

    @property
    def bundle(self) -> Path:
        return Path(self.document["bundles"][0]["path"])
