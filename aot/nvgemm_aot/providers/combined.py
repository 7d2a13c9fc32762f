"""Combines several providers: all list candidates for a problem, ranked together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.problem import Signature

from ..targets import BuildTarget
from .base import INTERFACE_VERSION, Candidate, Enumeration, Provider, RuntimeModel

SEPARATOR = "+"
"""Separator between provider names in a combined name."""


def join_versions(statements: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    """Merges versions by name. ``stated`` holds pairs of a provider name and its versions.

    Raises:
        ToolchainError: If two providers state different versions for one name.
    """
    joined: dict[str, str] = {}
    stated_by: dict[str, str] = {}
    for who, versions in statements:
        for name, version in versions.items():
            if joined.setdefault(name, version) != version:
                raise ToolchainError(
                    f"{stated_by[name]} gives {name!r} version {joined[name]!r}, {who} gives it "
                    f"{version!r}; a bundle has one version per name: use only one of them in "
                    "the manifest's providers, or correct its toolchain()"
                )
            stated_by.setdefault(name, who)
    return joined


class Combined:
    """Provider that asks all ``parts``, at least one, and compiles with a candidate's own part.

    The first part's model ranks all candidates. Name and recipe join those of all parts, in order.
    """

    interface = INTERFACE_VERSION

    def __init__(self, parts: tuple[Provider, ...]) -> None:
        self.parts = parts
        self.name = SEPARATOR.join(part.name for part in parts)
        self.recipe = SEPARATOR.join(part.recipe for part in parts)

    def toolchain(self) -> dict[str, str]:
        """Merges all parts' versions; see `Provider.toolchain`."""
        return join_versions((f"provider {part.name!r}", part.toolchain()) for part in self.parts)

    def prepare(self) -> None:
        """Prepares all parts; see `Provider.prepare`."""
        for part in self.parts:
            part.prepare()

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """Lists all parts' operators; see `Provider.enumerate`."""
        listings = [part.enumerate(signature, target) for part in self.parts]
        absences = [listing.absence for listing in listings if listing.absence is not None]
        return Enumeration(
            candidates=tuple(candidate for listing in listings for candidate in listing.candidates),
            rejections=tuple(rejection for listing in listings for rejection in listing.rejections),
            absence="; ".join(absences) if len(absences) == len(listings) else None,
        )

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """Returns the first part's model; see `Provider.runtime_model`."""
        return self.parts[0].runtime_model(target)

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compiles a candidate with its own part; see `Provider.compile`."""
        (part,) = (part for part in self.parts if part.name == candidate.provider)
        return part.compile(candidate, target)
