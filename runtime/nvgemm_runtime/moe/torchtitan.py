"""Overrides by which torchtitan's experts are computed by `nvgemm_runtime.moe.experts`.

In torchtitan 0.3: ``--override.imports nvgemm_runtime.moe.torchtitan.nvgemm_experts``, or
``...nvgemm_gpt_oss_experts`` for gpt-oss. Parameters keep their names, shapes and shards, so
checkpoints stay interchangeable.
"""

# mypy: disable-error-code="misc,untyped-decorator"
# mypy does not read torchtitan, so its classes and decorators are of type Any.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from .block import experts


class NvgemmExperts(GroupedExperts):
    """torchtitan's experts: SwiGLU of separate weights for gate and up."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """As that of torchtitan's experts."""

    def forward(
        self,
        x_RD: torch.Tensor,  # noqa: N803
        num_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Compute rows [rows, dim], given each expert's number of them, in bf16 as torchtitan."""
        w_gate, w_down, w_up = (
            _local(one).bfloat16() for one in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        out = experts(x_RD.bfloat16(), (w_gate, w_up), w_down, counts=num_tokens_per_expert_E)
        return out.type_as(x_RD)


class NvgemmGptOssExperts(GptOssGroupedExperts):
    """torchtitan's experts of gpt-oss: biases, and gates and ups interleaved."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """As that of torchtitan's experts."""

    def forward(
        self,
        x_RD: torch.Tensor,  # noqa: N803
        num_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Compute rows [rows, dim], given each expert's number of them, in bf16 as torchtitan.

        Raises:
            NotImplementedError: If the weights are sharded along a mesh dimension ``tp``.
        """
        names = getattr(getattr(self.mlp1_weight_EGD, "device_mesh", None), "mesh_dim_names", None)
        if "tp" in (names or ()):
            raise NotImplementedError(
                "nvgemm_gpt_oss_experts: biases are not divided among tensor-parallel ranks; use "
                "torchtitan's own experts, or expert parallelism"
            )
        w_up, up_bias, w_down, down_bias = (
            _local(one).bfloat16()
            for one in (
                self.mlp1_weight_EGD,
                self.mlp1_bias_EG,
                self.mlp2_weight_EDF,
                self.mlp2_bias_ED,
            )
        )
        return experts(
            x_RD.bfloat16(),
            w_up,
            w_down,
            counts=num_tokens_per_expert_E,
            activation="swiglu_oai",
            weights="interleaved",
            up_bias=up_bias,
            down_bias=down_bias,
            limit=self.swiglu_limit,
        )


def _local(parameter: Any) -> torch.Tensor:
    """The part of a parameter that this rank has."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


@override(target=GroupedExperts.Config, description="Experts by nvgemm-aot.", exact=True)
def nvgemm_experts(config: Any) -> Any:
    """Replace torchtitan's experts; those of subclasses stay."""
    return derive(config, NvgemmExperts.Config)


@override(target=GptOssGroupedExperts.Config, description="Experts by nvgemm-aot.", exact=True)
def nvgemm_gpt_oss_experts(config: Any) -> Any:
    """Replace torchtitan's experts of gpt-oss."""
    return derive(config, NvgemmGptOssExperts.Config)
