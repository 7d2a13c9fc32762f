"""The GEMMs that models of transformers call, without weights from anywhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub at its import

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from nvgemm_aot.workload.called_gemms import GemmCalls


def as_transformers_saves_it(config: dict[str, Any]) -> str:
    """The config.json that transformers writes of a model's sizes."""
    return str(_read(config).to_json_string())


def record_fake(config: dict[str, Any], tokens: int) -> GemmCalls:
    """What a model of any size calls under fake tensors, its experts in grouped GEMMs."""
    return _record(config, tokens, fake=True)


def record_training(config: dict[str, Any], tokens: int) -> GemmCalls:
    """What a training step of a model of any size calls under fake tensors."""
    calls = GemmCalls()
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(_read(config), dtype=torch.bfloat16)
        ids = torch.randint(config["vocab_size"], (1, tokens))
        with calls:
            out = model(ids, use_cache=False).logits
            out.backward(torch.empty_like(out))
    return calls


def record_loop(config: dict[str, Any], tokens: int, *, evenly: bool) -> GemmCalls:
    """What a small model calls in bf16 on the CPU, its experts one after the other."""
    return _record(config, tokens, evenly=evenly)


def _read(config: dict[str, Any]) -> Any:
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    return AutoConfig.for_model(config["model_type"], **sizes)


def _record(
    config: dict[str, Any], tokens: int, *, fake: bool = False, evenly: bool = False
) -> GemmCalls:
    torch.manual_seed(0)
    calls = GemmCalls()
    with FakeTensorMode() if fake else contextlib.nullcontext(), torch.no_grad():
        model = AutoModelForCausalLM.from_config(_read(config), dtype=torch.bfloat16).eval()
        if not fake and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        if evenly:
            routers = list(_routers(model))
            assert routers
            for router in routers:
                router.register_forward_hook(_spread)
        ids = torch.randint(config["vocab_size"], (1, tokens))
        with calls:
            model(ids, use_cache=False)
    return calls


def _routers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (
        module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")
    )


def _spread(router: Any, inputs: object, output: Any) -> Any:
    """Send token t to the experts after those of token t - 1."""
    scores, weights, chosen = output
    places = torch.arange(chosen.numel(), device=chosen.device).reshape(chosen.shape)
    return scores, weights, (places % router.num_experts).to(chosen.dtype)
