"""Class for vLLM's list of fp8 Linears: bundled kernels where measured, else vLLM's own.

It stands right before the class that it extends, so it never replaces a class that vLLM prefers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import NoKernelError
from ..gemm.extra_operands import ExtraOperands
from ..gemm.operands import MAX_ALIGNMENT_BYTES, Operand, requests
from ..gemm.problem import Op
from ..launch.compiled import GeneratedCall, default_device
from ..launch.dispatch_table import find_dispatch
from ..launch.dispatched import dispatched
from ..matching.device import device_facts
from ..settings import Mode, default_mode, max_choices, serves_default_mode

if TYPE_CHECKING:
    import torch

    from ..matching.dispatch import Dispatch
    from .seams import Engine

_CUTLASS_ALIGNMENT = 16
"""Multiple of which the stock class's kernels take n and k; it pads other weights."""


def offer_class(engine: Engine, kernels: ModuleType) -> None:
    """Adds the class to vLLM's list.

    Args:
        engine: VLLM.
        kernels: VLLM's module ``vllm.model_executor.kernels.linear``.
    """
    stock = kernels.CutlassFP8ScaledMMLinearKernel
    listed = kernels._POSSIBLE_FP8_KERNELS[kernels.PlatformEnum.CUDA]
    listed.insert(listed.index(stock), make_class(engine, stock))


def make_class(engine: Engine, stock: Any) -> type:
    """Returns a subclass of vLLM's class for CUTLASS that computes by tables.

    Args:
        engine: VLLM.
        stock: VLLM's class.
    """
    import torch

    _define_operator()

    class NvgemmFP8ScaledMMLinearKernel(stock):  # type: ignore[misc]
        """Fp8 Linear that dispatches by m between bundled kernels and vLLM's own."""

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            """Returns True if bundled kernels were measured for a Linear, else the reason."""
            is_implemented, reason = stock.can_implement(c)
            if not is_implemented:
                return is_implemented, reason
            reason = f"leaves {engine.name}'s class after an internal error"

            def read() -> None:
                nonlocal reason
                reason = why_unserved(c, stock.__name__)

            engine.guard(read, "an fp8 Linear")
            return reason is None, reason

        def apply_scaled_mm(
            self,
            *,
            A: torch.Tensor,  # noqa: N803
            B: torch.Tensor,  # noqa: N803
            out_dtype: torch.dtype,
            As: torch.Tensor,  # noqa: N803
            Bs: torch.Tensor,  # noqa: N803
            bias: torch.Tensor | None,
            output_shape: list[int],
        ) -> torch.Tensor:
            """Computes one Linear; arguments as in vLLM."""
            result: torch.Tensor = torch.ops.nvgemm_vllm.fp8_linear(A, B, As, Bs, bias, out_dtype)
            return result.view(*output_shape[:-1], B.shape[1])

    return NvgemmFP8ScaledMMLinearKernel


