"""Loads prebuilt GEMM kernels from bundles. Importing it reads no file and touches no driver.

Its functions are imported at first use, so importing the package costs next to nothing. Start at
`launch.api`, which calls kernels, or at `inductor`, for torch.compile. It never imports
`nvgemm_aot` or a compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._version import __version__
    from .inductor.configuration.modes import mode
    from .launch.api import (
        Explanation,
        addmm,
        baddbmm,
        bmm,
        bundles,
        choose,
        explain,
        load_operators,
        mm,
        scaled_mm,
    )
    from .launch.dispatch_table import DispatchedSizes, dispatch_table
    from .launch.gates_and_groups import (
        gated_mm,
        gathered_grouped_mm,
        gathered_mm,
        grouped_mm,
        k_grouped_mm,
        scaled_grouped_mm,
    )
    from .launch.linear import linear
    from .launch.preload import Preloaded, preload
    from .reporting.counters import Stats, reset_stats, stats

__all__ = [
    "DispatchedSizes",
    "Explanation",
    "Preloaded",
    "Stats",
    "__version__",
    "addmm",
    "baddbmm",
    "bmm",
    "bundles",
    "choose",
    "dispatch_table",
    "explain",
    "gated_mm",
    "gathered_grouped_mm",
    "gathered_mm",
    "grouped_mm",
    "k_grouped_mm",
    "linear",
    "load_operators",
    "mm",
    "mode",
    "preload",
    "reset_stats",
    "scaled_grouped_mm",
    "scaled_mm",
    "stats",
]

_NOT_IN_API = {
    "DispatchedSizes": "launch.dispatch_table",
    "Preloaded": "launch.preload",
    "Stats": "reporting.counters",
    "__version__": "_version",
    "dispatch_table": "launch.dispatch_table",
    "gated_mm": "launch.gates_and_groups",
    "gathered_grouped_mm": "launch.gates_and_groups",
    "gathered_mm": "launch.gates_and_groups",
    "grouped_mm": "launch.gates_and_groups",
    "k_grouped_mm": "launch.gates_and_groups",
    "linear": "launch.linear",
    "mode": "inductor.configuration.modes",
    "preload": "launch.preload",
    "reset_stats": "reporting.counters",
    "scaled_grouped_mm": "launch.gates_and_groups",
    "stats": "reporting.counters",
}
"""Modules by name, for names outside `launch.api`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_NOT_IN_API.get(name, 'launch.api')}", __name__)
    value: object = getattr(module, name)
    globals()[name] = value  # later uses skip this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
