"""Sources of kernels: each enumerates candidates for a problem and compiles them.

May import `targets` and `storage`; not `manifest`. `base` is the interface, `interface` what a
provider of another package may import. The table here names the providers that come with the
builder; `discovery` finds the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.support import GATHERED_PROVIDER
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.installing import install_command

from . import cute_dsl, cute_setup
from .base import RECIPE_PREFIX, Candidate, Enumeration, Provider, Rejection
from .checked import BLAME, described
from .combined import SEPARATOR, Combined
from .discovery import load_external

__all__ = [
    "BLAME",
    "PROVIDERS",
    "SEPARATOR",
    "UNSTATED_RECIPES",
    "Candidate",
    "Enumeration",
    "Provider",
    "Rejection",
    "default_providers",
    "load_provider",
    "parts_of",
    "recipe_name",
    "recipe_of",
    "stated_recipes",
    "versions_of",
]

PROVIDERS = {
    "cutlass_operators": f"{__name__}.cutlass_operators:CutlassOperators",
    "quack": f"{__name__}.quack:Quack",
    "gathered": f"{__name__}.gathered:Gathered",
}
"""By name: ``module:class``. Imported only when used, because compilers are slow to import. All are
asked by default, in this order: a new one belongs at the end."""

_SERVES_ONLY = {GATHERED_PROVIDER: Op.GATHERED_MM}
"""Providers of one operation: not asked by default where nothing declares it, so that versions that
shape no kernel stay out of a bundle's toolchain."""


def default_providers(signatures: Iterable[Signature]) -> tuple[str, ...]:
    """Returns the providers of these signatures where a manifest names none: all that come along.

    Providers of other packages are asked only by name, for their code runs in the build.
    """
    ops = {signature.op for signature in signatures}
    return tuple(name for name in PROVIDERS if _SERVES_ONLY.get(name) in (None, *ops))


def load_provider(name: str) -> Provider:
    """Create a provider by its name: in the table, of an entry point, or ``module:class``.

    Several names, joined by ``+``, give a `Combined` provider. What a provider of another package
    returns is checked (`checked`).

    Raises:
        ToolchainError: If there is no such provider, or what is there is none.
    """
    if SEPARATOR in name:
        return Combined(tuple(map(load_provider, name.split(SEPARATOR))))
    if name not in PROVIDERS:
        return load_external(name, tuple(PROVIDERS))
    module, _, attribute = PROVIDERS[name].partition(":")
    try:
        provider: Provider = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # half an installation raises whatever it raises
        raise ToolchainError(
            f"the provider {name!r} cannot be created: {described(error)}; "
            f"run: {install_command(again=True)}"
        ) from error
    return provider


def parts_of(provider: Provider) -> tuple[Provider, ...]:
    """The providers that a combined one is made of; any other one alone."""
    return provider.parts if isinstance(provider, Combined) else (provider,)


UNSTATED_RECIPES = {"cutlass_operators": "1, host x86-64 +sse2"}
"""By provider, the recipe that the toolchain of a bundle does not state: bundles were made with it
before any stated recipes, and keep their bytes."""


def recipe_name(provider: str) -> str:
    """Name of a provider's recipe among the versions of a toolchain."""
    return f"{RECIPE_PREFIX}{provider}"


def recipe_of(part: Provider, target: Target) -> str:
    """How one provider makes its objects for a target."""
    return cute_dsl.for_platform(part.recipe, target.platform)


def versions_of(provider: Provider, target: Target) -> dict[str, str]:
    """Versions of everything that shapes a provider's code for a target, by distribution name.

    Raises:
        ToolchainError: As of `Provider.toolchain`.
    """
    return cute_setup.for_cuda(provider.toolchain(), target.cuda)


def stated_recipes(provider: Provider, target: Target) -> dict[str, str]:
    """By `recipe_name`, how each part of a provider makes its objects, but for what is unstated."""
    own = {part.name: recipe_of(part, target) for part in parts_of(provider)}
    return {
        recipe_name(name): recipe
        for name, recipe in own.items()
        if UNSTATED_RECIPES.get(name) != recipe
    }
