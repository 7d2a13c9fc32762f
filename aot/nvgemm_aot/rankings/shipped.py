"""Measured rankings that come with this package, looked up by problem."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from nvgemm_runtime.errors import RankingsError
from nvgemm_runtime.gemm.problem import Problem

from .entries import Entry, Rankings, merge
from .file import RankingsFile, read_rankings

SHIPPED = "shipped"
"""Name for all shipped rankings where commands take rankings files."""

DIRECTORY = Path(str(files("nvgemm_aot") / "rankings" / "data"))
"""Directory with one file per measured manifest, named after the manifest."""


def shipped_rankings(problems: Iterable[Problem]) -> Rankings:
    """Returns shipped measurements for problems, and for any m between two given ones.

    The problems in between are equal in all else; dispatch tables use them. Only the returned
    entries are read in full: a test checks every file as a whole.
    """
    lines: dict[Problem, list[int]] = {}
    for problem in problems:
        lines.setdefault(replace(problem, m=1), []).append(problem.m)
    spans = {line: (min(m), max(m)) for line, m in lines.items()}
    found = []
    for line, by_m in _places(DIRECTORY).items():
        least, most = spans.get(line, (1, 0))
        for m, places in by_m.items():
            if least <= m <= most:
                problem = replace(line, m=m)
                found += [entry for file in places for entry in file.entries(problem)]
    return _shipped(found)


def all_shipped_rankings() -> Rankings:
    """Returns all shipped measurements."""
    return _shipped(
        entry
        for file in _opened(DIRECTORY)
        for problem in file.problems
        for entry in file.entries(problem)
    )


def _shipped(entries: Iterable[Entry]) -> Rankings:
    return merge([Rankings(entries=tuple(replace(one, is_shipped=True) for one in entries))])


@functools.cache
def _opened(directory: Path) -> tuple[RankingsFile, ...]:
    paths = sorted(directory.glob("*.json"))
    return tuple(RankingsFile(str(path), path.read_bytes()) for path in paths)


@functools.cache
def _places(directory: Path) -> dict[Problem, dict[int, list[RankingsFile]]]:
    """Returns the files that measured a problem, by the problem at m 1 and by m."""
    found: dict[Problem, dict[int, list[RankingsFile]]] = {}
    for file in _opened(directory):
        for problem in file.problems:
            of_line = found.setdefault(replace(problem, m=1), {})
            of_line.setdefault(problem.m, []).append(file)
    return found


def is_shipped_name(given: Path) -> bool:
    """Returns True if a name means shipped rankings: all, or a shipped manifest's.

    An existing file takes precedence. A path with a directory always means a file.

    Raises:
        RankingsError: If neither a file nor shipped rankings have the name.
    """
    if given.is_file() or given.parent != Path():
        return False
    if given.name == SHIPPED or (DIRECTORY / f"{given.name}.json").is_file():
        return True
    names = ", ".join(sorted(path.stem for path in DIRECTORY.glob("*.json")))
    raise RankingsError(
        f"{given}: there is no such file; check the path, or name what comes with nvgemm-aot: "
        f"{SHIPPED} for all measurements, or a manifest's: {names}"
    )


def read_named(given: Path) -> Rankings:
    """Reads a file, or shipped rankings by name; see `is_shipped_name`.

    Raises:
        StorageError, RankingsError: See `read_rankings` and `is_shipped_name`.
    """
    if not is_shipped_name(given):
        return read_rankings(given)
    if given.name == SHIPPED:
        return all_shipped_rankings()
    return read_rankings(DIRECTORY / f"{given.name}.json")
