"""Adds ``nvgemm`` to transformers' experts implementations (transformers 5).

One line, before a model is made: ``nvgemm_runtime.moe.transformers.register()``. Then
``from_pretrained(..., experts_implementation="nvgemm")``, or
``model.set_experts_implementation("nvgemm")``, chooses it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from .block import experts

NAME = "nvgemm"
"""What the implementation is called in transformers."""


def register() -> None:
    """Add the implementation under `NAME`; a second call changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute an experts module of transformers.

    Args:
        module: The module, prepared by transformers' ``use_experts_implementation``.
        hidden_states: Tokens [tokens, dim].
        top_k_index: Experts of each token [tokens, k]; one past the last is no expert here.
        top_k_weights: Their routing weights [tokens, k].

    Returns:
        The experts' results, weighted and added: [tokens, dim].

    Raises:
        ValueError: If the module's gate is not one that `nvgemm_runtime.moe.experts` computes.
    """
    activation, constants = _gate(module)
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    places = torch.arange(module.num_experts, device=chosen.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(chosen, places, right=True)
    w_up, w_down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        w_up, w_down = w_up.mT, w_down.mT
    return experts(
        hidden_states,
        w_up,
        w_down,
        offsets,
        activation=activation,
        weights="halves" if module.is_concatenated else "interleaved",
        up_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        indices=order // top_k_index.shape[-1],
        routing_weights=top_k_weights.reshape(-1).index_select(0, order),
        combine=True,
        **constants,
    )


def _gate(module: Any) -> tuple[str, dict[str, float]]:
    """Name and constants of a module's activation."""
    name = type(module).__name__
    if not module.has_gate or module.has_post_expert_norm:
        raise ValueError(
            f"{name}: has no gate, or a norm behind each expert; use another experts "
            "implementation, such as grouped_mm"
        )
    if type(module)._apply_gate is not _default_apply_gate:
        if name == "GptOssExperts":
            return "swiglu_oai", {"alpha": float(module.alpha), "limit": float(module.limit)}
        raise ValueError(
            f"{name}: joins gates and ups in its own way; use another experts implementation, "
            "such as grouped_mm"
        )
    if isinstance(module.act_fn, (SiLUActivation, torch.nn.SiLU)):
        return "swiglu", {}
    if isinstance(module.act_fn, GELUTanh):
        return "geglu", {}
    raise ValueError(
        f"{name}: its activation is {type(module.act_fn).__name__}, must be silu or "
        "gelu_pytorch_tanh; use another experts implementation, such as grouped_mm"
    )
