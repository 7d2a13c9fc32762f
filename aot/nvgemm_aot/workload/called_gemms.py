"""Counts the GEMMs that a program calls through torch's dispatcher. Imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvgemm_runtime.gemm.aten import (
    GEMMS,
    OPERATORS,
    UNSERVED,
    AtenGemm,
    named_arguments,
    read_call,
)
from nvgemm_runtime.gemm.moe_operators import NAMESPACE, read_products
from nvgemm_runtime.gemm.moe_operators import OPERATORS as MOE_OPERATORS
from nvgemm_runtime.gemm.operands import MAX_ALIGNMENT_BYTES, Operand
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.recording.declarable import declarable, declarable_for


class GemmCalls(TorchDispatchMode):  # type: ignore[misc]
    """Counts every matrix product called while the mode is active.

    Tensors may be real, meta or fake; enter a `FakeTensorMode` before this mode. Vector products do
    not count, as no tensor core computes them. Storage is assumed to have the alignment that
    torch's allocators give it. ``arch`` is the architecture to declare problems for; None means
    any.

    Attributes:
        problems: Number of calls for each GEMM that a manifest can declare.
        undeclarable: Number of calls for each other GEMM, described with a reason.
    """

    def __init__(self, arch: str | None = None) -> None:
        super().__init__()
        self._arch = arch
        self.problems: Counter[Problem] = Counter()
        self.undeclarable: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operator, and counts it if it is a GEMM."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # inner tensors, such as a shard's, are dispatched again
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == NAMESPACE:
            if name in MOE_OPERATORS:
                for gemm in read_products(name, named_arguments(func, args, kwargs, _value)):
                    self._count_gemm(gemm)
                return func(*args, **kwargs)
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace != "aten":
            return func(*args, **kwargs)
        if name not in GEMMS:
            # In inference mode, composite operators such as linear arrive here.
            with self:
                result = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        result = func(*args, **kwargs)
        self._count_gemm(_read_gemm(func, name, args, kwargs, _operand(result)))
        return result

    def _count_gemm(self, gemm: AtenGemm) -> None:
        self.count(declarable(gemm) if self._arch is None else declarable_for(gemm, self._arch))

    def count(self, gemm: Problem | str) -> None:
        """Counts a GEMM: its problem, or a text if no manifest can declare it."""
        if isinstance(gemm, Problem):
            self.problems[gemm] += 1
        else:
            self.undeclarable[gemm] += 1


def _read_gemm(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Operand
) -> AtenGemm:
    if name in OPERATORS:
        return read_call(name, named_arguments(func, args, kwargs, _value), out)
    operands = args[1:] if UNSERVED[name].adds_first else args
    a, b = map(_operand, operands[:2])
    return AtenGemm(op=name, a=a, b=b, out=out)


def _value(argument: Any) -> Any:
    return _operand(argument) if isinstance(argument, torch.Tensor) else argument


def _operand(tensor: torch.Tensor) -> Operand:
    """Describes a tensor without its data."""
    offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
    return Operand(
        dtype=tensor.dtype,
        device=tensor.device,
        shape=tuple(map(int, tensor.shape)),
        strides=tuple(map(int, tensor.stride())),
        address=MAX_ALIGNMENT_BYTES + offset,
    )
