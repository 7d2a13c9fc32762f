"""Small models to compile. manifest.yaml declares their GEMMs at every batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

SMALLER = 16
"""Divisor for weight extents on a CPU; tokens and heads stay."""

BATCHES = (1, 2, 8, 24, 96, 384, 512)
"""Batch sizes whose GEMMs manifest.yaml declares."""

HEADS = 8
"""Heads in `bmm_attention`, which multiplies this many matrices per sequence."""

Scale = Callable[[int], int]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model to compile.

    Attributes:
        make: Makes the module; takes a function that scales an extent.
        inputs: Shapes of its inputs, by the same function and the batch size.
        training: True if a call computes gradients too.
    """

    make: Callable[[Scale], torch.nn.Module]
    inputs: Callable[[Scale, int], list[tuple[int, ...]]]
    training: bool = False


def build(
    name: str, device: str, *, batch: int, exact: bool = False
) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Returns a model and its inputs in bf16, equal in every process."""

    def scale(extent: int) -> int:
        return max(8, extent // SMALLER) if device == "cpu" else extent

    torch.manual_seed(0)
    model = MODELS[name]
    with torch.device(device):
        module = model.make(scale).to(torch.bfloat16)
        inputs = [torch.randn(shape).to(torch.bfloat16) for shape in model.inputs(scale, batch)]
    if exact:
        return module.float(), [one.float() for one in inputs]
    return module, inputs


def _linear(inputs: int, outputs: int, bias: bool = False) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs, bias=bias)


def mlp_gelu(s: Scale) -> torch.nn.Module:
    """MLP with biases: a bias and gelu epilogue, then a bias epilogue."""
    first, second = _linear(s(1024), s(4096), bias=True), _linear(s(4096), s(1024), bias=True)
    return torch.nn.Sequential(first, torch.nn.GELU(approximate="tanh"), second)


class GatedMlp(torch.nn.Module):
    """MLP whose two products are multiplied, one after silu."""

    def __init__(self, s: Scale) -> None:
        super().__init__()
        self.gate = _linear(s(2048), s(5632))
        self.up = _linear(s(2048), s(5632))
        self.down = _linear(s(5632), s(2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Attention(torch.nn.Module):
    """Norm, projections, torch's own attention, projection and residual add."""

    def __init__(self, s: Scale) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(s(2048))
        self.qkv = _linear(s(2048), 3 * s(2048))
        self.out = _linear(s(2048), s(2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 16, -1))  # 128 values per head, 8 on a CPU
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Head(torch.nn.Module):
    """Logits and their softmax in fp32."""

    def __init__(self, s: Scale) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(s(2048))
        self.head = _linear(s(2048), s(32000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.norm(x)).float(), dim=-1)


class BmmAttention(torch.nn.Module):
    """Attention written as two batched GEMMs around a softmax."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(q, k.mT).float() * q.shape[-1] ** -0.5
        return torch.bmm(torch.softmax(scores, dim=-1).to(q.dtype), v)


class ResidualBlock(torch.nn.Module):
    """Norm, GEMM, relu, GEMM, residual add."""

    def __init__(self, s: Scale) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(s(1024))
        self.rise = _linear(s(1024), s(2048))
        self.fall = _linear(s(2048), s(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(torch.relu(self.rise(self.norm(x))))


def mlp_training(s: Scale) -> torch.nn.Module:
    """MLP's forward and backward, with GEMMs in three layouts."""
    return torch.nn.Sequential(
        _linear(s(1024), s(2048)), torch.nn.SiLU(), _linear(s(2048), s(1024))
    )


