"""Small packages that look like serving engines to plug-ins: same modules, names and signatures."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

VLLM = {
    "vllm/__init__.py": "__version__ = '@version'\n",
    "vllm/envs.py": "VLLM_BATCH_INVARIANT = False\nVLLM_DISABLED_KERNELS = []\n",
    "vllm/config.py": """
        current = None

        def get_current_vllm_config_or_none():
            return current
        """,
    "vllm/_custom_ops.py": """
        import torch

        calls = []

        def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias=None):
            calls.append(a.shape[0])
            scaled_b = b.float() * scale_b.reshape(1, -1)
            result = (a.float() * scale_a) @ scaled_b
            return (result if bias is None else result + bias.float()).to(out_dtype)
        """,
    "vllm/model_executor/layers/utils.py": """
        import torch

        def default_unquantized_gemm(layer, x, weight, bias=None):
            return torch.nn.functional.linear(x, weight, bias)

        def cpu_unquantized_gemm(layer, x, weight, bias=None):
            return torch.nn.functional.linear(x, weight, bias)

        def dispatch_unquantized_gemm(@dispatch_parameters):
            return default_unquantized_gemm
        """,
    "vllm/model_executor/layers/linear.py": """
        import torch
        from vllm.model_executor.layers.utils import dispatch_unquantized_gemm

        class UnquantizedLinearMethod:
            def apply(self, layer, x, bias=None):
                return dispatch_unquantized_gemm()(layer, x, layer.weight, bias)

        class Linear(torch.nn.Module):
            def __init__(self, n, k, bias=False):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(n, k), requires_grad=False)
                self.bias = None
                if bias:
                    self.bias = torch.nn.Parameter(torch.randn(n), requires_grad=False)
                self.quant_method = UnquantizedLinearMethod()

            def forward(self, x):
                return self.quant_method.apply(self, x, self.bias)
        """,
    "vllm/model_executor/layers/vocab_parallel_embedding.py": """
        import torch
        import vllm.envs as envs
        from vllm.model_executor.layers.utils import dispatch_unquantized_gemm

        def linear_batch_invariant(x, weight, bias):
            return torch.nn.functional.linear(x, weight, bias)

        class UnquantizedEmbeddingMethod:
            def apply(self, layer, x, bias=None):
                if envs.VLLM_BATCH_INVARIANT:
                    return linear_batch_invariant(x, layer.weight, bias)
                return dispatch_unquantized_gemm()(layer, x, layer.weight, bias)

        class VocabParallelEmbedding(torch.nn.Module):
            def __init__(self, n, k):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(n, k), requires_grad=False)
                self.quant_method = UnquantizedEmbeddingMethod()

        class ParallelLMHead(VocabParallelEmbedding):
            pass
        """,
    "vllm/model_executor/kernels/linear/__init__.py": """
        import enum
        import vllm.envs as envs
        from vllm import _custom_ops as ops
        from vllm.config import get_current_vllm_config_or_none

        class PlatformEnum(enum.Enum):
            CUDA = enum.auto()

        class FlashInferFP8ScaledMMLinearKernel:
            @classmethod
            def can_implement(cls, c):
                return False, "requires compute capability 100 and above."

        class CutlassFP8ScaledMMLinearKernel:
            def __init__(self, c):
                assert self.can_implement(c)[0]

            @classmethod
            def can_implement(cls, c):
                return True, None

            def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
                result = ops.cutlass_scaled_mm(A, B, As, Bs, out_dtype, bias)
                return result.view(*output_shape[:-1], B.shape[1])

        _POSSIBLE_FP8_KERNELS = {
            PlatformEnum.CUDA: [FlashInferFP8ScaledMMLinearKernel, CutlassFP8ScaledMMLinearKernel],
        }

        def choose(c):
            for kernel in _POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA]:
                is_disabled = kernel.__name__ in envs.VLLM_DISABLED_KERNELS
                if not is_disabled and kernel.can_implement(c)[0]:
                    return kernel(c)
        """,
    "vllm/v1/worker/gpu_worker.py": """
        class Worker:
            def __init__(self, model_runner, vllm_config):
                self.model_runner = model_runner
                self.vllm_config = vllm_config

            def compile_or_warm_up_model(self):
                return self.model_runner.capture()
        """,
}
"""Files of vLLM. Names that begin with @ stand for what releases differ in."""

SGLANG = {
    "sglang/__init__.py": "__version__ = '@version'\n",
    "sglang/srt/plugins/hook_registry.py": """
        import enum
        import functools
        import pkgutil
        from typing import NamedTuple

        class HookSource(NamedTuple):
            plugin_name: str
            dist_name: str | None

        class HookType(enum.Enum):
            AROUND = "around"

        class HookRegistry:
            _hooks = {}

            @classmethod
            def register(cls, target, hook, hook_type=HookType.AROUND, *, source=None):
                cls._hooks[target] = hook

            @classmethod
            def apply_hooks(cls):
                for target, hook in cls._hooks.items():
                    owner, name = target.rsplit(".", 1)
                    owner = pkgutil.resolve_name(owner)
                    stock = getattr(owner, name)
                    if not hasattr(stock, "__wrapped__"):
                        setattr(owner, name, cls._wrap(stock, hook))

            @staticmethod
            def _wrap(stock, hook):
                @functools.wraps(stock)
                def wrapper(*args, **kwargs):
                    return hook(stock, *args, **kwargs)
                return wrapper
        """,
    "sglang/srt/batch_invariant_ops.py": """
        on = False

        def is_batch_invariant_mode_enabled():
            return on
        """,
    "sglang/srt/layers/quantization/unquant.py": """
        import enum
        import torch
        import torch.nn.functional as F
        import sglang.srt.plugins.hook_registry
        from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

        _is_cuda = True

        class Bf16GemmBackend(enum.Enum):
            AUTO = "auto"
            CUTEDSL = "cutedsl"
            TORCH = "torch"

        backend = Bf16GemmBackend.AUTO

        def get_bf16_gemm_backend():
            return backend

        class UnquantizedLinearMethod:
            def apply(self, layer, x, bias=None):
                return F.linear(x, layer.weight, bias)

        class Linear(torch.nn.Module):
            def __init__(self, n, k):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(n, k), requires_grad=False)
                self.bias = None
                self.quant_method = UnquantizedLinearMethod()

            def forward(self, x):
                return self.quant_method.apply(self, x, self.bias)
        """,
    "sglang/srt/model_executor/model_runner.py": """
        import types
        import sglang.srt.plugins.hook_registry

        class ModelRunner:
            def __init__(self, model, sizes):
                self.model = model
                self.sizes = sizes

            def init_cuda_graphs(self, capture_decode_cuda_graph=True):
                self.decode_cuda_graph_runner = types.SimpleNamespace(capture_bs=self.sizes)
                return self.model
        """,
}


class FakeEngine:
    """An engine's package on this process's path, while a test runs."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        root: Path,
        files: Mapping[str, str],
        **values: str,
    ) -> None:
        self.name = next(iter(files)).split("/")[0]
        for path, text in files.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            for folder in file.relative_to(root).parents:
                if folder != Path() and not (root / folder / "__init__.py").exists():
                    (root / folder / "__init__.py").touch()
            for name, value in values.items():
                text = text.replace(f"@{name}", value)
            file.write_text(textwrap.dedent(text))
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        monkeypatch.syspath_prepend(str(root))
        for name in [one for one in sys.modules if one.split(".")[0] == self.name]:
            monkeypatch.delitem(sys.modules, name)
        importlib.import_module(self.name)

    def __call__(self, module: str) -> ModuleType:
        """Imports one of its modules."""
        return importlib.import_module(f"{self.name}.{module}")

    def forget(self) -> None:
        """Unloads it, so that the next test gets a package of its own."""
        for name in [one for one in sys.modules if one.split(".")[0] == self.name]:
            del sys.modules[name]
