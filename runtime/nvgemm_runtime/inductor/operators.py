"""Gives torch the operators of nvgemm-aot before a package of AOTInductor is loaded.

A package's code finds the operators by name and runs on ATen without them. Loading the library
takes tens of milliseconds, and hundreds where nothing of it was read before, so it is only done
where kernels are installed and a package is loaded.
"""

from __future__ import annotations

import functools
import logging

_log = logging.getLogger(__name__)

_logged: set[str] = set()


@functools.cache
def install() -> None:
    """Load the operators, if any bundle is installed."""
    from ..installed.discover import find_bundles

    if any(found.problem is None for found in find_bundles()):
        try_to_load_operators()


def try_to_load_operators() -> None:
    """Load the operators; where that fails, warn, and compiled code runs on ATen."""
    from ..errors import NvgemmError
    from ..launch.api import load_operators

    try:
        load_operators()
    except NvgemmError as error:
        _logged.add(str(error))
        _log.warning("compiled code runs GEMMs on ATen: %s", error)


def was_logged(error: Exception) -> bool:
    """Whether this error kept the operators from loading, and was logged then."""
    return str(error) in _logged
