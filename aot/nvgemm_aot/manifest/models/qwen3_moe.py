"""Qwen3 with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import AliasChoices, Field

from .decoder import GroupedQueryConfig, Size, SparseConfig
from .gemm import Projection, repeat


class Qwen3MoeConfig(GroupedQueryConfig, SparseConfig):
    """Qwen3-MoE config.json."""

    intermediate_size: Size
    moe_intermediate_size: Size
    # transformers 5 writes the second name.
    experts: Size = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[Annotated[int, Field(ge=0)]] | None = None
    attention_bias: bool = False

    def projections(self) -> Iterator[Projection]:
        """Yields dense and sparse layers, and the head."""
        layers = self.num_hidden_layers
        step = self.decoder_sparse_step
        listed = {layer for layer in self.mlp_only_layers or [] if layer < layers}
        sparse = layers // step - sum((layer + 1) % step == 0 for layer in listed)
        yield from repeat(layers, self.attention(biased=self.attention_bias))
        yield from repeat(layers - sparse, self.gated_mlp(self.intermediate_size))
        yield from repeat(sparse, [self.router()])
        yield from repeat(sparse, self.routed_experts(intermediate=self.moe_intermediate_size))
        yield self.lm_head()
