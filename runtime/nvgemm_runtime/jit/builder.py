"""Tells whether the builder side is installed, without importing it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import PathFinder

_BUILDER_MODULES = ("nvgemm_aot", "nvMatmulHeuristics", "pydantic", "yaml", "cutlass")


@functools.cache
def missing_module() -> str | None:
    """A module of the builder side that is not installed, or None. Imports nothing."""
    missing = (module for module in _BUILDER_MODULES if not is_installed(module))
    # Part of a namespace of several directories; `find_spec` would import its parent.
    places = [f"{place}/cutlass" for place in sys.path]
    operators = PathFinder.find_spec("cutlass.operators", places)
    return next(missing, None if operators else "cutlass.operators")


def is_installed(module: str) -> bool:
    """Whether a module can be imported. Imports nothing but its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported, by a module without a spec
        return True
