"""Rankings that come with this package, by the name of the manifest that comes with it too."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from nvgemm_runtime.errors import RankingsError

_DATA = Path(str(files("nvgemm_aot") / "rankings" / "data"))


def find_rankings(manifest: str) -> Path | None:
    """The rankings file of a shipped manifest, or None where there is none."""
    path = _DATA / f"{manifest}.json"
    return path if path.is_file() else None


def named_rankings(given: Path) -> Path:
    """Resolve what a user named: a file, or rankings that come with this package.

    What is a path, and no name alone, is returned whether or not there is such a file.

    Raises:
        RankingsError: If there is neither a file nor rankings of a name.
    """
    if given.is_file() or given.parent != Path():
        return given
    found = find_rankings(given.name)
    if found is None:
        names = ", ".join(sorted(path.stem for path in _DATA.glob("*.json")))
        raise RankingsError(
            f"{given}: there is no such file; check the path, or name a manifest that comes with "
            f"measured rankings: {names}"
        )
    return found
