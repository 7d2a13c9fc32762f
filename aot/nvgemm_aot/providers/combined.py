"""Several providers as one: a problem's candidates come from all, and are ranked together."""

from __future__ import annotations

from nvgemm_runtime.gemm.problem import Signature

from ..targets import BuildTarget
from .base import INTERFACE_VERSION, Candidate, Enumeration, Provider, RuntimeModel

SEPARATOR = "+"
"""Stands between the names of the providers in the name of all."""


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
        return {name: found for part in self.parts for name, found in part.toolchain().items()}

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