def six_linears(s: Scale) -> torch.nn.Module:
    """Six dependent GEMMs with a tanh between."""
    extents = [2560, 5120, 7168, 5120, 2560, 13824, 2560]
    layers: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(extents):
        layers += [_linear(s(inputs), s(outputs)), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


class LlamaMlp(torch.nn.Module):
    """MLP of a Llama-3.1-8B layer; at few tokens its time is the weights' read time."""

    def __init__(self, s: Scale) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(s(4096))
        self.gate_up = _linear(s(4096), 2 * s(14336))
        self.down = _linear(s(14336), s(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class DecoderLayer(torch.nn.Module):
    """Decoder layer as shipped manifests declare it: attention within one sequence, and MLP.

    With tensor parallelism this is one rank's part, without the sums over ranks.
    """

    def __init__(
        self, s: Scale, *, hidden: int, heads: int, kv_heads: int, mlp: int, head_norms: bool
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        width = s(128)  # head width
        self.before, self.between = torch.nn.RMSNorm(s(hidden)), torch.nn.RMSNorm(s(hidden))
        self.qkv = _linear(s(hidden), (heads + 2 * kv_heads) * width)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2 * head_norms))
        self.out = _linear(heads * width, s(hidden))
        self.gate_up = _linear(s(hidden), 2 * s(mlp))
        self.down = _linear(s(mlp), s(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = len(x)
        qkv = self.qkv(self.before(x)).view(tokens, self.heads + 2 * self.kv_heads, -1)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.norms:
            q, k = (norm(one) for norm, one in zip(self.norms, (q, k), strict=True))
        group = self.heads // self.kv_heads
        k, v = (one.repeat_interleave(group, dim=1) for one in (k, v))
        parts = [one.transpose(0, 1)[None] for one in (q, k, v)]
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed[0].transpose(0, 1).reshape(tokens, -1))
        gate, up = self.gate_up(self.between(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def _rows(width: int, tokens: int = 1) -> Callable[[Scale, int], list[tuple[int, ...]]]:
    """Flattens sequences and tokens into rows."""
    return lambda s, batch: [(batch * tokens, s(width))]


MODELS = {
    "mlp_gelu": Model(make=mlp_gelu, inputs=_rows(1024)),
    "gated_mlp": Model(make=GatedMlp, inputs=_rows(2048, tokens=16)),
    "decode": Model(make=GatedMlp, inputs=_rows(2048)),
    "attention": Model(make=Attention, inputs=lambda s, batch: [(batch, 16, s(2048))]),
    "lm_head": Model(make=Head, inputs=_rows(2048)),
    "bmm_attention": Model(
        make=lambda _: BmmAttention(), inputs=lambda s, batch: [(HEADS * batch, s(128), s(128))] * 3
    ),
    "residual_stack": Model(
        make=lambda s: torch.nn.Sequential(*(ResidualBlock(s) for _ in range(6))),
        inputs=lambda s, batch: [(batch, 16, s(1024))],
    ),
    "mlp_training": Model(make=mlp_training, inputs=_rows(1024, tokens=16), training=True),
    "six_linears": Model(make=six_linears, inputs=_rows(2560)),
    "llama_mlp": Model(make=LlamaMlp, inputs=_rows(4096)),
    "llama_8b_layer": Model(
        make=lambda s: DecoderLayer(
            s, hidden=4096, heads=32, kv_heads=8, mlp=14336, head_norms=False
        ),
        inputs=_rows(4096),
    ),
    "llama_70b_rank": Model(  # one rank of eight
        make=lambda s: DecoderLayer(
            s, hidden=8192, heads=8, kv_heads=1, mlp=3584, head_norms=False
        ),
        inputs=_rows(8192),
    ),
    "qwen3_8b_layer": Model(
        make=lambda s: DecoderLayer(
            s, hidden=4096, heads=32, kv_heads=8, mlp=12288, head_norms=True
        ),
        inputs=_rows(4096),
    ),
}
"""Models by name. Layers have the sizes of manifests/llama-3.1-8b.yaml, llama-3.3-70b.yaml (tp 8)
and qwen3-8b.yaml, which declare no batch of 24, 96 or 384."""
