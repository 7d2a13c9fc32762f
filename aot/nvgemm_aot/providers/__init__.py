"""Sources of kernels: each enumerates candidates for a problem and compiles them.

May import `targets` and `storage`; not `manifest`. Start at `base`, the interface; the table here
is the only place that names the providers.
"""

from __future__ import annotations

import importlib

from nvgemm_runtime.errors import ToolchainError

from .base import Candidate, Enumeration, Provider, Rejection
from .combined import SEPARATOR, Combined

__all__ = [
    "SEPARATOR",
    "Candidate",
    "Enumeration",
    "Provider",
    "Rejection",
    "load_provider",
    "parts_of",
]

PROVIDERS = {
    "cutlass_operators": f"{__name__}.cutlass_operators:CutlassOperators",
    "quack": f"{__name__}.quack:Quack",
}
"""By name: ``module:class``. Imported only when used, because compilers are slow to import."""

_PARTS = ("name", "recipe", "toolchain", "prepare", "enumerate", "runtime_model", "compile")
"""What a `Provider` has."""


def load_provider(name: str) -> Provider:
    """Create a provider, by its name in the table or as ``module:class`` for one kept elsewhere.

    Several names, joined by ``+``, give a `Combined` provider.

    Raises:
        ToolchainError: If there is no such provider, or what is there is none.
    """
    if SEPARATOR in name:
        return Combined(tuple(map(load_provider, name.split(SEPARATOR))))
    module, _, attribute = PROVIDERS.get(name, name).partition(":")
    if not attribute:
        raise ToolchainError(f"no provider is called {name!r} (known: {', '.join(PROVIDERS)})")
    try:
        provider: Provider = getattr(importlib.import_module(module), attribute)()
    except ToolchainError:
        raise
    except Exception as error:  # a module of someone else's raises whatever it raises
        raise ToolchainError(
            f"the provider {name!r} cannot be created: {type(error).__name__}: {error}; check the "
            "name and that its package is installed"
        ) from error
    lacks = [part for part in _PARTS if not hasattr(provider, part)]
    if lacks:
        raise ToolchainError(
            f"{name!r} is no provider: it has no {', '.join(lacks)}; "
            "see nvgemm_aot.providers.base.Provider"
        )
    return provider


def parts_of(provider: Provider) -> tuple[Provider, ...]:
    """The providers that a combined one is made of; any other one alone."""
    return provider.parts if isinstance(provider, Combined) else (provider,)
