"""Kernel providers: each lists candidates for a problem and compiles them.

May import `targets` and `storage`, not `manifest`. `base` defines the interface; `interface` lists
the names that external packages may import. The table here names the builtin providers; `discovery`
finds external ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from nvgemm_runtime.errors import ToolchainError, install_command
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.target import Target

from . import cute_dsl
from .base import RECIPE_PREFIX, Candidate, Enumeration, Provider, Rejection
from .checking.checked import BLAME, describe_error
from .combined import SEPARATOR, Combined
from .cute_dsl import cute_setup
from .discovery import load_external

__all__ = [
    "BLAME",
    "PROVIDERS",
    "SEPARATOR",
    "UNRECORDED_RECIPES",
    "Candidate",
    "Enumeration",
    "Provider",
    "Rejection",
    "default_providers",
    "load_provider",
    "provider_parts",
    "recipe_name",
    "recorded_recipes",
    "target_recipe",
    "versions_of",
]

PROVIDERS = {
    "cutlass_operators": f"{__name__}.cutlass_operators:CutlassOperators",
    "quack": f"{__name__}.quack:Quack",
    "gathered": f"{__name__}.gathered:Gathered",
}
"""Provider classes by name, as ``module:class``. Imported on first use, because compilers import
slowly. By default all are asked, in this order: append new ones."""

_SERVES_ONLY = {"gathered": Op.GATHERED_MM}
"""Operation of each single-operation provider. It is asked by default only if a signature has that
operation, so that versions that shape no kernel stay out of a bundle's toolchain."""


def default_providers(signatures: Iterable[Signature]) -> tuple[str, ...]:
    """Returns the builtin providers for these signatures, used if a manifest names none.

    External providers are asked only by name, because their code runs in the build.
    """
    ops = {signature.op for signature in signatures}
    return tuple(name for name in PROVIDERS if _SERVES_ONLY.get(name) in (None, *ops))


def load_provider(name: str) -> Provider:
    """Creates a provider from its table name, entry point or ``module:class``.

    Names joined by ``+`` give a `Combined` provider. `Checked` validates external providers.

    Raises:
        ToolchainError: If the provider is unknown, cannot be created or is invalid.
    """
    if SEPARATOR in name:
        return Combined(tuple(map(load_provider, name.split(SEPARATOR))))
    if name not in PROVIDERS:
        return load_external(name, tuple(PROVIDERS))
    module, _, attribute = PROVIDERS[name].partition(":")
    try:
        provider: Provider = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # a broken installation may raise anything
        raise ToolchainError(
            f"the provider {name!r} cannot be created: {describe_error(error)}; "
            f"run: {install_command(reinstall=True)}"
        ) from error
    return provider


def provider_parts(provider: Provider) -> tuple[Provider, ...]:
    """Returns a combined provider's parts, or the provider alone."""
    return provider.parts if isinstance(provider, Combined) else (provider,)


UNRECORDED_RECIPES = {"cutlass_operators": "1, host x86-64 +sse2"}
"""Recipes, by provider, that toolchains leave out. Bundles older than recipes were made with them;
leaving them out keeps those bundles' bytes."""


def recipe_name(provider: str) -> str:
    """Returns a provider recipe's name among toolchain versions."""
    return f"{RECIPE_PREFIX}{provider}"


def target_recipe(part: Provider, target: Target) -> str:
    """Returns a provider's recipe for a target."""
    return cute_dsl.for_platform(part.recipe, target.platform)


def versions_of(provider: Provider, target: Target) -> dict[str, str]:
    """Returns the versions that shape a provider's code for a target, by distribution name.

    Raises:
        ToolchainError: As `Provider.toolchain` does.
    """
    return cute_setup.for_cuda(provider.toolchain(), target.cuda)


def recorded_recipes(provider: Provider, target: Target) -> dict[str, str]:
    """Returns each part's recipe by `recipe_name`, without those in `UNRECORDED_RECIPES`."""
    recipes = {part.name: target_recipe(part, target) for part in provider_parts(provider)}
    return {
        recipe_name(name): recipe
        for name, recipe in recipes.items()
        if UNRECORDED_RECIPES.get(name) != recipe
    }
