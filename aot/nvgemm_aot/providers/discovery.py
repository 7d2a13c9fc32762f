"""Finds external providers by entry point or ``module:class``."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any

from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.installed.discover import describe_distribution

from .checking.checked import BLAME, Checked, describe_error

GROUP = "nvgemm_aot.providers"
"""Entry point group. An entry's name is the provider's, its object the provider class."""


@dataclass(frozen=True, kw_only=True)
class Offered:
    """Provider from an installed distribution.

    Attributes:
        name: Name in manifests.
        distribution, version: The distribution's name and version.
    """

    name: str
    distribution: str
    version: str


def offered_providers() -> tuple[Offered, ...]:
    """Lists the providers that installed distributions offer, by name. Imports none."""
    return tuple(
        sorted(
            map(_offered_provider, _entry_points()),
            key=lambda offer: (offer.name, offer.distribution),
        )
    )


def load_external(name: str, builtin: tuple[str, ...]) -> Checked:
    """Creates an external provider from its entry point or ``module:class``.

    Args:
        name: Entry point name or ``module:class``.
        builtin: Names of builtin providers, for messages.

    Raises:
        ToolchainError: If the name matches none or several, or the object is no provider.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _create(name, lambda: getattr(importlib.import_module(module), attribute))
    points = [point for point in _entry_points() if point.name == name]
    if not points:
        known = sorted({*builtin, *(point.name for point in _entry_points())})
        raise ToolchainError(
            f"unknown provider {name!r} (known: {', '.join(known)}); install the package that "
            "defines it, or name its class as module:class"
        )
    if len(points) > 1:
        offers = sorted(
            f"{offer.distribution} {offer.version}" for offer in map(_offered_provider, points)
        )
        raise ToolchainError(
            f"{' and '.join(offers)} both define provider {name!r}; uninstall one, or name the "
            "class as module:class"
        )
    offered = _offered_provider(points[0])
    return _create(name, points[0].load, (offered.distribution, offered.version))


def _entry_points() -> tuple[EntryPoint, ...]:
    """Returns the group's entry points.

    Raises:
        ToolchainError: If any installed distribution's entry points cannot be read.
    """
    try:
        return tuple(entry_points(group=GROUP))
    except Exception as error:  # one damaged file hides every distribution's entry points
        raise unreadable_entry_points(error) from error


def unreadable_entry_points(error: Exception) -> ToolchainError:
    """Builds the error for entry points that cannot be read."""
    damaged = " and ".join(sorted(_unreadable_distributions())) or "the damaged one"
    return ToolchainError(
        f"the entry points of installed packages cannot be read: {describe_error(error)}; "
        f"reinstall or uninstall {damaged}"
    )


def _unreadable_distributions() -> Iterator[str]:
    """Yields each distribution whose entry points cannot be read."""
    for distribution in distributions():
        try:
            _ = distribution.entry_points
        except Exception:  # parsing may raise anything
            yield describe_distribution(distribution)


def _offered_provider(point: EntryPoint) -> Offered:
    # `entry_points` gives each entry point a distribution; one made by hand may lack it. Without
    # metadata, the distribution has neither name nor version; importlib_metadata, which replaces
    # Python's own once something imports it, raises then.
    name = version = None
    if point.dist is not None:
        with contextlib.suppress(OSError):
            name, version = point.dist.name, point.dist.version
    return Offered(
        name=point.name,
        distribution=name or "an unknown distribution",
        version=version or "unknown",
    )


def _create(
    name: str, find: Callable[[], Any], distribution: tuple[str, str] | None = None
) -> Checked:
    try:
        provider_class = find()
        if not callable(provider_class):
            raise ToolchainError(
                f"the provider {name!r} is a {type(provider_class).__name__}, must be a class; "
                "name a class as module:class in the package's entry point or in the manifest"
            )
        return Checked(provider_class(), name, distribution)
    except (ToolchainError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an external module may raise anything
        raise ToolchainError(
            f"the provider {name!r} cannot be created: {describe_error(error)}; check the name "
            f"and that its package is completely installed, or {BLAME}"
        ) from error
