"""Builds bundles of GEMM kernels ahead of time and packs them into wheels. No GPU is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvgemm_runtime import __version__

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    # Nothing is imported before the command has seen to interrupts.
    if name == "__version__":
        from nvgemm_runtime import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
