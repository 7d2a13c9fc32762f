"""Cache directory for kernels compiled at run time, where later processes find them.

The builder's `nvgemm_aot.jit.user_bundle` writes there. The runtime reads bundles, and marks the
problems in use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import StorageError
from ..settings import CACHE_VARIABLE
from .discover import BUNDLE_SUFFIX, BundleFile, user_directory
from .ownership import writable_by_others

if TYPE_CHECKING:
    from ..gemm.problem import Problem  # not imported: every process that compiles imports this

JIT_ORIGIN = "the JIT cache"
"""Prefix of origins for kernels compiled at run time."""


def default_directory() -> Path:
    """Returns ``$NVGEMM_AOT_CACHE``, else ``nvgemm-aot`` in the user's cache directory (XDG).

    Raises:
        StorageError: If the user has no home directory and no variable names another directory.
    """
    try:
        return user_directory(CACHE_VARIABLE, "XDG_CACHE_HOME", ".cache")
    except RuntimeError as error:
        raise StorageError(
            f"no directory for the build cache: {error}; set {CACHE_VARIABLE} or use --cache-dir"
        ) from error


def jit_directory(cache: Path) -> Path:
    """Returns the directory of user bundles in a cache directory."""
    return cache / "jit"


def stamp_path(cache: Path, problem: Problem) -> Path:
    """Returns the empty file whose modification time is a problem's last use."""
    return jit_directory(cache) / "used" / problem.key.replace("/", ",")


def find_user_bundles() -> tuple[BundleFile, ...]:
    """Finds the user bundles in this user's cache directory, by name; empty without the directory.

    A bundle that others can write has that as its problem.
    """
    try:
        directory = jit_directory(default_directory().absolute())
        names = sorted(name for name in os.listdir(directory) if name.endswith(BUNDLE_SUFFIX))  # noqa: PTH208
    except (StorageError, OSError):
        return ()
    return tuple(_bundle_files(directory, names))


def _bundle_files(directory: Path, names: list[str]) -> Iterator[BundleFile]:
    for name in names:
        path = directory / name
        try:
            problem = writable_by_others(path)
        except FileNotFoundError:
            continue  # evicted a moment ago
        except OSError as error:
            problem = f"{path}: {error.strerror}"
        yield BundleFile(path=path, origin=user_bundle_origin(path), problem=problem)


def user_bundle_origin(path: Path) -> str:
    """Returns a user bundle's location for messages."""
    return f"{JIT_ORIGIN} {path.parent}"


def generation(cache: Path | None = None) -> str:
    """Returns a text that changes when kernels are removed from user bundles; empty at first."""
    try:
        return generation_path(cache or default_directory()).read_text("utf-8")
    except (StorageError, OSError, ValueError):
        return ""


def generation_path(cache: Path) -> Path:
    """Returns the file that holds `generation`."""
    return jit_directory(cache) / "generation"


_marked: set[Problem] = set()


def mark_used(problem: Problem) -> None:
    """Marks a user bundle's problem as in use, which keeps it from being evicted.

    Marks each problem once per process. An unwritable cache directory is no error.
    """
    if problem in _marked:
        return
    _marked.add(problem)
    with contextlib.suppress(StorageError, OSError):
        os.utime(stamp_path(default_directory(), problem))
