"""Adds ``nvgemm`` to transformers' experts implementations (transformers 5).

Call ``nvgemm_runtime.moe.integrations.transformers.register()`` before a model is created. Then
``from_pretrained(..., experts_implementation="nvgemm")`` or
``model.set_experts_implementation("nvgemm")`` selects it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..block import routed_experts

NAME = "nvgemm"
"""Name of the implementation in transformers."""


def register() -> None:
    """Registers the implementation under `NAME`. A second call changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Computes a transformers experts module.

    Args:
        module: Module prepared by transformers' ``use_experts_implementation``.
        hidden_states: Tokens [tokens, dim].
        top_k_index: Each token's experts [tokens, k]. An index past the last expert adds nothing.
        top_k_weights: Routing weights [tokens, k].

    Returns:
        The experts' results, weighted and added: [tokens, dim].

    Raises:
        ValueError: If `nvgemm_runtime.moe.experts` does not compute the module's gate.
    """
    gate = _gate_of(module)
    w_up, w_down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        w_up, w_down = w_up.mT, w_down.mT
    return routed_experts(
        hidden_states,
        w_up,
        w_down,
        top_k_index,
        top_k_weights,
        activation=gate.activation,
        weights=gate.weights,
        up_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        **{name: float(getattr(module, attribute)) for name, attribute in gate.constants.items()},
    )


@dataclass(frozen=True, kw_only=True)
class _Gate:
    """Gate of a module, as arguments for `experts`.

    Attributes:
        activation: Argument ``activation``; empty if the module's ``act_fn`` decides.
        weights: Argument ``weights``. The gate itself splits the columns; transformers'
            ``is_concatenated`` does not affect it.
        constants: Module attributes by the argument they are passed as.
    """

    activation: str = ""
    weights: str = "halves"
    constants: dict[str, str] = field(default_factory=dict)


_OAI = {"alpha": "alpha", "limit": "limit"}
_PLAIN = _Gate()
_GATES = {
    "integrations.moe._default_apply_gate": _PLAIN,
    "models.beam.modeling_beam.BeamExperts._apply_gate": _PLAIN,  # computed in fp32
    "models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": _Gate(
        activation="swiglu_oai", weights="interleaved", constants=_OAI
    ),
    "models.openai_privacy_filter.modeling_openai_privacy_filter"
    ".OpenAIPrivacyFilterExperts._apply_gate": _Gate(activation="swiglu_oai", constants=_OAI),
    "models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": _Gate(
        activation="swiglu_oai", constants={"alpha": "swiglu_alpha", "limit": "swiglu_limit"}
    ),
}
"""Gates by the transformers function that a module calls, from version 5.23."""


def _gate_of(module: Any) -> _Gate:
    """Returns the gate that a module applies, with its activation.

    Raises:
        ValueError: If `experts` does not compute it.
    """
    name = type(module).__name__
    advice = "use another experts implementation, such as grouped_mm"
    if not module.has_gate:
        raise ValueError(f"{name}: has no gate; {advice}")
    if module.has_post_expert_norm:
        raise ValueError(f"{name}: has a norm after each expert; {advice}")
    called = getattr(module._apply_gate, "__func__", module._apply_gate)
    path = f"{called.__module__}.{called.__qualname__}"
    gate = _GATES.get(path.removeprefix("transformers."))
    if gate is None:
        raise ValueError(
            f"{name}: combines gates and ups by {path}, which is unsupported; {advice}"
        )
    if gate.activation:
        return gate
    function = module.act_fn
    if function is functional.silu or isinstance(function, (SiLUActivation, torch.nn.SiLU)):
        return replace(gate, activation="swiglu")
    if isinstance(function, GELUTanh):
        return replace(gate, activation="geglu")
    function_name = getattr(function, "__name__", type(function).__name__)
    raise ValueError(
        f"{name}: its activation is {function_name}, must be silu or gelu_pytorch_tanh; {advice}"
    )
