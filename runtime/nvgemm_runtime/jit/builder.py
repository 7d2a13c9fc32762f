"""Checks if the builder is installed, without importing it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import PathFinder

_BUILDER_MODULES = ("nvgemm_aot", "nvMatmulHeuristics", "pydantic", "yaml", "cutlass")


@functools.cache
def missing_module() -> str | None:
    """Returns a builder module that is not installed, or None. Imports nothing."""
    missing = (module for module in _BUILDER_MODULES if not is_installed(module))
    # A namespace package in several directories, whose parent `find_spec` would import.
    paths = [f"{path}/cutlass" for path in sys.path]
    operators = PathFinder.find_spec("cutlass.operators", paths)
    return next(missing, None if operators else "cutlass.operators")


def is_installed(module: str) -> bool:
    """Returns True if a module can be imported. Imports only its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # already imported, without a spec
        return True
