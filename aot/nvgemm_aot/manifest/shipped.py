"""Manifests that come with this package, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from nvgemm_runtime.errors import ManifestError


def find_manifest(given: Path) -> Path:
    """Resolve what a user named: a file, or a manifest that comes with this package.

    What is a path, and no name alone, is returned whether or not there is such a file.

    Raises:
        ManifestError: If there is neither a file nor a manifest of a name.
    """
    if given.exists() or given.parent != Path():
        return given
    shipped = Path(str(files("nvgemm_aot") / "manifests"))
    found = shipped / f"{given.name.removesuffix('.yaml')}.yaml"
    if found.is_file():
        return found
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
    raise ManifestError(
        f"{given}: there is no such file; check the path, or name a manifest that comes with "
        f"nvgemm-aot: {names}"
    )
