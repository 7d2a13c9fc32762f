"""How compiled kernels are called: the one form that this release knows."""

from __future__ import annotations

import functools
import re

KNOWN_FORM = "tvm_ffi:NAME(a,b,out,stream)"
"""A TVM-FFI function that takes A, B, the output, and the CUDA stream as an opaque pointer."""

_PATTERN = re.compile(r"tvm_ffi:([A-Za-z_][A-Za-z0-9_]*)\(a,b,out,stream\)")


@functools.lru_cache(maxsize=64)  # bundles name few, thousands of times
def exported_symbol(calling_convention: str) -> str | None:
    """Symbol that a kernel called this way exports; None for a form that is not known."""
    match = _PATTERN.fullmatch(calling_convention)
    return None if match is None else f"__tvm_ffi_{match[1]}"
