"""Rankings that come with this package, by the name of the manifest that comes with it too."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def find_rankings(manifest: str) -> Path | None:
    """The rankings file of a shipped manifest, or None where there is none."""
    path = Path(str(files("nvgemm_aot") / "rankings" / "data" / f"{manifest}.json"))
    return path if path.is_file() else None


def named_rankings(given: Path) -> Path:
    """Resolve what a user named: a file, or rankings that come with this package.

    What is neither is returned as it is, for reading it to fail.
    """
    if given.exists() or given.parent != Path():
        return given
    return find_rankings(given.name.removesuffix(".json")) or given
