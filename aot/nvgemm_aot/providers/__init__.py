"""Sources of kernels: each enumerates candidates for a problem and compiles them.

May import `targets` and `storage`; not `manifest`. Start at `base`, the interface; the table here
is the only place that names the providers.
"""

from __future__ import annotations

import importlib

from nvgemm_runtime.errors import ToolchainError

from .base import Candidate, Enumeration, Provider, Rejection

__all__ = ["Candidate", "Enumeration", "Provider", "Rejection", "load_provider"]

PROVIDERS = {"cutlass_operators": f"{__name__}.cutlass_operators:CutlassOperators"}
"""By name: ``module:class``. Imported only when used, because compilers are slow to import."""


def load_provider(name: str) -> Provider:
    """Create a provider, by its name in the table or as ``module:class`` for one kept elsewhere.

    Raises:
        ToolchainError: If there is no such provider.
    """
    module, _, attribute = PROVIDERS.get(name, name).partition(":")
    if not attribute:
        raise ToolchainError(f"no provider is called {name!r} (known: {', '.join(PROVIDERS)})")
    provider: Provider = getattr(importlib.import_module(module), attribute)()
    return provider
