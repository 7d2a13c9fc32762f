"""Uploads a kernel's code to a device before its first real call.

A payload uploads its device code at its first call on a device and has no other function for it. So
it is called once, with operands of the smallest sizes and arbitrary values.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from ...bundle.format import Kernel
from ...gemm.operands import torch_dtype
from ...gemm.problem import Problem
from ...gemm.roles import Role, extra_roles, role_dtype, role_shape
from .loader import LoadedKernel

if TYPE_CHECKING:
    import torch

_LEAST_EXTENT = 128
"""Smallest m, n and k: a multiple of scale blocks and swizzle blocks."""


def upload(kernel: LoadedKernel, device: torch.device) -> bool:
    """Launches a loaded kernel once on a device's current stream, to upload its code.

    Returns:
        True if launched. False during a capture, in which the launch would become part of the
        graph.

    Raises:
        DriverError: If the device does not run it, or cannot load it.
        torch.OutOfMemoryError: If there is no memory for the operands, mostly under a megabyte.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    if is_capturing(device):
        return False
    # torch loads generated code under dispatch modes in which tensors have no memory.
    device_guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with _disable_current_modes(), device_guard:
        problem = _smallest_problem(kernel.kernel)
        a, b, out = (_operand(problem, role, device) for role in (Role.A, Role.B, Role.OUT))
        extras = (_operand(problem, role, device) for role in extra_roles(problem.signature))
        kernel.launch(a, b, out, *extras)
    return True


def is_capturing(device: torch.device) -> bool:
    """Returns True during a CUDA graph capture on this device's current stream."""
    import torch

    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # torch checks only the current device
        return bool(torch.cuda.is_current_stream_capturing())


def _smallest_problem(kernel: Kernel) -> Problem:
    # Factor 4: two fp4 values are one byte, and a gated result has half the columns.
    extent = max(_LEAST_EXTENT, 4 * kernel.alignment_bytes)
    return Problem(signature=kernel.signature, m=extent, n=extent, k=extent)


def _operand(problem: Problem, role: Role, device: torch.device) -> torch.Tensor:
    """Returns an operand with undefined values; groups have no rows."""
    import torch

    layout = problem.signature.layout
    shape = role_shape(problem, role)
    is_transposed = (role is Role.A and not layout.a_row_major) or (
        role is Role.B and not layout.b_row_major
    )
    if is_transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    dtype = torch_dtype(role_dtype(problem.signature, role))
    if role is Role.OFFSETS:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Via bytes: deterministic mode fills new tensors, which torch cannot do for every dtype.
    tensor = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
    tensor = tensor.view(dtype).view(shape)
    return tensor.mT if is_transposed else tensor
