"""Torch operators: definitions, observers, and steps between products.

`experts` and `routed_experts` are an operator each for Dynamo. AOTAutograd replaces it with its
computation. Products with a gate, and the products that such kernels read, then become operators
that launch a kernel if installed bundles have one. Otherwise they are plain products and operators,
which Inductor fuses as usual. So Dynamo's graphs do not depend on installed bundles. Torch's later
caches do: if the plug-in is active, `nvgemm_runtime.inductor.configuration.cache_key` adds the
bundles to their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .._version import __version__
from ..gemm.moe_operators import NAMESPACE

PIECE = 1 << 24
"""Elements in each fp32 tensor between products, unless all rows are computed at once."""


library = torch.library.Library(NAMESPACE, "DEF")
"""Lives as long as the process: torch unregisters a deleted library's operators."""


def define(
    name: str,
    operands: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    gives: str = "Tensor",
) -> Callable[..., Any]:
    """Defines and returns an operator with its fake implementation."""
    library.define(f"{name}({operands}) -> {gives}", tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    operator: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name)
    return operator


def define_whole(
    name: str, operands: str, run: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Defines an operator that traces as ``run``. Returns a function that calls the operator.

    The operator hides the experts' functions from Dynamo. Tracing them took most of a warm start,
    and each had guards to check at every call.

    The operator takes nvgemm-aot's version before its operands, and autocast's dtype as the last
    one. Torch's cache keys get both only from the operator's arguments: autocast's dtype in torch
    2.11, and the version if torch.compile runs without the plug-in.
    """

    def replace(_: str, *arguments: Any) -> torch.Tensor:
        return run(*arguments)

    schema = f"{name}(str version, {operands}, ScalarType? wanted) -> Tensor"
    library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, replace, "CompositeImplicitAutograd")
    operator: Callable[..., torch.Tensor] = getattr(torch.ops.nvgemm_moe, name)

    def call(*arguments: Any) -> torch.Tensor:
        return operator(__version__, *arguments)

    return call


def is_traced_whole() -> bool:
    """Returns True while torch.compile traces, except under torch.export.

    Programs with any version of nvgemm-aot read and run an exported graph, and torch keeps
    operators in it that should be replaced.
    """
    # Dynamo in torch 2.11 treats is_exporting() as True whenever it traces.
    is_exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    return torch.compiler.is_compiling() and not is_exporting


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensor types that observe no operators."""


def is_watched(*tensors: torch.Tensor | None) -> bool:
    """Returns True if a tracer, a dispatch mode or a tensor subclass observes operators.

    Also True for tensors without memory, whose results only operators can create.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return True
    # make_fx before dispatch, then torch.jit.trace.
    if _len_torch_dispatch_stack_pre_dispatch() or torch._C._get_tracing_state() is not None:
        return True
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_meta):
            return True
    return False


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Returns True if an operator's implementation may be called directly, in half the host time.

    False if operators are observed, and for lazily negated views, which an operator resolves.
    """
    if is_watched(*tensors):
        return False
    negated = [tensor for tensor in tensors if tensor is not None and tensor.is_neg()]
    return not negated


_WITH_AUTOCAST = ("cuda", "cpu")
"""Device types checked for autocast. Dynamo in torch 2.11 cannot trace the query if a type has it.
"""


def autocast_type(x: Any) -> torch.dtype | None:
    """Returns autocast's dtype on a tensor's device, or None if autocast is off."""
    kind = x.device.type if isinstance(x, torch.Tensor) else ""
    if kind in _WITH_AUTOCAST and torch.is_autocast_enabled(kind):
        dtype: torch.dtype = torch.get_autocast_dtype(kind)
        return dtype
    return None


def widen(matrix: torch.Tensor) -> torch.Tensor:
    """Converts to fp32; keeps fp64."""
    return matrix if matrix.dtype is torch.float64 else matrix.float()


def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts to a dtype; returns a matrix with that dtype itself.

    In torch 2.11, a compiled function whose result is ``to`` its own dtype has no gradients.
    """
    return matrix if matrix.dtype is dtype else matrix.to(dtype)


def sum_products(left: torch.Tensor, right: torch.Tensor, *, is_compiled: bool) -> torch.Tensor:
    """Returns row-wise dot products of two matrices [rows], in fp32, or fp64 for fp64."""
    if is_compiled or not multiplies_into_fp32(left):
        return (widen(left) * right).sum(-1)
    product = torch.bmm(left.unsqueeze(1), right.unsqueeze(2), out_dtype=torch.float32)
    return product.flatten()


def multiplies_into_fp32(matrix: torch.Tensor) -> bool:
    """Returns True if ``torch.bmm`` can return fp32 for such a matrix.

    FLOP counters do not know that form.
    """
    is_16_bit = matrix.dtype in (torch.bfloat16, torch.float16)
    return matrix.is_cuda and is_16_bit and not is_watched(matrix)


def taken_rows(matrix: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    """Returns the rows that indices select, or the matrix itself without indices."""
    return matrix if indices is None else matrix.index_select(0, indices)


def count_taken(matrix: torch.Tensor, indices: torch.Tensor | None) -> int:
    """Returns the number of rows that `taken_rows` returns."""
    count: int = (matrix if indices is None else indices).shape[0]
    return count


def dense_like(matrix: torch.Tensor) -> torch.Tensor:
    """Allocates a row-major matrix with the same shape and no gaps."""
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


def pieces(count: int, elements: int) -> list[slice]:
    """Returns slices of ``count`` rows to compute at a time, given ``elements`` per row."""
    step = max(1, PIECE // max(elements, 1))
    return [slice(begin, begin + step) for begin in range(0, max(count, 1), step)]
