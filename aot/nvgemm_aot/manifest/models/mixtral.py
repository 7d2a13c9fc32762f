"""Mixtral."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from .decoder import GroupedQueryConfig, Size, SparseConfig
from .gemm import Projection


class MixtralConfig(GroupedQueryConfig, SparseConfig):
    """Mixtral config.json."""

    intermediate_size: Size
    experts: Size = Field(validation_alias="num_local_experts")

    def projections(self) -> Iterator[Projection]:
        """Yields sparse layers and the head."""
        experts = self.routed_experts(intermediate=self.intermediate_size)
        return self.equal_layers(self.attention(), [self.router()], experts)
