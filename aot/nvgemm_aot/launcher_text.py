"""What the launcher says about its operands, and what the entry of its kernel says instead.

A TVM-FFI launcher checks its arguments and, where one does not fit, raises an error that shows the
function as it must be called. The text is written from the same types as the checks:
``__call__(a: Tensor([n0, n1], bfloat16), b: Tensor(…), c: Tensor(…), stream: Stream)`` and
``, expected data alignment=16 bytes``. Seen in each of 124 kernels (cutlass-dsl 4.8.1, all operator
families, every element type); the transposed family calls itself ``_tgv_bmm(a_api: …)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nvgemm_runtime.format import Kernel
from nvgemm_runtime.problem import Op

from .gap import Check, Gap
from .launcher import read_only_bytes

CALLING_CONVENTION = "tvm_ffi:gemm(a,b,out,stream)"
"""The one calling convention that this release can check; FORMAT.md says what it means."""

_CALL = re.compile(
    rb"when calling: `[A-Za-z_][A-Za-z0-9_]{0,63}\(([\x20-\x5f\x61-\x7e]{1,1000})\)`"
)
_TENSOR = re.compile(r"([a-z])(?:_api)?: Tensor\(\[(n[0-9]+(?:, n[0-9]+)*)\], ([a-z0-9_]+)\)")
_STREAM = ", stream: Stream"
_ALIGNMENT = re.compile(rb", expected data alignment=([0-9]{1,9}) bytes")

_NAMES = ("a", "b", "c")
"""Of the operands in the launcher's text, in the order of `CALLING_CONVENTION`."""

_RANKS = {Op.MM: 2, Op.BMM: 3}


@dataclass(frozen=True, kw_only=True)
class LauncherText:
    """What a launcher says.

    Attributes:
        operands: Its tensors in order, such as ``a: Tensor([n0, n1], bfloat16)``; empty if the
            payload does not show exactly one call.
        alignment_bytes: Alignments that it demands of their data; empty if it shows none.
    """

    operands: str
    alignment_bytes: frozenset[int]


def read_launcher_text(payload: bytes) -> LauncherText:
    """Read what the launcher of a payload says; a malformed payload says nothing."""
    data = read_only_bytes(payload)
    calls = set(_CALL.findall(data))
    return LauncherText(
        operands=calls.pop().decode("ascii") if len(calls) == 1 else "",
        alignment_bytes=frozenset(int(digits) for digits in _ALIGNMENT.findall(data)),
    )


def check_call(kernel: Kernel) -> Iterator[Gap]:
    """Check that a kernel is called in the way that this release knows.

    Yields:
        What does not hold.
    """
    if kernel.calling_convention != CALLING_CONVENTION:
        yield Gap(
            check=Check.CALLING_CONVENTION,
            message=f"calling convention {kernel.calling_convention!r}; this release knows "
            f"{CALLING_CONVENTION!r} alone",
        )
    elif kernel.workspace_bytes:
        yield Gap(
            check=Check.WORKSPACE,
            message=f"{kernel.workspace_bytes} bytes of workspace, must be 0: {CALLING_CONVENTION} "
            "passes none",
        )


def check_interface(kernel: Kernel, text: LauncherText) -> Iterator[Gap]:
    """Check how a kernel's entry says it is called against what its launcher says.

    Yields:
        What does not hold.
    """
    yield from check_call(kernel)
    yield from _check_operands(kernel, text)
    if text.alignment_bytes != {kernel.alignment_bytes}:
        observed = ", ".join(map(str, sorted(text.alignment_bytes))) or "no number of"
        yield Gap(
            check=Check.ALIGNMENT,
            message=f"the launcher demands data aligned to {observed} bytes, its entry says "
            f"{kernel.alignment_bytes}",
        )


def _check_operands(kernel: Kernel, text: LauncherText) -> Iterator[Gap]:
    signature = kernel.signature
    rank = _RANKS[signature.op]
    wanted = [
        (name, rank, dtype.torch_name)
        for name, dtype in zip(_NAMES, (signature.a, signature.b, signature.out))
    ]
    if not text.operands:
        yield Gap(check=Check.OPERANDS, message="the launcher does not show its operands")
        return
    tensors = _TENSOR.findall(text.operands)
    observed = [(name, extents.count("n"), dtype) for name, extents, dtype in tensors]
    # The whole text must be three tensors and the stream: no argument may hide between them.
    rest = _TENSOR.sub("", text.operands)
    if observed != wanted or rest != ", , " + _STREAM:
        yield Gap(
            check=Check.OPERANDS,
            message=f"the launcher takes ({text.operands}), its signature is {signature.key}: "
            f"{', '.join(f'{name} of rank {rank}, {dtype}' for name, _, dtype in wanted)}",
        )
