"""Validates external providers' results and names the provider in errors.

Listed facts go into headers, and the builder and launches rely on them. So each result is checked
against `base` as it arrives.
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from nvgemm_runtime.errors import CompileError, NvgemmError, ToolchainError, one_line
from nvgemm_runtime.gemm.problem import Problem, Signature

from ...targets import BuildTarget
from ..base import (
    INTERFACE_VERSIONS,
    RECIPE_PREFIX,
    BlockShape,
    Candidate,
    Enumeration,
    Provider,
    RuntimeModel,
)
from ..sources import source_digest
from .listing_faults import (
    MAX_HEADER_INTEGER,
    MAX_VERSION_LENGTH,
    is_integer,
    is_version_text,
    listing_difference,
    listing_faults,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

BLAME = "report it to the provider's author, or take the provider out of the manifest"
"""Next step in messages about a provider's error."""

SLOW_SECONDS = 10.0
"""Seconds after which a warning names a provider that has not answered. The builder waits without a
limit. Builtin providers list in less than a second."""

_OUT_OF_RESOURCES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO})

_ATTRIBUTES = {"interface": int, "name": str, "recipe": str}
_METHODS = ("toolchain", "prepare", "enumerate", "runtime_model", "compile")
"""Members that a `Provider` has."""


class Checked:
    """External provider whose results are validated against the interface.

    Args:
        provider: Object that the package created.
        name: Requested name, which must be the provider's own.
        distribution: Distribution name and version, if known. They become part of the toolchain, so
            another version's plans and kernels are not reused.
    """

    def __init__(
        self, provider: Any, name: str, distribution: tuple[str, str] | None = None
    ) -> None:
        _require_interface(provider, name)
        self._provider: Provider = provider
        self._distribution = distribution
        self.name = name
        self.interface = provider.interface
        # During a provider's development, its source changes while its version stays.
        self.recipe = f"{provider.recipe}, source {source_digest(self.source_module)}"

    @property
    def source_module(self) -> str:
        """Module or package that holds the provider's source."""
        return _source_module(self._provider)

    def toolchain(self) -> dict[str, str]:
        """Returns the versions that shape its code, its own included; see `Provider.toolchain`."""
        versions = self._ask_in_time("toolchain()", self._provider.toolchain)
        if not isinstance(versions, dict) or not all(
            is_version_text(text) for item in versions.items() for text in item
        ):
            raise self._error(
                f"toolchain() returned {versions!r}; must map distribution names to versions, "
                f"both printable text of 1 to {MAX_VERSION_LENGTH} characters"
            )
        if reserved := [name for name in versions if name.startswith(RECIPE_PREFIX)]:
            raise self._error(
                f"toolchain() names {reserved[0]!r}, which is reserved for recipes; use the "
                "distribution's name"
            )
        if self._distribution is not None:
            name, version = self._distribution
            versions = {**versions, name: version}
        if not versions:
            raise self._error(
                "toolchain() returned no versions; must name the distributions that shape the code"
            )
        return versions

    def prepare(self) -> None:
        """Prepares a process; see `Provider.prepare`."""
        self._ask("prepare()", self._provider.prepare)

    def enumerate(self, signature: Signature, target: BuildTarget) -> Enumeration:
        """Lists operators after validation; see `Provider.enumerate`."""
        call = f"enumerate({signature.key}, {target.target.arch})"
        listing, repeat = (
            self._ask_in_time(call, lambda: self._provider.enumerate(signature, target))
            for _ in range(2)
        )
        for result in (listing, repeat):
            fault = next(listing_faults(result, self.name, signature, target), None)
            if fault is not None:
                raise self._error(f"{call} {fault}")
        fault = listing_difference(listing, repeat)
        if fault is not None:
            raise self._error(f"{call} {fault}")
        # Lists do not hash, and plans compare candidates. The copy also drops extra attributes.
        return replace(
            listing,
            candidates=tuple(replace(candidate) for candidate in listing.candidates),
            rejections=tuple(listing.rejections),
        )

    def runtime_model(self, target: BuildTarget) -> RuntimeModel:
        """Returns the model, wrapped to validate answers; see `Provider.runtime_model`."""
        model = self._ask_in_time("runtime_model()", lambda: self._provider.runtime_model(target))
        name: Any = self._ask("runtime_model().name", lambda: getattr(model, "name", None))
        if not is_version_text(name) or not callable(getattr(model, "estimate_ns", None)):
            raise self._error(
                f"runtime_model() returned {one_line(repr(model))[:100]}; must have "
                f"estimate_ns() and a name that is printable text of 1 to "
                f"{MAX_VERSION_LENGTH} characters (got {one_line(repr(name))[:60]})"
            )
        return _CheckedModel(model, name, self)

    def compile(self, candidate: Candidate, target: BuildTarget) -> bytes:
        """Compiles one candidate; see `Provider.compile`."""
        try:
            result: Any = self._provider.compile(candidate, target)
        except NvgemmError:
            raise
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:  # the machine's fault, not the provider's
                raise
            raise self._compile_error(candidate, error) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # includes SystemExit and Rust panics
            raise self._compile_error(candidate, error) from error
        if not isinstance(result, bytes) or not result:
            raise CompileError(
                f"{candidate.operator}: compile() of provider {self.name!r} gave "
                f"{one_line(repr(result))[:60]}; must be the bytes of an object"
            )
        return result

    def _compile_error(self, candidate: Candidate, error: BaseException) -> CompileError:
        _log.debug("provider %s: compile()", self.name, exc_info=error)
        return CompileError(
            f"{candidate.operator}: compile() of provider {self.name!r} "
            f"raised {describe_error(error)}"
        )

    def _ask(self, call_text: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except (NvgemmError, KeyboardInterrupt):
            raise
        except BaseException as error:  # includes SystemExit and Rust panics
            _log.debug("provider %s: %s", self.name, call_text, exc_info=True)
            raise self._error(f"{call_text} raised {describe_error(error)}") from error

    def _ask_in_time(self, call_text: str, call: Callable[[], T]) -> T:
        """Calls the provider, and warns if it takes longer than `SLOW_SECONDS`."""
        timer = threading.Timer(SLOW_SECONDS, self._warn_of_waiting, (call_text,))
        timer.daemon = True
        timer.start()
        try:
            return self._ask(call_text, call)
        finally:
            timer.cancel()

    def _warn_of_waiting(self, call_text: str) -> None:
        _log.warning(
            "provider %r: %s has not returned for %g s; still waiting. Press Ctrl-C to stop, then "
            "%s",
            *(self.name, call_text, SLOW_SECONDS, BLAME),
        )

    def _error(self, text: str) -> ToolchainError:
        return ToolchainError(f"provider {self.name!r}: {text}; {BLAME}")


class _CheckedModel:
    """Runtime model whose answers are validated."""

    def __init__(self, model: RuntimeModel, name: str, provider: Checked) -> None:
        self._model = model
        self._provider = provider
        self.name = name

    @property
    def source_module(self) -> str:
        """Module or package that holds the model's source."""
        return _source_module(self._model)

    def estimate_ns(self, problem: Problem, shape: BlockShape) -> int | None:
        """Estimates a runtime; see `RuntimeModel.estimate_ns`."""
        call = f"estimate_ns({problem.key})"
        estimate = self._provider._ask(call, lambda: self._model.estimate_ns(problem, shape))
        if estimate is not None and not is_integer(estimate, 1, MAX_HEADER_INTEGER):
            raise self._provider._error(
                f"{call} returned {one_line(repr(estimate))[:60]}; must be whole nanoseconds "
                f"from 1 to {MAX_HEADER_INTEGER}, or None"
            )
        return estimate


def _source_module(made_by_others: object) -> str:
    module = type(made_by_others).__module__
    return getattr(sys.modules.get(module), "__package__", None) or module


def _require_interface(provider: Any, name: str) -> None:
    """Checks that an external object has the provider interface.

    Raises:
        ToolchainError: If a member is missing or invalid.
    """
    hint = "see nvgemm_aot.providers.interface.Provider"
    missing = [member for member in (*_ATTRIBUTES, *_METHODS) if not hasattr(provider, member)]
    if missing:
        raise ToolchainError(f"{name!r} is not a provider: it lacks {', '.join(missing)}; {hint}")
    for member, kind in _ATTRIBUTES.items():
        value = getattr(provider, member)
        if type(value) is not kind or not value:
            raise ToolchainError(
                f"{name!r} is not a provider: its {member} is {value!r}, must be of type "
                f"{kind.__name__} and not empty; {hint}"
            )
    if not is_version_text(provider.recipe):
        raise ToolchainError(
            f"{name!r} is not a provider: its recipe is {provider.recipe[:60]!r}, must be "
            f"printable text of at most {MAX_VERSION_LENGTH} characters, because bundles "
            f"store it; {hint}"
        )
    for member in _METHODS:
        if not callable(getattr(provider, member)):
            raise ToolchainError(
                f"{name!r} is not a provider: its {member} is not a method; {hint}"
            )
    if provider.interface not in INTERFACE_VERSIONS:
        known = ", ".join(map(str, INTERFACE_VERSIONS))
        raise ToolchainError(
            f"provider {name!r} implements interface version {provider.interface}; this "
            f"nvgemm-aot supports {known}: install another version of either"
        )
    if provider.name != name:
        raise ToolchainError(
            f"provider {name!r} has the name {provider.name!r}; compiler processes look it up by "
            f"name: replace {name!r} with {provider.name!r}, or correct the provider"
        )


def describe_error(error: BaseException) -> str:
    """Formats an error's class, first line and location on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    text = one_line(str(error)) or "no message"
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text[:300]}{where}"
