"""Memory that a kernel may touch in one call: operands, results and workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np

from nvgemm_runtime.bundle.calling_convention import CLUSTERS, MNKL, STREAM, WORKSPACE
from nvgemm_runtime.gemm.problem import Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype, role_shape

from ..machine.global_memory import Region
from .ffi_structs import AnyStruct, TensorStruct, array_integers

RESULTS = frozenset({Role.OUT.value, Role.SUMS.value})
"""Parameters for results, as tensors."""

_WRITTEN = RESULTS | {WORKSPACE}

_EARLY = {Role.OFFSETS.value, WORKSPACE}
"""Parameters that a dependent launch may access before earlier launches end: what writes offsets
must not let it begin early, nor does the fill that zeroes a workspace."""


def kernel_regions(
    signature: Signature, parameters: Sequence[str], arguments: Sequence[AnyStruct]
) -> tuple[Region, ...]:
    """Returns the memory regions for the arguments of a kernel's function.

    Args:
        signature: The kernel's, for sizes behind plain pointers.
        parameters: Parameter names, as in calling conventions.
        arguments: An argument for each parameter.
    """
    sizes = None
    if MNKL in parameters:
        m, n, k, batch = array_integers(arguments[parameters.index(MNKL)])
        batches = {"batch": batch} if signature.op is Op.BMM else {}
        sizes = Problem(signature=signature, m=m, n=n, k=k, **batches)
    spans = []
    for parameter, argument in zip(parameters, arguments):
        if parameter in (MNKL, CLUSTERS, STREAM):
            continue
        name = parameter.removesuffix("*")
        if name == parameter:
            start, size = TensorStruct.from_address(argument.value).span()
        else:
            assert sizes is not None  # calling conventions with pointers have the sizes
            start, size = argument.value, _compact_bytes(sizes, Role(name))
        if size:
            spans.append((start, start + size, name))
    return tuple(_regions(spans))


def _compact_bytes(problem: Problem, role: Role) -> int:
    elements = 1
    for extent in role_shape(problem, role):
        elements *= extent
    dtype = role_dtype(problem.signature, role)
    return elements * dtype.packed * dtype.bits // 8


def _regions(spans: Iterable[tuple[int, int, str]]) -> Iterable[Region]:
    """Joins spans that overlap, as operands may that are only read."""
    joined: list[tuple[int, int, tuple[str, ...]]] = []
    for start, end, name in sorted(spans):
        if joined and start < joined[-1][1]:
            before, last, names = joined[-1]
            joined[-1] = (before, max(last, end), (*names, name))
        else:
            joined.append((start, end, (name,)))
    for start, end, names in joined:
        yield Region(
            address=start,
            data=np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start)),
            name=" and ".join(names),
            writable=not _WRITTEN.isdisjoint(names),
            is_workspace=WORKSPACE in names,
            is_early=_EARLY.issuperset(names),
        )
