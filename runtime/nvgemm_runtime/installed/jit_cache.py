"""The directory of kernels that were compiled at run time, where later processes find them.

The builder's `nvgemm_aot.jit.user_bundle` writes there. The runtime reads bundles, and marks which
problems are in use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import StorageError
from ..settings import CACHE_VARIABLE
from .discover import BUNDLE_SUFFIX, BundleFile
from .ownership import writable_by_others

if TYPE_CHECKING:
    from ..gemm.problem import Problem  # not imported: every process that compiles imports this

JIT_ORIGIN = "the JIT cache"
"""What the origins of kernels begin with that were compiled at run time."""


def default_directory() -> Path:
    """``$NVGEMM_AOT_CACHE``, else ``nvgemm-aot`` in the user's cache directory (XDG).

    Raises:
        StorageError: If the user has no home directory and nothing names another place.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "nvgemm-aot"
    except RuntimeError as error:
        raise StorageError(
            f"no place for the build cache: {error}; set {CACHE_VARIABLE} or use --cache-dir"
        ) from error


def jit_directory(cache: Path) -> Path:
    """The directory of user bundles in a cache directory."""
    return cache / "jit"


def stamp_path(cache: Path, problem: Problem) -> Path:
    """The empty file whose time of change says when a problem was last used."""
    return jit_directory(cache) / "used" / problem.key.replace("/", ",")


def find_kept_bundles() -> tuple[BundleFile, ...]:
    """Find the user bundles of this user's cache directory, by name; none where it is absent.

    One that someone else could have written has that as its problem.
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
    """What messages call the place of a user bundle."""
    return f"{JIT_ORIGIN} {path.parent}"


def generation(cache: Path | None = None) -> str:
    """A text that changes when kernels are removed from user bundles; empty until they are."""
    try:
        return generation_path(cache or default_directory()).read_text("utf-8")
    except (StorageError, OSError, ValueError):
        return ""


def generation_path(cache: Path) -> Path:
    """The file that holds `generation`."""
    return jit_directory(cache) / "generation"


_marked: set[Problem] = set()


def mark_used(problem: Problem) -> None:
    """Note that a problem of a user bundle is in use, which keeps it from being evicted.

    Once a process for each problem. A cache directory that cannot be written is no error.
    """
    if problem in _marked:
        return
    _marked.add(problem)
    with contextlib.suppress(StorageError, OSError):
        os.utime(stamp_path(default_directory(), problem))