def why_unserved(config: Any, stock_name: str) -> str | None:
    """Returns why bundled kernels do not serve a Linear; None if they do at some m.

    Args:
        config: VLLM's description of the Linear.
        stock_name: Name of vLLM's class, which users can disable.
    """
    import torch

    environment = sys.modules["vllm.envs"]
    if environment.VLLM_BATCH_INVARIANT:
        return "is not batch-invariant"
    if stock_name in environment.VLLM_DISABLED_KERNELS:
        return f"falls back to {stock_name}, which is disabled"
    current = sys.modules["vllm.config"].get_current_vllm_config_or_none()
    if current is not None and current.compilation_config.pass_config.fuse_gemm_comms:
        return f"cannot be fused with communication, as {stock_name} can"
    n, k = config.weight_shape
    if n % _CUTLASS_ALIGNMENT or k % _CUTLASS_ALIGNMENT:
        return f"takes n and k that are multiples of {_CUTLASS_ALIGNMENT}, not {n} and {k}"
    a_scales, b_scales = (
        key.scale.group_shape for key in (config.activation_quant_key, config.weight_quant_key)
    )
    is_tensor = a_scales.is_per_tensor() and b_scales.is_per_tensor()
    if not is_tensor and not (a_scales.is_per_token() and b_scales.is_per_channel()):
        return "takes scales per tensor, or per token and channel, for both operands"
    device = default_device()
    m = 16  # any size: tables are found by n and k

    def operand(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return Operand(
            dtype=dtype, device=device, shape=shape, strides=strides, address=MAX_ALIGNMENT_BYTES
        )

    fp32 = torch.float32
    dispatch = _find_dispatch(
        operand(config.activation_quant_key.dtype, (m, k), (k, 1)),
        operand(config.weight_quant_key.dtype, (k, n), (1, k)),
        operand(fp32, (), ()) if is_tensor else operand(fp32, (m, 1), (1, 1)),
        operand(fp32, (), ()) if is_tensor else operand(fp32, (1, n), (n, 1)),
        None,
        config.out_dtype or torch.bfloat16,
    )
    if not isinstance(dispatch, str) and dispatch.table.has_kernels:
        return None
    return dispatch if isinstance(dispatch, str) else f"has no measured kernel for n {n}, k {k}"


def _find_dispatch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> Dispatch | str:
    """Returns the decision for a product at every m, or why no kernel can or may compute it."""
    if default_mode() is Mode.OFF or not serves_default_mode() or not max_choices():
        return "computes nothing by the settings of nvgemm-aot"
    extras = ExtraOperands(scale_a=scale_a, scale_b=scale_b, addend=bias)
    try:
        readings = requests(Op.MM, a, b, out_dtype, extras=extras)
    except (NoKernelError, ValueError) as error:
        return str(error)
    facts = device_facts(a.device.type, a.device.index or 0)
    return find_dispatch(readings, facts)[1]


_calls: dict[tuple[object, ...], GeneratedCall | None] = {}
"""Calls by everything that decides a table; None where vLLM's operator computes at every m."""


def _compute(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    is_row = scale_b.numel() > 1
    rows = a.shape[0]
    if rows == 0 or scale_a.numel() != (rows if is_row else 1):
        return _compute_stock(a, b, scale_a, scale_b, bias, out_dtype)
    key = (a.device, a.dtype, b.dtype, b.shape, b.stride(), is_row, bias is not None, out_dtype)
    tensors = [a, b, scale_a, scale_b.view(1, -1) if is_row else scale_b]
    tensors += [] if bias is None else [bias]
    if key not in _calls:
        _calls[key] = _make_call(tensors, out_dtype)
    call = _calls[key]
    if call is None:
        return _compute_stock(a, b, scale_a, scale_b, bias, out_dtype)
    return call(*tensors, out=a.new_empty((rows, b.shape[1]), dtype=out_dtype))


def _make_call(tensors: list[torch.Tensor], out_dtype: torch.dtype) -> GeneratedCall | None:
    """Returns a call that dispatches by m, and loads its kernels; None without a kernel."""
    a, b, scale_a, scale_b, *rest = tensors
    dispatch = _find_dispatch(a, b, scale_a, scale_b, rest[0] if rest else None, out_dtype)
    if isinstance(dispatch, str) or not dispatch.table.has_kernels:
        return None
    table = dispatch.table
    origins = {kernel: dispatch.measured[kernel].bundle.origin for kernel in table.used}

    def stock(*tensors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        a, b, scale_a, scale_b, *rest = tensors
        return _compute_stock(a, b, scale_a, scale_b, rest[0] if rest else None, out.dtype)

    return dispatched(stock, table.bounds, table.kernels, origins, tuple(range(len(tensors))))


def _compute_stock(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if scale_b.numel() > 1:
        scale_b = scale_b.view(-1, 1)  # as vLLM's operator takes scales per channel
    stock: Callable[..., torch.Tensor] = sys.modules["vllm._custom_ops"].cutlass_scaled_mm
    return stock(a, b, scale_a, scale_b, out_dtype, bias)


def _allocate(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@functools.cache
def _define_operator() -> torch.library.Library:
    """Defines the operator for compiled graphs; returns its library, which must be kept."""
    import torch

    library = torch.library.Library("nvgemm_vllm", "DEF")
    library.define(
        "fp8_linear(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, "
        "ScalarType out_dtype) -> Tensor",
        tags=torch.Tag.pt2_compliant_tag,
    )
    library.impl("fp8_linear", _compute, "CompositeExplicitAutograd")
    torch.library.register_fake("nvgemm_vllm::fp8_linear", _allocate, lib=library)
    return library
