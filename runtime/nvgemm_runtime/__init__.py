"""Loads prebuilt GEMM kernels from bundles. Importing it reads no file and touches no driver."""

from __future__ import annotations

from ._version import __version__

__all__ = ["__version__"]
