"""The small models of additive.py. additive.yaml declares their GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SMALLER = 16
"""On a CPU every extent but the number of sequences and heads is this much smaller."""


Scale = Callable[[int], int]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to compile.

    Attributes:
        make: Makes the module; takes a function that scales an extent.
        inputs: Shapes of its inputs, by the same function.
        training: Whether a call computes gradients too.
    """

    make: Callable[[Scale], torch.nn.Module]
    inputs: Callable[[Scale], list[tuple[int, ...]]]
    training: bool = False


def build(
    name: str, device: str, *, exact: bool = False
) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A model and its inputs, in bf16; the same weights and inputs each time.

    Args:
        name: Of `MODELS`.
        device: ``cuda`` or ``cpu``.
        exact: Give the same values in fp32.
    """
    import torch

    def scale(extent: int) -> int:
        return extent if device == "cuda" else max(8, extent // SMALLER)

    torch.manual_seed(0)
    model = MODELS[name]
    with torch.device(device):
        module = model.make(scale).to(torch.bfloat16)
        inputs = [torch.randn(shape).to(torch.bfloat16) for shape in model.inputs(scale)]
    if exact:
        return module.float(), [one.float() for one in inputs]
    return module, inputs


def _linear(inputs: int, outputs: int, bias: bool = False) -> torch.nn.Module:
    import torch

    return torch.nn.Linear(inputs, outputs, bias=bias)


def mlp_gelu(s: Scale) -> torch.nn.Module:
    """With biases: the epilogues are a bias and a gelu, and a bias."""
    import torch

    first, second = _linear(s(1024), s(4096), bias=True), _linear(s(4096), s(1024), bias=True)
    return torch.nn.Sequential(first, torch.nn.GELU(approximate="tanh"), second)


def gated_mlp(s: Scale) -> torch.nn.Module:
    """The product of two GEMMs, one under a silu."""
    import torch
    from torch.nn import functional

    class GatedMlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = _linear(s(2048), s(5632))
            self.up = _linear(s(2048), s(5632))
            self.down = _linear(s(5632), s(2048))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(functional.silu(self.gate(x)) * self.up(x))

    return GatedMlp()


def attention(s: Scale) -> torch.nn.Module:
    """Norm, projections, torch's own attention, projection and residual add."""
    import torch
    from torch.nn import functional

    heads = 16

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(s(2048))
            self.qkv = _linear(s(2048), 3 * s(2048))
            self.out = _linear(s(2048), s(2048))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            qkv = self.qkv(self.norm(x)).unflatten(-1, (3, heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(mixed.transpose(1, 2).flatten(2))

    return Attention()


def lm_head(s: Scale) -> torch.nn.Module:
    """Logits and their softmax in fp32."""
    import torch

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(s(2048))
            self.head = _linear(s(2048), s(32000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.head(self.norm(x)).float(), dim=-1)

    return Head()


def bmm_attention(s: Scale) -> torch.nn.Module:
    """Attention spelled out: two batched GEMMs around a softmax."""
    import torch

    class BmmAttention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scores = torch.bmm(q, k.mT).float() * q.shape[-1] ** -0.5
            return torch.bmm(torch.softmax(scores, dim=-1).to(q.dtype), v)

    return BmmAttention()


def residual_stack(s: Scale) -> torch.nn.Module:
    """Six blocks: norm, GEMM, relu, GEMM, residual add."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(s(1024))
            self.rise = _linear(s(1024), s(2048))
            self.fall = _linear(s(2048), s(1024))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.fall(torch.relu(self.rise(self.norm(x))))

    return torch.nn.Sequential(*(Block() for _ in range(6)))


def mlp_training(s: Scale) -> torch.nn.Module:
    """Forward and backward: GEMMs in three layouts."""
    import torch

    return torch.nn.Sequential(
        _linear(s(1024), s(2048)), torch.nn.SiLU(), _linear(s(2048), s(1024))
    )


MODELS = {
    "mlp_gelu": Model(make=mlp_gelu, inputs=lambda s: [(s(1024), s(1024))]),
    "gated_mlp": Model(make=gated_mlp, inputs=lambda s: [(s(512), s(2048))]),
    "decode": Model(make=gated_mlp, inputs=lambda s: [(s(16), s(2048))]),
    "attention": Model(make=attention, inputs=lambda s: [(4, s(512), s(2048))]),
    "lm_head": Model(make=lm_head, inputs=lambda s: [(s(128), s(2048))]),
    "bmm_attention": Model(make=bmm_attention, inputs=lambda s: [(32, s(512), s(128))] * 3),
    "residual_stack": Model(make=residual_stack, inputs=lambda s: [(8, s(64), s(1024))]),
    "mlp_training": Model(make=mlp_training, inputs=lambda s: [(s(512), s(1024))], training=True),
}
"""By name."""
