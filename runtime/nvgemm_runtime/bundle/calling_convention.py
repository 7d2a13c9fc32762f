"""Calling conventions: compiled kernels' functions and parameters, as their entries state them.

The text is ``tvm_ffi:NAME(PARAMETERS)``: a TVM-FFI function and its parameters, in order. Each
parameter is

- a role in `nvgemm_runtime.gemm.roles`, for a tensor: ``a``, ``b``, ``scale_a``, ``scale_b``,
  ``offsets``, ``rows``, ``addend``, ``sums``, ``out``;
- a role and ``*``, for a pointer to a tensor's first element; the kernel assumes the strides of a
  compact tensor;
- ``mnkl``: the array (m, n, k, batch);
- ``workspace``: a tensor of bytes that the kernel may overwrite;
- ``clusters``: an integer, the number of clusters of the kernel's size that the device runs at
  once;
- ``stream``: the CUDA stream, as an opaque pointer.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass

from ..gemm.problem import Signature
from ..gemm.roles import Role, roles

MNKL = "mnkl"
WORKSPACE = "workspace"
CLUSTERS = "clusters"
STREAM = "stream"

KNOWN_FORM = "tvm_ffi:NAME(PARAMETERS)"
"""Form that this release knows; FORMAT.md lists the parameters."""

_FORM = re.compile(r"tvm_ffi:([A-Za-z_][A-Za-z0-9_]*)\(([a-z_*]+(?:,[a-z_*]+)*)\)")
_TENSORS = frozenset(role.value for role in Role)
_OTHERS = frozenset({MNKL, WORKSPACE, CLUSTERS, STREAM})
_PARAMETERS = _TENSORS | frozenset(f"{name}*" for name in _TENSORS) | _OTHERS


@dataclass(frozen=True, kw_only=True)
class CallingConvention:
    """Function and its parameters.

    Attributes:
        name: Function name in TVM-FFI.
        parameters: Parameters in order, each spelled as in a convention's text.
    """

    name: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return self.text

    @property
    def symbol(self) -> str:
        """Symbol that a kernel with this convention exports."""
        return f"__tvm_ffi_{self.name}"

    @property
    def text(self) -> str:
        """Text in kernel entries, e.g. ``tvm_ffi:gemm(a,b,out,stream)``."""
        return f"tvm_ffi:{self.name}({','.join(self.parameters)})"

    @property
    def needs_compact(self) -> bool:
        """True if operands must be compact, because their strides are not passed."""
        return any(parameter.endswith("*") for parameter in self.parameters)

    @property
    def takes_clusters(self) -> bool:
        """True if callers pass the number of active clusters, so the code fits any product."""
        return CLUSTERS in self.parameters

    def misfit(self, signature: Signature, has_workspace: bool) -> str | None:
        """Returns the reason that a kernel with a signature cannot be called this way, or None."""
        expected = Counter(role.value for role in roles(signature))
        expected[STREAM] = 1
        expected[WORKSPACE] = int(has_workspace)
        expected[MNKL] = int(self.needs_compact)
        actual = Counter(parameter.removesuffix("*") for parameter in self.parameters)
        expected[CLUSTERS] = min(actual[CLUSTERS], 1)  # optional
        mismatched = sorted(name for name in expected | actual if expected[name] != actual[name])
        name = next(iter(mismatched), None)
        return name and (
            f"parameter {name} is passed {_times_text(actual[name])}, must be "
            f"{_times_text(expected[name])} for {signature.key} "
            f"with{'' if has_workspace else 'out'} workspace"
        )


PLAIN = CallingConvention(name="gemm", parameters=("a", "b", "out", STREAM))
"""Calling convention for kernels that only multiply."""


@functools.lru_cache(maxsize=64)  # bundles name a few, thousands of times
def parse_calling_convention(text: str) -> CallingConvention | None:
    """Parses a calling convention; returns None for an unknown one."""
    match = _FORM.fullmatch(text)
    parameters = tuple(match[2].split(",")) if match else ()
    if match is None or not _PARAMETERS.issuperset(parameters):
        return None
    return CallingConvention(name=match[1], parameters=parameters)


def _times_text(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
