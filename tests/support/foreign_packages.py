"""Installed packages that bring a provider: real ones, and a few files that look like one."""

from __future__ import annotations

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
