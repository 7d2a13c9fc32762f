"""Plug-in for SGLang: unquantised Linears, which it does not compile, and a line in the log.

SGLang calls `activate` in each of its processes. Only processes that import its layers or its model
runner get further.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .linears import compute_linear
from .seams import Engine, Seam

if TYPE_CHECKING:
    import torch

SGLANG = Engine(
    name="SGLang",
    package="sglang",
    first=(0, 5, 20),
    last=(0, 5, 23),
    log=logging.getLogger(__name__),
)

_HOOKS = "sglang.srt.plugins.hook_registry"
_UNQUANTIZED = "sglang.srt.layers.quantization.unquant"
_RUNNER = "sglang.srt.model_executor.model_runner"

_HOOK_SEAM = Seam(
    module=_HOOKS, name="HookRegistry.register", parameters=("cls", "target", "hook", "hook_type")
)
_APPLY = Seam(
    module=_UNQUANTIZED,
    name="UnquantizedLinearMethod.apply",
    parameters=("self", "layer", "x", "bias"),
)
_CAPTURE = Seam(module=_RUNNER, name="ModelRunner.init_cuda_graphs", parameters=("self",))

LINEAR_SEAMS = (
    _HOOK_SEAM,
    _APPLY,
    Seam(module=_UNQUANTIZED, name="get_bf16_gemm_backend", parameters=()),
    Seam(module=_UNQUANTIZED, name="is_batch_invariant_mode_enabled", parameters=()),
)
REPORT_SEAMS = (_HOOK_SEAM, _CAPTURE)

_STOCK_BACKENDS = ("auto", "torch")
"""Values of ``--bf16-gemm-backend`` whose products SGLang leaves to torch; on Blackwell, it changes
``auto`` to another one at start-up."""


def activate() -> None:
    """Extends SGLang as its modules are imported; does nothing under ``NVGEMM_AOT=off``."""
    SGLANG.guard(_activate, "SGLang")


def _activate() -> None:
    if not SGLANG.may_be_extended("every Linear stays"):
        return
    SGLANG.extend(_UNQUANTIZED, serve_linears, LINEAR_SEAMS, "every Linear")
    SGLANG.extend(_RUNNER, report_captures, REPORT_SEAMS, "the report")


def serve_linears(unquantized: ModuleType) -> None:
    """Makes unquantised Linears compute by tables where SGLang would call torch.

    Args:
        unquantized: SGLang's module ``unquant``.
    """

    def apply(
        stock: Callable[..., torch.Tensor],
        self: Any,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if (
            unquantized._is_cuda
            and unquantized.get_bf16_gemm_backend().value in _STOCK_BACKENDS
            and not unquantized.is_batch_invariant_mode_enabled()
        ):
            return compute_linear(SGLANG, x, layer.weight, bias)
        return stock(self, layer, x, bias)

    _hook(_APPLY, apply)


def report_captures(_: ModuleType) -> None:
    """Makes each model runner log what is served, after it captured its graphs."""

    def init_cuda_graphs(stock: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
        from .. import preload
        from .start_up import accompany

        def sizes() -> Sequence[int]:
            graphs = getattr(self, "decode_cuda_graph_runner", None)
            return getattr(graphs, "capture_bs", ())

        return accompany(
            SGLANG,
            lambda: stock(self, *args, **options),
            load=preload,
            model=lambda: self.model,
            sizes=sizes,
        )

    _hook(_CAPTURE, init_cuda_graphs)


def _hook(seam: Seam, function: Callable[..., Any]) -> None:
    """Registers a function that gets SGLang's own as its first argument, and applies it."""
    hooks = sys.modules[_HOOKS]
    source = hooks.HookSource(plugin_name="nvgemm_aot", dist_name="nvgemm-aot")
    hooks.HookRegistry.register(
        f"{seam.module}.{seam.name}", function, hooks.HookType.AROUND, source=source
    )
    hooks.HookRegistry.apply_hooks()
