"""Former name of `nvgemm_runtime.launch.compiled`, for code in torch's persistent caches.

That code outlives the release that generated it, and imports this name.
"""

from __future__ import annotations

from ..launch.compiled import gemm

__all__ = ["gemm"]
