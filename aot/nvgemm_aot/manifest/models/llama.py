"""Llama 2, 3.x and what shares its architecture under ``model_type: llama``."""

from __future__ import annotations

from collections.abc import Iterator

from .decoder import GroupedQueryConfig, Size, gated_mlp
from .gemm import Projection, repeat


class LlamaConfig(GroupedQueryConfig):
    """A Llama's config.json."""

    intermediate_size: Size
    attention_bias: bool = False
    mlp_bias: bool = False

    def projections(self) -> Iterator[Projection]:
        """Dense layers and the head."""
        layers = self.num_hidden_layers
        yield from repeat(layers, self.attention(biased=self.attention_bias))
        mlp = gated_mlp(
            "mlp",
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            biased=self.mlp_bias,
        )
        yield from repeat(layers, mlp)
        yield self.lm_head()
