"""Every environment variable of the project."""

from __future__ import annotations

from nvgemm_runtime.settings import VARIABLES

from .tables import table


def section() -> str:
    """A table of the variables, sorted by name."""
    rows = [(f"`{name}`", text) for name, text in sorted(VARIABLES.items())]
    return table(("variable", "meaning"), rows)
