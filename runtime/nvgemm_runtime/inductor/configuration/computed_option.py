"""Config option whose value is computed at each read.

The torch names used here are private and were read in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch.utils._config_module import _UNSET_SENTINEL, _ConfigEntry


class _NeverSet:
    """Replaces the variable that holds user values, and ignores them."""

    def get(self) -> object:
        """Returns torch's marker for an unset value."""
        return _UNSET_SENTINEL

    def set(self, _: object) -> None:
        """Ignores a value."""


class _ComputedEntry(_ConfigEntry):  # type: ignore[misc]
    """Config entry with a computed default that no value overrides.

    Ignores values that are set, whether from a copy of all options, as ``config.patch`` takes, or
    from another process.
    """

    _compute: Callable[[], str]
    _never_set: Any

    @property
    def default(self) -> str:
        """The computed value."""
        return self._compute()

    @property
    def user_override(self) -> Any:
        """Unset value, in the form that torch's release expects."""
        return self._never_set

    @user_override.setter
    def user_override(self, _: object) -> None:
        """Ignores a value, which torch 2.11 assigns."""


def compute(entry: Any, function: Callable[[], str]) -> None:
    """Makes a config entry call a function for its value."""
    # Torch 2.11 stores the value itself, later releases a variable that holds it.
    in_variable = isinstance(entry.user_override, ContextVar)
    entry._compute = function
    entry._never_set = _NeverSet() if in_variable else _UNSET_SENTINEL
    entry.__class__ = _ComputedEntry
