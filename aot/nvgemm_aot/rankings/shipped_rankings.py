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
    entries = []
    for line, by_m in _files_by_problem(DIRECTORY).items():
        least, most = spans.get(line, (1, 0))
        for m, holders in by_m.items():
            if least <= m <= most:
                problem = replace(line, m=m)
                entries += [entry for file in holders for entry in file.entries(problem)]
    return _marked_shipped(entries)


def all_shipped_rankings() -> Rankings:
    """Returns all shipped measurements."""
    return _marked_shipped(
        entry
        for file in _shipped_files(DIRECTORY)
        for problem in file.problems
        for entry in file.entries(problem)
    )


def _marked_shipped(entries: Iterable[Entry]) -> Rankings:
    return merge([Rankings(entries=tuple(replace(entry, is_shipped=True) for entry in entries))])


@functools.cache
def _shipped_files(directory: Path) -> tuple[RankingsFile, ...]:
    paths = sorted(directory.glob("*.json"))
    return tuple(RankingsFile(str(path), path.read_bytes()) for path in paths)


@functools.cache
def _files_by_problem(directory: Path) -> dict[Problem, dict[int, list[RankingsFile]]]:
    """Returns the files that measured a problem, by the problem at m 1 and by m."""
    by_problem: dict[Problem, dict[int, list[RankingsFile]]] = {}
    for file in _shipped_files(directory):
        for problem in file.problems:
            by_m = by_problem.setdefault(replace(problem, m=1), {})
            by_m.setdefault(problem.m, []).append(file)
    return by_problem


def is_shipped_name(argument: Path) -> bool:
    """Returns True if a name means shipped rankings: all, or a shipped manifest's.

    An existing file takes precedence. A path with a directory always means a file.

    Raises:
        RankingsError: If neither a file nor shipped rankings have the name.
    """
    if argument.is_file() or argument.parent != Path():
        return False
    if argument.name == SHIPPED or (DIRECTORY / f"{argument.name}.json").is_file():
        return True
    names = ", ".join(sorted(path.stem for path in DIRECTORY.glob("*.json")))
    raise RankingsError(
        f"{argument}: there is no such file; check the path, or name rankings that come with "
        f"nvgemm-aot: {SHIPPED} for all, or a manifest's: {names}"
    )


def read_named(argument: Path, *, is_only_shown: bool = False) -> Rankings:
    """Reads a file, or shipped rankings by name; see `is_shipped_name`.

    Shipped rankings come with the code that reads them, so they need no signature.

    Args:
        argument: File, or name.
        is_only_shown: See `read_rankings`.

    Raises:
        StorageError, RankingsError, SignatureError: See `read_rankings` and `is_shipped_name`.
    """
    if not is_shipped_name(argument):
        return read_rankings(argument, is_only_shown=is_only_shown)
    if argument.name == SHIPPED:
        return all_shipped_rankings()
    return read_rankings(DIRECTORY / f"{argument.name}.json", is_only_shown=True)
