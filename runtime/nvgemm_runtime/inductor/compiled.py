"""The name under which code in torch's persistent caches imports what it calls.

That code outlives the release that generated it; the functions are in
`nvgemm_runtime.launch.compiled`.
"""

from __future__ import annotations

from ..launch.compiled import gemm

__all__ = ["gemm"]
