"""Mixtral."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from .decoder import GroupedQueryConfig, Size, SparseConfig
from .gemm import Projection, repeat


class MixtralConfig(GroupedQueryConfig, SparseConfig):
    """A Mixtral's config.json."""

    intermediate_size: Size
    experts: Size = Field(validation_alias="num_local_experts")

    def projections(self) -> Iterator[Projection]:
        """Sparse layers and the head."""
        layers = self.num_hidden_layers
        yield from repeat(layers, self.attention())
        yield from repeat(layers, [self.router()])
        yield from repeat(layers, self.routed_experts(intermediate=self.intermediate_size))
        yield self.lm_head()
