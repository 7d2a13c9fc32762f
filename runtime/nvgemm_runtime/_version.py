"""The package version, as the installed distribution states it."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("nvgemm-aot")
