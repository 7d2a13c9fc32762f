"""Builds bundles of GEMM kernels ahead of time and packs them into wheels. No GPU is needed."""

from __future__ import annotations

from nvgemm_runtime import __version__

__all__ = ["__version__"]
