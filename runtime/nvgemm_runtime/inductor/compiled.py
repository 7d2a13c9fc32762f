"""Former name of `nvgemm_runtime.launch.compiled`, for code in torch's persistent caches.

Cached code imports this name and outlives the release that generated it.
"""

from __future__ import annotations

from ..launch.compiled import gemm

__all__ = ["gemm"]
