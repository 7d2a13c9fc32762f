"""Dense Qwen3."""

from __future__ import annotations

from collections.abc import Iterator

from .decoder import GroupedQueryConfig, Size
from .gemm import Projection


class Qwen3Config(GroupedQueryConfig):
    """Dense Qwen3 config.json."""

    head_dim: Size = 128
    intermediate_size: Size
    attention_bias: bool = False

    def projections(self) -> Iterator[Projection]:
        """Yields dense layers and the head."""
        attention = self.attention(biased=self.attention_bias)
        return self.equal_layers(attention, self.gated_mlp(self.intermediate_size))
