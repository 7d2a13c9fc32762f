"""transformers' own models with their experts computed by this package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from installed_bundles import use
from nvgemm_runtime.moe import kernels

transformers = pytest.importorskip("transformers")
moe_transformers = pytest.importorskip("nvgemm_runtime.moe.integrations.transformers")

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


REFUSED = {
    "DeepseekV4Experts": "combines gates and ups by",
    "Glm5NextTextExperts": "combines gates and ups by",
    "HYV4Experts": "combines gates and ups by",
    "Inkling2Experts": "combines gates and ups by",
    "MuseSparkExperts": "has a norm after each expert",
    "NemotronHExperts": "has no gate",
}
"""Experts whose gate `experts` does not compute: most clip gates and ups, without adding 1."""

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_hidden_size": 32,
    "moe_intermediate_size": 24,
    "moe_latent_size": None,
    "moe_num_experts": 4,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
}


def registered() -> list[tuple[str, str]]:
    """Module and name of every class whose experts go through transformers' registry."""
    models = Path(transformers.__file__).parent / "models"
    return [
        (f"transformers.models.{path.parent.name}.{path.stem}", name)
        for path in sorted(models.glob("*/modeling_*.py"))
        for name in re.findall(r"^@use_experts_\w+(?:\(.*\))?\nclass (\w+)", path.read_text(), re.M)
    ]


def make_tiny(module: str, name: str) -> Any:
    """Experts of the class, from the first of the model's configs that is one of experts."""
    place = importlib.import_module(module)
    for kind in vars(place).values():
        if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedConfig):
            continue
        config = kind()
        for size, value in SIZES.items():
            if isinstance(getattr(config, size, None), list):  # of texts, and of images
                setattr(config, size, [value, value])
            elif hasattr(config, size):
                setattr(config, size, value)
        given = (24,) if name == "Ernie4_5_VLMoeMoeExperts" else ()
        try:
            made = getattr(place, name)(config, *given)
        except AttributeError:  # a config of attention, of images
            continue
        return made
    raise AssertionError(f"no config of {module} makes {name}")


def experts_step(module: Any, implementation: str) -> list[torch.Tensor]:
    """The result of an experts module, and the gradients of all that it is differentiable in."""
    module.config._experts_implementation = implementation
    module.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(9, 32).requires_grad_()
    weights = torch.rand(9, 2).requires_grad_()
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    out = module(x, chosen, weights)
    out.backward(torch.randn_like(out))
    return [out.detach(), x.grad, weights.grad, *(one.grad for one in module.parameters())]


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    monkeypatch.setattr(kernels, "_warned", {*kernels.WARNINGS})
    moe_transformers.register()


@pytest.mark.parametrize(("module", "name"), registered(), ids=lambda one: one.rpartition(".")[2])
def test_experts_of_every_family_compute_what_they_do_without_it(module: str, name: str) -> None:
    tiny = make_tiny(module, name)
    for one in tiny.parameters():
        torch.nn.init.normal_(one)  # large enough to reach the limit of a clipped gate
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            experts_step(tiny, moe_transformers.NAME)
        return
    expected = experts_step(tiny, "eager")
    for one, other in zip(experts_step(tiny, moe_transformers.NAME), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_families_that_are_refused_exist() -> None:
    assert REFUSED.keys() <= {name for _, name in registered()}


def test_the_gate_decides_the_order_of_weights() -> None:
    """Transformers' own gate takes halves whatever a class says of its weights."""
    tiny = make_tiny("transformers.models.mixtral.modeling_mixtral", "MixtralExperts")
    for one in tiny.parameters():
        torch.nn.init.normal_(one)
    tiny.is_concatenated = False
    expected = experts_step(tiny, "grouped_mm")
    for one, other in zip(experts_step(tiny, moe_transformers.NAME), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_a_gate_that_an_instance_overrides_is_refused() -> None:
    tiny = make_tiny("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")
    tiny._apply_gate = lambda both: both.chunk(2, -1)[0]
    with pytest.raises(ValueError, match=r"by .*<lambda>"):
        experts_step(tiny, moe_transformers.NAME)


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
    calls: list[int] = []
    computed = moe_transformers.routed_experts

    def counted(*tensors: torch.Tensor, **named: Any) -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = computed(*tensors, **named)
        return out

    monkeypatch.setattr(moe_transformers, "routed_experts", counted)
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


def test_an_unknown_activation_is_refused() -> None:
    config = transformers.MixtralConfig(**COMMON, num_local_experts=4, hidden_act="relu")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="must be silu or gelu_pytorch_tanh"):
        step(model, moe_transformers.NAME)
