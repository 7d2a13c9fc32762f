"""Loads prebuilt GEMM kernels from bundles. Importing it reads no file and touches no driver."""

from __future__ import annotations

from ._version import __version__
from .api import Explanation, bmm, bundles, choose, explain, mm

__all__ = ["Explanation", "__version__", "bmm", "bundles", "choose", "explain", "mm"]
