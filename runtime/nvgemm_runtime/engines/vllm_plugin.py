"""Plug-in for vLLM: lm_head, fp8 Linears, kernels loaded before serving, and a line in the log.

VLLM calls `activate` in each of its processes. Only processes that import vLLM's layers or its GPU
worker get further.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .linears import compute_linear
from .seams import Engine, Seam

if TYPE_CHECKING:
    import torch

# VLLM shows messages of its own loggers alone, so this one is a child of theirs.
VLLM = Engine(
    name="vLLM",
    package="vllm",
    first=(0, 24),
    last=(0, 33),
    log=logging.getLogger("vllm.nvgemm_aot"),
)

_UTILITIES = "vllm.model_executor.layers.utils"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_LINEAR_KERNELS = "vllm.model_executor.kernels.linear"
_WORKER = "vllm.v1.worker.gpu_worker"

HEAD_SEAMS = (
    Seam(module=_EMBEDDING, name="dispatch_unquantized_gemm", parameters=()),
    Seam(
        module=_UTILITIES,
        name="default_unquantized_gemm",
        parameters=("layer", "x", "weight", "bias"),
    ),
)

FP8_SEAMS = (
    Seam(
        module=_LINEAR_KERNELS,
        name="CutlassFP8ScaledMMLinearKernel.apply_scaled_mm",
        parameters=("self", "A", "B", "out_dtype", "As", "Bs", "bias", "output_shape"),
    ),
    Seam(
        module=_LINEAR_KERNELS,
        name="CutlassFP8ScaledMMLinearKernel.can_implement",
        parameters=("cls", "c"),
    ),
    Seam(module="vllm.config", name="get_current_vllm_config_or_none", parameters=()),
)

WORKER_SEAMS = (Seam(module=_WORKER, name="Worker.compile_or_warm_up_model", parameters=("self",)),)


def activate() -> None:
    """Extends vLLM as its modules are imported; does nothing under ``NVGEMM_AOT=off``."""
    VLLM.guard(_activate, "vLLM")


def _activate() -> None:
    if not VLLM.may_be_extended("lm_head and fp8 Linears stay"):
        return
    VLLM.extend(_EMBEDDING, serve_head, HEAD_SEAMS, "lm_head")
    VLLM.extend(_LINEAR_KERNELS, _serve_fp8, FP8_SEAMS, "every fp8 Linear")
    VLLM.extend(_WORKER, prepare_workers, WORKER_SEAMS, "the preload of kernels")


def serve_head(embedding: Any) -> None:
    """Makes unquantised embedding layers, thus lm_head, compute by tables.

    Where vLLM chooses another function than ``torch.nn.functional.linear``, as for other platforms
    or batch invariance, that function stays.

    Args:
        embedding: VLLM's module ``vocab_parallel_embedding``.
    """
    stock_dispatch = embedding.dispatch_unquantized_gemm
    stock = sys.modules[_UTILITIES].default_unquantized_gemm

    @functools.wraps(stock_dispatch)
    def dispatch(*args: Any, **options: Any) -> Callable[..., torch.Tensor]:
        chosen: Callable[..., torch.Tensor] = stock_dispatch(*args, **options)
        return _head_gemm if chosen is stock else chosen

    embedding.dispatch_unquantized_gemm = dispatch


def _head_gemm(
    layer: torch.nn.Module,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return compute_linear(VLLM, x, weight, bias)


def _serve_fp8(kernels: Any) -> None:
    from .vllm_fp8 import offer_class

    offer_class(VLLM, kernels)


def prepare_workers(worker_module: Any) -> None:
    """Makes each GPU worker load all kernels before it captures graphs, and log what is served.

    Args:
        worker_module: VLLM's module ``gpu_worker``.
    """
    stock = worker_module.Worker.compile_or_warm_up_model

    @functools.wraps(stock)
    def compile_or_warm_up_model(self: Any, *args: Any, **options: Any) -> Any:
        from .start_up import accompany, load_kernels

        def model() -> torch.nn.Module:
            found: torch.nn.Module = self.model_runner.get_model()
            return found

        return accompany(
            VLLM,
            lambda: stock(self, *args, **options),
            load=lambda: load_kernels(model()),
            model=model,
            sizes=lambda: self.vllm_config.compilation_config.cudagraph_capture_sizes or (),
        )

    worker_module.Worker.compile_or_warm_up_model = compile_or_warm_up_model
