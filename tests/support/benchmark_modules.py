"""The benchmarks as modules, without leaving them where others could import them.

Their names are common ones: transformers, say, would take ``kernels`` for the package of that name.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from repository import ROOT

BENCHMARKS = ROOT / "benchmarks"


def load(*names: str) -> list[ModuleType]:
    """Import scripts of benchmarks/; those of one call share what they import of each other."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).parent == BENCHMARKS:
                del sys.modules[name]
