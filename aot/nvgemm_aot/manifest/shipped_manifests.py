"""Finds manifests that ship with this package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from nvgemm_runtime.errors import ManifestError


def find_manifest(name: Path) -> Path:
    """Resolves a user's argument: a file, or a shipped manifest's name.

    Returns an argument with a directory part unchanged, even if no such file exists.

    Raises:
        ManifestError: If neither a file nor a shipped manifest has that name.
    """
    if name.exists() or name.parent != Path():
        return name
    shipped = Path(str(files("nvgemm_aot") / "manifests"))
    path = shipped / f"{name.name.removesuffix('.yaml')}.yaml"
    if path.is_file():
        return path
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
    raise ManifestError(
        f"{name}: no such file; check the path, or name a manifest that ships with nvgemm-aot: "
        f"{names}"
    )
