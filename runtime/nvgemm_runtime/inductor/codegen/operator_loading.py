"""Loads nvgemm-aot's torch operators before an AOTInductor package is loaded.

A package's code finds the operators by name, and runs on ATen without them. Loading the library
takes tens of milliseconds, or hundreds if its files are not in the page cache. So it is loaded only
if kernels are installed and a package is loaded.
"""

from __future__ import annotations

import functools
import logging

_log = logging.getLogger(__name__)

_logged: set[str] = set()


@functools.cache
def install() -> None:
    """Loads the operators if any bundle is installed."""
    from ...installed.discover import find_bundles

    if any(bundle.problem is None for bundle in find_bundles()):
        try_to_load_operators()


def try_to_load_operators() -> None:
    """Loads the operators. Warns on failure; compiled code then runs on ATen."""
    from ...errors import NvgemmError
    from ...launch.api import load_operators

    try:
        load_operators()
    except NvgemmError as error:
        _logged.add(str(error))
        _log.warning("compiled code runs GEMMs on ATen: %s", error)


def was_logged(error: Exception) -> bool:
    """Returns True if loading the operators failed with this error, which was then logged."""
    return str(error) in _logged
