"""DeepSeek-V3 and R1: latent attention, shared and routed experts."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from .decoder import Size, SparseConfig, gated_mlp
from .gemm import Columns, Fusible, ModelGemm, Projection, Rows, repeat


class DeepseekV3Config(SparseConfig):
    """A DeepSeek-V3's config.json."""

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
        """Dense layers first, then sparse ones, and the head; not the layers that predict ahead."""
        hidden, layers = self.hidden_size, self.num_hidden_layers
        dense = max(0, min(self.first_k_dense_replace, layers))
        sparse = layers - dense
        yield from repeat(layers, self._attention())
        mlp = gated_mlp("mlp", hidden=hidden, intermediate=self.intermediate_size)
        yield from repeat(dense, mlp)
        yield from repeat(sparse, [self.router(unserved="it is computed in fp32")])
        shared = self.n_shared_experts * self.moe_intermediate_size
        yield from repeat(sparse, gated_mlp("shared experts", hidden=hidden, intermediate=shared))
        yield from repeat(sparse, self.routed_experts(intermediate=self.moe_intermediate_size))
        yield self.lm_head()

    def _attention(self) -> Iterator[Projection]:
        heads = self.query_heads
        query = heads.count * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        latent = ModelGemm(
            role="attention kv_a_proj_with_mqa",
            n=self.kv_lora_rank + self.qk_rope_head_dim,
            k=self.hidden_size,
            biased=self.attention_bias,
        )
        if self.q_lora_rank is None:
            yield ModelGemm(
                role="attention q_proj",
                n=query,
                k=self.hidden_size,
                split=Columns(heads=heads),
            )
            yield latent
        else:
            query_latent = ModelGemm(
                role="attention q_a_proj",
                n=self.q_lora_rank,
                k=self.hidden_size,
                biased=self.attention_bias,
            )
            yield Fusible(role="attention qkv_a_proj", parts=(query_latent, latent))
            yield ModelGemm(
                role="attention q_b_proj",
                n=query,
                k=self.q_lora_rank,
                split=Columns(heads=heads),
            )
        yield ModelGemm(
            role="attention kv_b_proj",
            n=heads.count * (self.qk_nope_head_dim + self.v_head_dim),
            k=self.kv_lora_rank,
            split=Columns(heads=heads),
        )
        yield ModelGemm(
            role="attention o_proj",
            n=self.hidden_size,
            k=heads.count * self.v_head_dim,
            split=Rows(heads=heads),
            biased=self.attention_bias,
        )
