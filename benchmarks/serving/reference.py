"""The served model in fp32, layer by layer from the engine's own weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.serving.workload import Model

if TYPE_CHECKING:
    import torch

Weight = Callable[[str], "torch.Tensor"]
"""Returns a weight by its name in vLLM, such as ``layers.0.mlp.gate_up_proj.weight``."""


def log_probabilities(
    model: Model, layers: int, weight: Weight, sequences: Sequence[Sequence[int]], generated: int
) -> torch.Tensor:
    """Returns the log probability of each sequence's last tokens, [sequences, generated].

    Args:
        model: Sizes.
        layers: Decoder layers.
        weight: The engine's weights.
        sequences: Prompts with the tokens generated, all of a length.
        generated: Tokens of each that were generated.
    """
    import torch
    from torch.nn import functional

    torch.set_float32_matmul_precision("highest")  # engines may allow TF32
    with torch.no_grad():
        embedding = weight("embed_tokens.weight")
        tokens = torch.tensor(sequences, device=embedding.device)
        rotation = _rotation(model, tokens.shape[1], embedding.device)
        x = functional.embedding(tokens, embedding).float()
        for number in range(layers):
            x = _layer(model, lambda name, at=number: weight(f"layers.{at}.{name}"), x, rotation)
        last = _normalized(x, weight("norm.weight"), model.epsilon)[:, -generated - 1 : -1]
        logits = last @ weight("lm_head.weight").float()[: model.vocabulary].T
        chosen = tokens[:, -generated:, None]
        return torch.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1).cpu()


def _layer(
    model: Model, weight: Weight, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    import torch
    from torch.nn import functional

    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ weight(f"{name}.weight").float().T

    batch, length, _ = x.shape
    normal = _normalized(x, weight("input_layernorm.weight"), model.epsilon)
    qkv = linear("self_attn.qkv_proj", normal).view(batch, length, -1, model.head)
    q, k, v = qkv.split((model.heads, model.kv_heads, model.kv_heads), dim=2)
    if model.has_head_norms:
        q = _normalized(q, weight("self_attn.q_norm.weight"), model.epsilon)
        k = _normalized(k, weight("self_attn.k_norm.weight"), model.epsilon)
    q, k = _rotated(q, rotation), _rotated(k, rotation)
    groups = model.heads // model.kv_heads
    k, v = (one.repeat_interleave(groups, dim=2) for one in (k, v))
    mixed = functional.scaled_dot_product_attention(
        *(one.transpose(1, 2) for one in (q, k, v)), is_causal=True
    )
    x = x + linear("self_attn.o_proj", mixed.transpose(1, 2).reshape(batch, length, -1))
    normal = _normalized(x, weight("post_attention_layernorm.weight"), model.epsilon)
    gate, up = torch.chunk(linear("mlp.gate_up_proj", normal), 2, dim=-1)
    return x + linear("mlp.down_proj", functional.silu(gate) * up)


def _normalized(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    import torch

    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def _rotation(model: Model, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosine and sine, [length, 1, head / 2]."""
    import torch

    pairs = torch.arange(0, model.head, 2, device=device, dtype=torch.float32)
    places = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(places, model.theta ** (-pairs / model.head))[:, None]
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    import torch

    cosine, sine = rotation
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
