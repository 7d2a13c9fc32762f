"""Compares a launcher's text about its operands with the kernel's entry.

A TVM-FFI launcher checks its arguments and raises an error with its call signature for a misfit.
The compiler writes the text from the same types as the checks, one parameter after another:

- ``a: Tensor([n0, n1], bfloat16)`` and ``, expected data alignment=16 bytes``;
- ``a_ptr: DataPointer``, without types, shapes or alignment;
- ``problem_mnkl: Tuple[int32, int32, int32, int32]``;
- ``clusters: int32``;
- ``stream: Stream``.

Seen in 124 dense kernels and in 95 with epilogues, scales or groups (cutlass-dsl 4.8.1, all
operator families, every element type).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nvgemm_runtime.bundle.calling_convention import (
    CLUSTERS,
    KNOWN_FORM,
    MNKL,
    STREAM,
    WORKSPACE,
    CallingConvention,
    parse_calling_convention,
)
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype, role_shape
from nvgemm_runtime.gemm.types import ScaleRecipe

from ..findings import Check, Finding

_CALL = re.compile(
    rb"when calling: `[A-Za-z_][A-Za-z0-9_]{0,63}\(([\x20-\x5f\x61-\x7e]{1,1000})\)`"
)
_ALIGNMENT = re.compile(rb", expected data alignment=([0-9]{1,9}) bytes")

_NAMES = {
    Role.A.value: r"a(?:_api)?",
    Role.B.value: r"b(?:_api)?",
    Role.OUT.value: r"(?:out|c(?:_api)?|_vararg_[0-9]+)",
    Role.SCALE_A.value: r"(?:scale_a|_vararg_[0-9]+)",
    Role.SCALE_B.value: r"(?:scale_b|_vararg_[0-9]+)",
    Role.ADDEND.value: r"(?:addend|_vararg_[0-9]+)",
    Role.OFFSETS.value: "(?:offsets|offset_mapping)",
    Role.ROWS.value: "rows",
    Role.SUMS.value: "sums",
    WORKSPACE: "workspace",
}
"""Tensor names in launchers: quack's follow the roles, others are a, b and c. The transposed family
writes ``a_api``. Operators with an epilogue take everything after the stream as nameless arguments,
told apart by their order."""

_POINTER_NAMES = {
    Role.A.value: "a",
    Role.B.value: "b",
    Role.OUT.value: "c",
    Role.SCALE_A.value: "sfa",
    Role.SCALE_B.value: "sfb",
}
"""Pointer names in launchers, before ``_ptr``."""

_OTHER_PARAMETERS = {
    MNKL: "problem_mnkl: Tuple[int32, int32, int32, int32]",
    CLUSTERS: "clusters: int32",
    STREAM: "stream: Stream",
}


@dataclass(frozen=True, kw_only=True)
class LauncherText:
    """Facts in a launcher's text.

    ``operands`` are its parameters in order, such as ``a: Tensor([n0, n1], bfloat16), …``; empty if
    the payload does not show exactly one call. ``alignment_bytes`` are the data alignments that it
    demands.
    """

    operands: str
    alignment_bytes: frozenset[int]


def read_launcher_text(data: bytes) -> LauncherText:
    """Reads a launcher's text from a payload's read-only part."""
    calls = set(_CALL.findall(data))
    return LauncherText(
        operands=calls.pop().decode("ascii") if len(calls) == 1 else "",
        alignment_bytes=frozenset(int(digits) for digits in _ALIGNMENT.findall(data)),
    )


def check_call(kernel: Kernel) -> Iterator[Finding]:
    """Checks that this release knows a kernel's calling convention and the signature fits it."""
    convention = parse_calling_convention(kernel.calling_convention)
    if convention is None:
        yield Check.CALLING_CONVENTION.finding(
            f"calling convention {kernel.calling_convention!r}; this release knows "
            f"{KNOWN_FORM} with the parameters that FORMAT.md lists"
        )
        return
    takes_workspace = WORKSPACE in convention.parameters
    if takes_workspace != kernel.has_workspace:
        required = "more than 0" if takes_workspace else "0"
        passing = "passes one" if takes_workspace else "passes none"
        size = kernel.workspace_bytes if kernel.workspace is None else "a formula of"
        yield Check.WORKSPACE.finding(
            f"{size} bytes of workspace, must be {required}: {kernel.calling_convention} {passing}"
        )
    if kernel.workspace is not None and (fault := kernel.workspace.fault(kernel.signature.op)):
        yield Check.WORKSPACE.finding(fault)
    misfit = convention.misfit(kernel.signature, takes_workspace)
    if misfit is not None:
        yield Check.CALLING_CONVENTION.finding(
            f"calling convention {kernel.calling_convention!r}: {misfit}"
        )


