"""DeepSeek-V3 and R1: latent attention, shared and routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import Field

from .decoder import Size, SparseConfig
from .gemm import Fusible, ModelGemm, Projection, Split, repeat


class DeepseekV3Config(SparseConfig):
    """DeepSeek-V3 config.json."""

    intermediate_size: Size
    moe_intermediate_size: Size
    experts: Size = Field(validation_alias="n_routed_experts")
    n_shared_experts: Size
    first_k_dense_replace: int
    q_lora_rank: Size | None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    attention_bias: bool = False

    def projections(self) -> Iterator[Projection]:
        """Yields dense and sparse layers and the head, but no multi-token prediction layers."""
        layers = self.num_hidden_layers
        dense = max(0, min(self.first_k_dense_replace, layers))
        sparse = layers - dense
        shared = self.n_shared_experts * self.moe_intermediate_size
        yield from repeat(layers, self._attention())
        yield from repeat(dense, self.gated_mlp(self.intermediate_size))
        yield from repeat(sparse, [self.router(unserved="it is computed in fp32")])
        yield from repeat(sparse, self.gated_mlp(shared, "shared experts"))
        yield from repeat(sparse, self.routed_experts(intermediate=self.moe_intermediate_size))
        yield self.lm_head()

    def _attention(self) -> Iterator[Projection]:
        heads, hidden = self.query_heads, self.hidden_size
        columns = Split(extent="n", heads=heads)
        query = heads.count * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        into_latent = ModelGemm(
            role="attention kv_a_proj_with_mqa",
            n=self.kv_lora_rank + self.qk_rope_head_dim,
            k=hidden,
            biased=self.attention_bias,
        )
        if self.q_lora_rank is None:
            yield ModelGemm(role="attention q_proj", n=query, k=hidden, split=columns)
            yield into_latent
        else:
            into_query = replace(into_latent, role="attention q_a_proj", n=self.q_lora_rank)
            yield Fusible(role="attention qkv_a_proj", parts=(into_query, into_latent))
            rank = self.q_lora_rank
            yield ModelGemm(role="attention q_b_proj", n=query, k=rank, split=columns)
        yield ModelGemm(
            role="attention kv_b_proj",
            n=heads.count * (self.qk_nope_head_dim + self.v_head_dim),
            k=self.kv_lora_rank,
            split=columns,
        )
        yield ModelGemm(
            role="attention o_proj",
            n=hidden,
            k=heads.count * self.v_head_dim,
            split=Split(extent="k", heads=heads),
            biased=self.attention_bias,
        )
