"""Several providers as one: a problem's candidates come from all, and are ranked together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.problem import Signature

from ..targets import BuildTarget
from .base import INTERFACE_VERSION, Candidate, Enumeration, Provider, RuntimeModel

SEPARATOR = "+"
"""Stands between the names of the providers in the name of all."""


def join_versions(stated: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    """Join versions by name; ``stated`` are pairs of who states them, and the versions.

    Raises:
        ToolchainError: If two state different versions of one name.
    """
    joined: dict[str, str] = {}
    stated_by: dict[str, str] = {}
    for who, versions in stated:
        for name, version in versions.items():
            if joined.setdefault(name, version) != version:
                raise ToolchainError(
                    f"{stated_by[name]} gives {name!r} version {joined[name]!r}, {who} gives it "
                    f"{version!r}; a bundle states one: name one of them in the manifest's "
                    "providers, or correct its toolchain()"
                )
            stated_by.setdefault(name, who)
    return joined


class Combined:
    """Lists the operators of each of ``parts``, at least one, and compiles each where it is from.

    The first one's model ranks all candidates. Name and recipe are those of all, in order.
    """

    interface = INTERFACE_VERSION

    def __init__(self, parts: tuple[Provider, ...]) -> None:
        self.parts = parts
        self.name = SEPARATOR.join(part.name for part in parts)
        self.recipe = SEPARATOR.join(part.recipe for part in parts)

    def toolchain(self) -> dict[str, str]:
        """Versions that shape the code of any; see `Provider.toolchain`."""
        return join_versions((f"provider {part.name!r}", part.toolchain()) for part in self.parts)

    def prepare(self) -> None:
        """Prepare all; see `Provider.prepare`."""
        for part in self.parts:
            part.prepare()

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """List the operators of all; see `Provider.enumerate`."""
        found = [part.enumerate(signature, target) for part in self.parts]
        absences = [one.absence for one in found if one.absence is not None]
        return Enumeration(
            candidates=tuple(candidate for one in found for candidate in one.candidates),
            rejections=tuple(rejection for one in found for rejection in one.rejections),
            absence="; ".join(absences) if len(absences) == len(found) else None,
        )

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """The first one's model; see `Provider.runtime_model`."""
        return self.parts[0].runtime_model(target)

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compile a candidate where it is from; see `Provider.compile`."""
        (part,) = (part for part in self.parts if part.name == candidate.provider)
        return part.compile(candidate, target)
