"""Measured rankings that come with this package: one pool, in which problems are looked up."""

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
"""Names all of them, where commands take rankings files."""

DIRECTORY = Path(str(files("nvgemm_aot") / "rankings" / "data"))
"""A file for each manifest whose problems were measured, of that manifest's name."""


def shipped_rankings(problems: Iterable[Problem]) -> Rankings:
    """Returns shipped measurements of problems, and those at an m between two of them.

    The latter are of problems that are equal in all else; dispatch tables use them. Only what is
    returned is read in full: every file is tested to be valid as a whole.
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
    """By problem of m 1, and by m: the files that have measurements of that problem."""
    found: dict[Problem, dict[int, list[RankingsFile]]] = {}
    for file in _opened(directory):
        for problem in file.problems:
            of_line = found.setdefault(replace(problem, m=1), {})
            of_line.setdefault(problem.m, []).append(file)
    return found


def is_shipped_name(given: Path) -> bool:
    """Tells whether a user's word names shipped rankings: all, or those of a shipped manifest.

    A file of that name comes first, and what is a path, and no name alone, is a file's.

    Raises:
        RankingsError: If there is neither a file nor rankings of a name.
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
    """Reads a file, or shipped rankings by their name; see `is_shipped_name`.

    Raises:
        StorageError, RankingsError: As of `read_rankings`, and of `is_shipped_name`.
    """
    if not is_shipped_name(given):
        return read_rankings(given)
    if given.name == SHIPPED:
        return all_shipped_rankings()
    return read_rankings(DIRECTORY / f"{given.name}.json")
