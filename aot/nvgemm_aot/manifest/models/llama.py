"""Llama 2, 3.x and other models with ``model_type: llama``."""

from __future__ import annotations

from collections.abc import Iterator

from .decoder import GroupedQueryConfig, Size
from .gemm import Projection


class LlamaConfig(GroupedQueryConfig):
    """Llama config.json."""

    intermediate_size: Size
    attention_bias: bool = False
    mlp_bias: bool = False

    def projections(self) -> Iterator[Projection]:
        """Yields dense layers and the head."""
        mlp = self.gated_mlp(self.intermediate_size, biased=self.mlp_bias)
        return self.equal_layers(self.attention(biased=self.attention_bias), mlp)
