"""transformers' own models with their experts computed by this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from installed_bundles import use
from nvgemm_runtime.moe import products

transformers = pytest.importorskip("transformers")
moe_transformers = pytest.importorskip("nvgemm_runtime.moe.transformers")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
MODELS = {
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, num_experts=4, moe_intermediate_size=24
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**COMMON, num_local_experts=4),
}


def step(model: Any, implementation: str) -> list[torch.Tensor]:
    """Loss and all gradients of one training step."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    torch.manual_seed(1)
    tokens = torch.randint(64, (2, 7))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_that_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    monkeypatch.setattr(products, "_found", {})
    monkeypatch.setattr(products, "_has_warned", True)
    calls: list[int] = []
    computed = moe_transformers.experts

    def counted(*tensors: torch.Tensor, **named: Any) -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = computed(*tensors, **named)
        return out

    monkeypatch.setattr(moe_transformers, "experts", counted)
    moe_transformers.register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).float()
    for one in model.parameters():
        torch.nn.init.normal_(one, std=0.2)
    expected = step(model, "eager")
    assert not calls
    found = step(model, moe_transformers.NAME)
    assert len(calls) == 2
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_an_unknown_activation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    moe_transformers.register()
    config = transformers.MixtralConfig(**COMMON, num_local_experts=4, hidden_act="relu")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="must be silu or gelu_pytorch_tanh"):
        step(model, moe_transformers.NAME)
