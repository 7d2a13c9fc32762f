"""Checks the places at which plug-ins enter an engine, and keeps failures out of it."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from ..errors import NvgemmError
from ..inductor.autoload import after_import
from ..settings import is_off


@dataclass(frozen=True, kw_only=True)
class Seam:
    """Function in an engine that a plug-in replaces or calls.

    Attributes:
        module: Module that defines it.
        name: Name in the module, with its class if it is a method.
        parameters: Names of its parameters, in order, or of the first ones.
    """

    module: str
    name: str
    parameters: tuple[str, ...]

    def find_mismatch(self) -> str | None:
        """Returns how the imported engine differs; None if it has this function."""
        found: object = sys.modules.get(self.module)
        for part in self.name.split("."):
            found = inspect.getattr_static(found, part, None)
        if isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
        if not callable(found):
            return f"{self.module} has no function {self.name}"
        return self.find_difference(tuple(inspect.signature(found).parameters))

    def find_difference(self, parameters: tuple[str, ...]) -> str | None:
        """Returns how parameters differ from the expected ones; None if they start with them."""
        if parameters[: len(self.parameters)] == self.parameters:
            return None
        return (
            f"{self.module}.{self.name} takes ({', '.join(parameters)}), must begin with "
            f"({', '.join(self.parameters)})"
        )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Engine that a plug-in extends.

    Attributes:
        name: Name in messages.
        package: Its Python package, which has imported the plug-in.
        first, last: First and last release, as numbers, whose sources were compared with the seams.
        log: Logger whose messages the engine shows.
    """

    name: str
    package: str
    first: tuple[int, ...]
    last: tuple[int, ...]
    log: logging.Logger

    def may_be_extended(self, parts: str) -> bool:
        """Returns False if the plug-in is off, and with a warning in an unknown release.

        Args:
            parts: Start of the warning: the products that stay with the engine.
        """
        if is_off():
            return False
        version = getattr(sys.modules.get(self.package), "__version__", "unknown")
        unknown = self.why_unknown(str(version))
        if unknown is not None:
            self.warn_once(f"{parts} with {self.name}: {unknown}")
        return unknown is None

    def why_unknown(self, version: str) -> str | None:
        """Returns why the plug-in stays out of a release; None if it was tried."""
        numbers = _release(version, len(self.first))
        if numbers is not None and self.first <= numbers <= self.last:
            return None
        first, last = (".".join(map(str, release)) for release in (self.first, self.last))
        return f"{self.name} is {version}, supported is {first} to {last}"

    def extend(
        self, module: str, extend: Callable[[ModuleType], None], seams: tuple[Seam, ...], part: str
    ) -> None:
        """Extends a module once the engine imports it; each module once in a process.

        Args:
            module: Module name.
            extend: Function that takes the module.
            seams: Functions that must be as expected, else the module stays as it is.
            part: Name for the warning: the products or the step that the extension changes.
        """
        if (self.name, module) in _extended:
            return
        _extended.add((self.name, module))

        def extend_now() -> None:
            for seam in seams:
                mismatch = seam.find_mismatch()
                if mismatch is not None:
                    self.warn_once(f"{part} stays with {self.name}: {mismatch}")
                    return
            extend(sys.modules[module])

        after_import(module, lambda: self.guard(extend_now, part))

    def guard(self, step: Callable[[], object], part: str) -> None:
        """Runs a step of the plug-in. An error costs only that step and is logged once.

        Raises:
            NvgemmError: If the user asked for an error, as in mode ``required``.
        """
        try:
            step()
        except Exception as error:
            if isinstance(error, NvgemmError) and error.stops_compilation:
                raise
            self.warn_once(f"{part} stays with {self.name}: {type(error).__name__}: {error}")

    def warn_once(self, message: str, about: str | None = None) -> None:
        """Logs a warning, each subject, by default its text, once in a process."""
        subject = self.name, about or message
        if subject not in _warned:
            _warned.add(subject)
            self.log.warning("nvgemm-aot: %s", message)


_extended: set[tuple[str, str]] = set()
"""Modules that were extended or will be, by engine."""

_warned: set[tuple[str, str]] = set()
"""Warnings that were logged, by engine."""


def _release(version: str, count: int) -> tuple[int, ...] | None:
    """Returns a version's first numbers; None if it has fewer."""
    numbers = version.split("+")[0].split(".")[:count]
    if len(numbers) < count or not all(number.isdecimal() for number in numbers):
        return None
    return tuple(map(int, numbers))
