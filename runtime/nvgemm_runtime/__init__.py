"""Loads prebuilt GEMM kernels from bundles. Importing it reads no file and touches no driver.

Its functions are imported when first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._version import __version__
    from .api import Explanation, bmm, bundles, choose, explain, load_operators, mm
    from .counters import Stats, reset_stats, stats
    from .fused import addmm, baddbmm, grouped_mm, scaled_mm
    from .inductor.modes import mode

__all__ = [
    "Explanation",
    "Stats",
    "__version__",
    "addmm",
    "baddbmm",
    "bmm",
    "bundles",
    "choose",
    "explain",
    "grouped_mm",
    "load_operators",
    "mm",
    "mode",
    "reset_stats",
    "scaled_mm",
    "stats",
]

_ELSEWHERE = {
    "Stats": "counters",
    "__version__": "_version",
    "addmm": "fused",
    "baddbmm": "fused",
    "grouped_mm": "fused",
    "mode": "inductor.modes",
    "reset_stats": "counters",
    "scaled_mm": "fused",
    "stats": "counters",
}
"""By name: the module that it is in, where that is not `api`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_ELSEWHERE.get(name, 'api')}", __name__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
