"""Other ways to compute a GEMM that came up already, each a graph of its own to Inductor.

The names of torch that are used here are private, and were read and run on torch 2.11 to 2.15.
"""

from __future__ import annotations

import re

from torch._inductor.virtualized import V

UNFUSED = "nvgemm_aot_unfused"
"""Beginning of the names of our own: what a kernel with an activation competes with."""

_ALTERNATIVE = re.compile(rf"(benchmark_)?(decompose_k|contiguous_(add)?mm|{UNFUSED})_.*")
"""Names of such graphs; the others are those of Inductor's subgraph templates."""


def is_alternative() -> bool:
    """Whether Inductor is lowering another way to compute a GEMM that came up already."""
    name = getattr(V.graph, "name", None)
    return isinstance(name, str) and _ALTERNATIVE.fullmatch(name) is not None
