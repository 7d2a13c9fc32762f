"""Overrides that compute torchtitan's experts by `nvgemm_runtime.moe`.

In torchtitan 0.3, pass ``--override.imports`` a name in this module with its full path.
`nvgemm_routed_experts` replaces everything from tokens to tokens, for gpt-oss too. If another
override has replaced the routed experts, `nvgemm_experts` and `nvgemm_gpt_oss_experts` replace only
the experts of sorted rows. Parameters keep their names, shapes and shards, so checkpoints stay
interchangeable.
"""

# mypy: disable-error-code="misc,untyped-decorator"
# mypy does not read torchtitan, so its classes and decorators are of type Any.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from ..block import experts, routed_experts


class _ByNvgemm:
    """Forward call for both kinds of experts, first among their bases."""

    def forward(
        self,
        x_RD: torch.Tensor,  # noqa: N803
        num_tokens_per_expert_E: torch.Tensor,  # noqa: N803
        **routing: torch.Tensor,
    ) -> torch.Tensor:
        """Computes rows [rows, dim] from each expert's row count, in bf16 as torchtitan does.

        With ``chosen`` and ``routing_weights``, computes tokens [tokens, dim] by `routed_experts`,
        which counts rows itself.

        Raises:
            NotImplementedError: If gpt-oss weights are sharded along a mesh dimension ``tp``.
        """
        narrow = x_RD.bfloat16()
        if routing:
            out = routed_experts(narrow, **self._operands(), **routing)
        else:
            out = experts(narrow, **self._operands(), counts=num_tokens_per_expert_E)
        return out.type_as(x_RD)

    def _operands(self) -> dict[str, Any]:
        """Returns the arguments of `experts` without rows and routing."""
        raise NotImplementedError


class NvgemmExperts(_ByNvgemm, GroupedExperts):
    """Torchtitan's experts: SwiGLU with separate gate and up weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Same options as torchtitan's experts."""

    def _operands(self) -> dict[str, Any]:
        w_gate, w_down, w_up = (
            _local(parameter).bfloat16() for parameter in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        return {"w_up": (w_gate, w_up), "w_down": w_down}


class NvgemmGptOssExperts(_ByNvgemm, GptOssGroupedExperts):
    """Torchtitan's gpt-oss experts, with biases and interleaved gates and ups."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """Same options as torchtitan's experts."""

    def _operands(self) -> dict[str, Any]:
        names = getattr(getattr(self.mlp1_weight_EGD, "device_mesh", None), "mesh_dim_names", None)
        if "tp" in (names or ()):
            raise NotImplementedError(
                "nvgemm-aot's gpt-oss experts do not divide biases among tensor-parallel ranks; "
                "use torchtitan's own experts, or expert parallelism"
            )
        w_up, up_bias, w_down, down_bias = (
            _local(parameter).bfloat16()
            for parameter in (
                self.mlp1_weight_EGD,
                self.mlp1_bias_EG,
                self.mlp2_weight_EDF,
                self.mlp2_bias_ED,
            )
        )
        return {
            "w_up": w_up,
            "w_down": w_down,
            "activation": "swiglu_oai",
            "weights": "interleaved",
            "up_bias": up_bias,
            "down_bias": down_bias,
            "limit": self.swiglu_limit,
        }


class NvgemmRoutedExperts(RoutedExperts):
    """Torchtitan's experts from tokens to tokens.

    Sorts and adds bf16 tokens that stay on their rank. Otherwise torchtitan's dispatcher does both,
    around this package's experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """Same options as torchtitan's routed experts."""

    def forward(
        self,
        x_BLD: torch.Tensor,  # noqa: N803
        topk_scores_BLK: torch.Tensor,  # noqa: N803
        topk_expert_ids_BLK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Computes tokens [batch, length, dim]: each through its k experts, weighted and added."""
        stays = type(self.token_dispatcher) is LocalTokenDispatcher
        if not stays or x_BLD.dtype is not torch.bfloat16:
            return super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
        with maybe_set_sparse_mesh():
            # Call the module, because its hooks may gather its weights.
            out: torch.Tensor = self.inner_experts(
                x_BLD.flatten(0, 1),
                num_local_tokens_per_expert_E,
                chosen=topk_expert_ids_BLK.flatten(0, 1),
                routing_weights=topk_scores_BLK.flatten(0, 1),
            )
        return out.view(x_BLD.shape)


def _local(parameter: Any) -> torch.Tensor:
    """Returns this rank's part of a parameter."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


@override(target=GroupedExperts.Config, description="Experts by nvgemm-aot.", exact=True)
def nvgemm_experts(config: Any) -> Any:
    """Replaces torchtitan's experts, but not their subclasses."""
    return derive(config, NvgemmExperts.Config)


@override(target=GptOssGroupedExperts.Config, description="Experts by nvgemm-aot.", exact=True)
def nvgemm_gpt_oss_experts(config: Any) -> Any:
    """Replaces torchtitan's gpt-oss experts."""
    return derive(config, NvgemmGptOssExperts.Config)


@override(target=RoutedExperts.Config, description="Routed experts by nvgemm-aot.", exact=True)
def nvgemm_routed_experts(config: Any) -> Any:
    """Replaces torchtitan's routed experts and their experts, if it knows the experts' kind."""
    kinds: dict[Any, Any] = {
        GroupedExperts.Config: NvgemmExperts,
        GptOssGroupedExperts.Config: NvgemmGptOssExperts,
    }
    kind = kinds.get(type(config.inner_experts))
    if kind is None:
        return config
    inner = derive(config.inner_experts, kind.Config)
    return derive(config, NvgemmRoutedExperts.Config, inner_experts=inner)