def check_interface(kernel: Kernel, text: LauncherText) -> Iterator[Finding]:
    """Compares a kernel's entry with its launcher's call text."""
    broken = [*check_call(kernel)]
    yield from broken
    convention = parse_calling_convention(kernel.calling_convention)
    if convention and all(finding.check is not Check.CALLING_CONVENTION for finding in broken):
        yield from _check_operands(kernel.signature, convention, text)
        yield from _check_alignment(kernel, convention, text)


def _check_operands(
    signature: Signature, convention: CallingConvention, text: LauncherText
) -> Iterator[Finding]:
    if not text.operands:
        yield Check.OPERANDS.unseen("the launcher does not show its operands")
        return
    # The whole text must match: an argument that the convention does not list is an error too.
    parameters = [_parameter(signature, name) for name in convention.parameters]
    if not re.fullmatch(", ".join(pattern for pattern, _ in parameters), text.operands):
        yield Check.OPERANDS.finding(
            f"the launcher takes ({text.operands}), its signature is {signature.key}: "
            f"{', '.join(words for _, words in parameters)}"
        )


def _parameter(signature: Signature, name: str) -> tuple[str, str]:
    """Returns a parameter's pattern in a launcher's text, and its description for messages."""
    if name in _OTHER_PARAMETERS:
        return re.escape(_OTHER_PARAMETERS[name]), name
    if name.endswith("*"):
        role = name.removesuffix("*")
        # No launcher is known to take another pointer: such a parameter must not match.
        name_in_text = _POINTER_NAMES.get(role)
        pattern = f"{name_in_text}_ptr: DataPointer" if name_in_text else r"(?!)"
        return pattern, f"pointer {role}"
    if name == WORKSPACE:
        rank, dtype = 1, DType.UINT8
    else:
        smallest = Problem(signature=signature, m=1, n=2, k=signature.a.packed)
        rank, dtype = len(role_shape(smallest, Role(name))), role_dtype(signature, Role(name))
    # A tensor-wide scale is a tensor with one element; other extents are passed at run time.
    is_scalar = name.startswith("scale_") and signature.scales is ScaleRecipe.FP32_TENSOR
    extents = ", ".join(["1" if is_scalar else "n[0-9]+"] * rank)
    return (
        rf"{_NAMES[name]}: Tensor\(\[{extents}\], {dtype.torch_name}\)",
        f"{name} of rank {rank}, {dtype.torch_name}",
    )


def _check_alignment(
    kernel: Kernel, convention: CallingConvention, text: LauncherText
) -> Iterator[Finding]:
    expected = {
        _needed_alignment(kernel, name)
        for name in convention.parameters
        if name not in _OTHER_PARAMETERS and not name.endswith("*")
    }
    if text.alignment_bytes != expected:
        observed = ", ".join(map(str, sorted(text.alignment_bytes))) or "no number of"
        other_alignments = "".join(
            f", and other tensors to {n}" for n in sorted(expected - {kernel.alignment_bytes})
        )
        stated = (
            f"its entry says {kernel.alignment_bytes}{other_alignments}"
            if expected
            else "it takes pointers, which show none"
        )
        fault = f"the launcher demands data aligned to {observed} bytes, {stated}"
        # A text that shows no call cannot show what is demanded of its arguments.
        is_shown = bool(text.operands or text.alignment_bytes)
        yield Check.ALIGNMENT.finding(fault) if is_shown else Check.ALIGNMENT.unseen(fault)


def _needed_alignment(kernel: Kernel, name: str) -> int:
    """Returns a tensor's alignment; operands read by the element need no more than an element's.

    These are scales, offsets, row numbers, sums, and gathered rows' weights.
    """
    roles_by_element = (Role.SCALE_A, Role.SCALE_B, Role.OFFSETS, Role.ROWS, Role.SUMS)
    by_element = {role.value for role in roles_by_element}
    if kernel.signature.op is Op.GATHERED_MM:
        by_element.add(Role.A.value)
    if name in by_element:
        return role_dtype(kernel.signature, Role(name)).bits // 8
    return kernel.alignment_bytes
