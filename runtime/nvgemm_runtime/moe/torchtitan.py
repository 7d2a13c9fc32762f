"""Overrides by which `nvgemm_runtime.moe` computes torchtitan's experts.

In torchtitan 0.3: ``--override.imports nvgemm_runtime.moe.torchtitan.nvgemm_routed_experts`` for
all from tokens to tokens, of gpt-oss too; or, if something else has replaced the routed experts,
``...nvgemm_experts`` and ``...nvgemm_gpt_oss_experts`` for the experts of sorted rows alone.
Parameters keep their names, shapes and shards, so checkpoints stay interchangeable.
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

from .block import experts
from .routed import routed_experts


class _ByNvgemm:
    """The call of both kinds of experts, before whose own it stands among their bases."""

    def forward(
        self,
        x_RD: torch.Tensor,  # noqa: N803
        num_tokens_per_expert_E: torch.Tensor,  # noqa: N803
        **routing: torch.Tensor,
    ) -> torch.Tensor:
        """Compute rows [rows, dim], given each expert's number of them, in bf16 as torchtitan.

        With ``chosen`` and ``routing_weights``, tokens [tokens, dim], as `routed_experts` does,
        which counts rows itself.

        Raises:
            NotImplementedError: If weights of gpt-oss are sharded along a mesh dimension ``tp``.
        """
        narrow = x_RD.bfloat16()
        if routing:
            out = routed_experts(narrow, **self._operands(), **routing)
        else:
            out = experts(narrow, **self._operands(), counts=num_tokens_per_expert_E)
        return out.type_as(x_RD)

    def _operands(self) -> dict[str, Any]:
        """Arguments of `experts`, but for rows and routing."""
        raise NotImplementedError


class NvgemmExperts(_ByNvgemm, GroupedExperts):
    """torchtitan's experts: SwiGLU of separate weights for gate and up."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """As that of torchtitan's experts."""

    def _operands(self) -> dict[str, Any]:
        w_gate, w_down, w_up = (
            _local(one).bfloat16() for one in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        return {"w_up": (w_gate, w_up), "w_down": w_down}


class NvgemmGptOssExperts(_ByNvgemm, GptOssGroupedExperts):
    """torchtitan's experts of gpt-oss: biases, and gates and ups interleaved."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """As that of torchtitan's experts."""

    def _operands(self) -> dict[str, Any]:
        names = getattr(getattr(self.mlp1_weight_EGD, "device_mesh", None), "mesh_dim_names", None)
        if "tp" in (names or ()):
            raise NotImplementedError(
                "nvgemm-aot's experts of gpt-oss: biases are not divided among tensor-parallel "
                "ranks; use torchtitan's own experts, or expert parallelism"
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
    """torchtitan's experts from tokens to tokens.

    Tokens of bf16 that stay on their rank are sorted and added here; else torchtitan's dispatcher
    does that, around experts of this package.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """As that of torchtitan's."""

    def forward(
        self,
        x_BLD: torch.Tensor,  # noqa: N803
        topk_scores_BLK: torch.Tensor,  # noqa: N803
        topk_expert_ids_BLK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Compute tokens [batch, length, dim], each through its k experts, weighted and added."""
        stays = type(self.token_dispatcher) is LocalTokenDispatcher
        if not stays or x_BLD.dtype is not torch.bfloat16:
            return super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
        with maybe_set_sparse_mesh():
            # By a call of the module, whose hooks may gather its weights.
            out: torch.Tensor = self.inner_experts(
                x_BLD.flatten(0, 1),
                num_local_tokens_per_expert_E,
                chosen=topk_expert_ids_BLK.flatten(0, 1),
                routing_weights=topk_scores_BLK.flatten(0, 1),
            )
        return out.view(x_BLD.shape)


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


@override(target=RoutedExperts.Config, description="Routed experts by nvgemm-aot.", exact=True)
def nvgemm_routed_experts(config: Any) -> Any:
    """Replace torchtitan's routed experts with their experts; of other kinds of these, none."""
    kinds: dict[Any, Any] = {
        GroupedExperts.Config: NvgemmExperts,
        GptOssGroupedExperts.Config: NvgemmGptOssExperts,
    }
    kind = kinds.get(type(config.inner_experts))
    if kind is None:
        return config
    inner = derive(config.inner_experts, kind.Config)
    return derive(config, NvgemmRoutedExperts.Config, inner_experts=inner)
