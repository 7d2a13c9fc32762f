"""Model that `cold_start` compiles, and its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

Call = tuple[torch.Tensor | None, torch.Tensor]
"""Hidden states of an optional prefill, and of a decode."""


class Decoder(torch.nn.Module):
    """Decoder layer for a prefill and a decode, with the decode's logits."""

    def __init__(
        self, *, heads: int, kv_heads: int, head: int, intermediate: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, head
        self.hidden = heads * head
        self.qkv = torch.nn.Linear(self.hidden, (heads + 2 * kv_heads) * head, bias=False)
        self.o = torch.nn.Linear(self.hidden, self.hidden, bias=False)
        self.gate_up = torch.nn.Linear(self.hidden, 2 * intermediate, bias=False)
        self.down = torch.nn.Linear(intermediate, self.hidden, bias=False)
        self.lm_head = torch.nn.Linear(self.hidden, vocabulary, bias=False)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm in fp32."""
        exact = x.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
        return (exact * scale).to(x.dtype)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """MLP with its residual."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Attends within one sequence, without mask; values are transposed, as in a cache."""
        tokens, (heads, kv_heads, head) = len(qkv), (self.heads, self.kv_heads, self.head)
        q, k, v = qkv.split((self.hidden, kv_heads * head, kv_heads * head), dim=-1)
        q = q.view(tokens, heads, head).transpose(0, 1)
        groups = heads // kv_heads
        k = k.view(tokens, kv_heads, head).transpose(0, 1).repeat_interleave(groups, 0)
        v = v.view(tokens, kv_heads, head).permute(1, 2, 0).repeat_interleave(groups, 0)
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)).float() * head**-0.5, -1)
        mixed = torch.bmm(weights.to(q.dtype), v.contiguous().transpose(1, 2))
        return mixed.transpose(0, 1).reshape(tokens, self.hidden)

    def prefilled(self, x: torch.Tensor) -> torch.Tensor:
        """Attends within the first sequence alone; the others would repeat its GEMMs."""
        qkv = self.qkv(self.norm(x))
        mixed = torch.cat([self.attend(qkv[0])[None], qkv[1:, :, : self.hidden]])
        return self.mlp(x + self.o(mixed))

    def forward(
        self, prefill: torch.Tensor | None, decode: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns the decode's logits, then the prefill's hidden states if there is a prefill."""
        decode = self.mlp(decode + self.qkv(self.norm(decode))[..., : self.hidden])
        logits = self.lm_head(self.norm(decode))
        return (logits,) if prefill is None else (logits, self.prefilled(prefill))


def build_model(device: str, batches: Sequence[int]) -> tuple[Decoder, list[Call]]:
    """Returns the model and its calls; on a CPU a small model of the same form.

    Args:
        device: Device by torch's name.
        batches: Sequences that decode, a call each; the first has 4 sequences of 512 tokens to
            prefill as well.
    """
    torch.manual_seed(0)
    with torch.device(device):
        if device == "cpu":
            tokens = 32
            model = Decoder(heads=4, kv_heads=2, head=16, intermediate=128, vocabulary=512)
        else:
            tokens = 512
            model = Decoder(heads=32, kv_heads=8, head=128, intermediate=14336, vocabulary=16384)
        prefill = torch.randn(4, tokens, model.hidden).bfloat16()
        calls: list[Call] = [
            (None if number else prefill, torch.randn(batch, 1, model.hidden).bfloat16())
            for number, batch in enumerate(batches)
        ]
    return model.to(torch.bfloat16).eval(), calls
