"""gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from nvgemm_runtime.gemm.epilogues import Gate, WeightOrder, find_gated
from nvgemm_runtime.gemm.problem import Layout

from .decoder import GroupedQueryConfig, Size, SparseConfig
from .gemm import Projection


class GptOssConfig(GroupedQueryConfig, SparseConfig):
    """gpt-oss config.json."""

    head_dim: Size = 64
    intermediate_size: Size
    experts: Size = Field(validation_alias="num_local_experts")
    attention_bias: bool = True

    def projections(self) -> Iterator[Projection]:
        """Yields sparse layers and the head. Expert weights are [in features, out features]."""
        attention = self.attention(biased=self.attention_bias)
        experts = self.routed_experts(
            intermediate=self.intermediate_size,
            layout=Layout.TT,
            gated=find_gated(Gate.SWIGLU_OAI, WeightOrder.INTERLEAVED),
            biased=True,
        )
        return self.equal_layers(attention, [self.router(biased=True)], experts)
