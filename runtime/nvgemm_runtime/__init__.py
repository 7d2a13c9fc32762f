"""Loads prebuilt GEMM kernels from bundles. Importing it reads no file and touches no driver.

Its functions are imported when first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._version import __version__
    from .api import Explanation, bmm, bundles, choose, explain, load_operators, mm

__all__ = [
    "Explanation",
    "__version__",
    "bmm",
    "bundles",
    "choose",
    "explain",
    "load_operators",
    "mm",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _version, api

    return getattr(_version if name == "__version__" else api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
