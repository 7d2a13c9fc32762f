"""Names that the coverage command and its page print."""

from __future__ import annotations

WEIGHT_NAMES = {"problems": "problems", "count": "count", "flops": "FLOPs"}
"""Display names, by value of `nvgemm_aot.workload.coverage.Weight`."""


def ranked_as_text(gemm: str, ranked_as: str, *, is_split: bool) -> str:
    """Returns the problem that ranks a GEMM: empty for its own, sizes alone for its signature's."""
    if ranked_as == gemm:
        return ""
    if is_split:
        return f"{ranked_as}, and torch adds"
    signature, _, sizes = ranked_as.rpartition("/")
    return sizes if gemm.startswith(f"{signature}/") else ranked_as
