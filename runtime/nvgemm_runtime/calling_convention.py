"""How compiled kernels are called: the one form that this release knows."""

from __future__ import annotations

import re

KNOWN_FORM = "tvm_ffi:NAME(a,b,out)"
"""A TVM-FFI function that takes A, B and the output, and runs on the current stream."""

_PATTERN = re.compile(r"tvm_ffi:([A-Za-z_][A-Za-z0-9_]*)\(a,b,out\)")


def exported_symbol(calling_convention: str) -> str | None:
    """Symbol that a kernel such as ``tvm_ffi:gemm(a,b,out)`` exports; None for any other form."""
    match = _PATTERN.fullmatch(calling_convention)
    return None if match is None else f"__tvm_ffi_{match[1]}"
