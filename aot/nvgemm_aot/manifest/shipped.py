"""Manifests that come with this package, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def find_manifest(given: Path) -> Path:
    """Resolve what a user named: a file, or a manifest that comes with this package.

    Where there is neither, that is what was named.
    """
    if given.exists() or given.parent != Path():
        return given
    shipped = files("nvgemm_aot") / "manifests" / f"{given.name.removesuffix('.yaml')}.yaml"
    return Path(str(shipped)) if shipped.is_file() else given
