"""Sources of kernels: each enumerates candidates for a problem and compiles them.

May import `targets` and `storage`; not `manifest`. Start at `base`, the interface; the table here
is the only place that names the providers.
"""

from __future__ import annotations

import importlib

from nvgemm_runtime.errors import ToolchainError

from .base import Candidate, Enumeration, Provider, Rejection
from .combined import SEPARATOR, Combined

__all__ = ["Candidate", "Enumeration", "Provider", "Rejection", "load_provider", "parts_of"]

PROVIDERS = {
    "cutlass_operators": f"{__name__}.cutlass_operators:CutlassOperators",
    "quack": f"{__name__}.quack:Quack",
}
"""By name: ``module:class``. Imported only when used, because compilers are slow to import."""


def load_provider(name: str) -> Provider:
    """Create a provider, by its name in the table or as ``module:class`` for one kept elsewhere.

    Several names, joined by ``+``, give a `Combined` provider.

    Raises:
        ToolchainError: If there is no such provider.
    """
    if SEPARATOR in name:
        return Combined(tuple(map(load_provider, name.split(SEPARATOR))))
    module, _, attribute = PROVIDERS.get(name, name).partition(":")
    if not attribute:
        raise ToolchainError(f"no provider is called {name!r} (known: {', '.join(PROVIDERS)})")
    provider: Provider = getattr(importlib.import_module(module), attribute)()
    return provider


def parts_of(provider: Provider) -> tuple[Provider, ...]:
    """The providers that a combined one is made of; any other one alone."""
    return provider.parts if isinstance(provider, Combined) else (provider,)
