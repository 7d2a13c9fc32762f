"""An option of a config module whose value is computed whenever it is read.

The names of torch that are used here are private, and were read in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch.utils._config_module import _UNSET_SENTINEL, _ConfigEntry


class _NeverSet:
    """Stands in for the variable of values that users set; it ignores them."""

    def get(self) -> object:
        """No value is set."""
        return _UNSET_SENTINEL

    def set(self, _: object) -> None:
        """Ignore a value."""


class _ComputedEntry(_ConfigEntry):  # type: ignore[misc]
    """An entry with a computed default that nothing overrides.

    Values that are set are ignored: those of a copy of all options, as ``config.patch`` takes it,
    and of another process.
    """

    _compute: Callable[[], str]
    _never_set: Any

    @property
    def default(self) -> str:
        """The value."""
        return self._compute()

    @property
    def user_override(self) -> Any:
        """No value that a user set."""
        return self._never_set

    @user_override.setter
    def user_override(self, _: object) -> None:
        """Ignore a value, which torch 2.11 assigns."""


def compute(entry: Any, function: Callable[[], str]) -> None:
    """Make an entry of a config module call a function for its value."""
    # Torch 2.11 keeps the value itself, later releases a variable that holds it.
    in_variable = isinstance(entry.user_override, ContextVar)
    entry._compute = function
    entry._never_set = _NeverSet() if in_variable else _UNSET_SENTINEL
    entry.__class__ = _ComputedEntry
