"""torchtitan's own experts beside those that its overrides put in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from installed_bundles import use
from nvgemm_runtime.moe import products

pytest.importorskip("torchtitan", reason="see test_moe_torchtitan_installed, which installs it")

from torchtitan.config.configurable import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

import nvgemm_runtime.moe.torchtitan as moe_torchtitan

COUNTS = torch.tensor([5, 0, 1, 12])
OVERRIDES = ["nvgemm_experts", "nvgemm_gpt_oss_experts"]


@dataclass(kw_only=True, slots=True)
class Root(Configurable.Config):
    """A config that holds those of the experts."""

    experts: Any


def step(module: Any) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(18, 32, dtype=torch.bfloat16).requires_grad_()
    out = module(x, COUNTS)
    out.backward(torch.randn_like(out))
    return [out.detach(), x.grad, *(one.grad for one in module.parameters())]


@pytest.mark.parametrize("kind", [GroupedExperts, GptOssGroupedExperts])
def test_the_override_computes_what_torchtitan_does(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    monkeypatch.setattr(products, "_found", {})
    monkeypatch.setattr(products, "_warned", {*products.WARNINGS})
    config = kind.Config(dim=32, hidden_dim=48, num_experts=4)
    root = Root(experts=config)
    targets = [f"nvgemm_runtime.moe.torchtitan.{name}" for name in OVERRIDES]
    done = apply_overrides(OverrideConfig(imports=list(targets)), root)
    assert len(done) == 1
    own, ours = kind(config), root.experts.build()
    assert isinstance(ours, (moe_torchtitan.NvgemmExperts, moe_torchtitan.NvgemmGptOssExperts))
    torch.manual_seed(0)
    for one in own.parameters():
        torch.nn.init.normal_(one, std=0.2)
    ours.load_state_dict(own.state_dict())
    for found, expected in zip(step(ours), step(own)):
        # bf16 rounds to 2^-9; torchtitan rounds the activation's parts, so a few of them add up.
        error = (found.float() - expected.float()).norm()
        assert float(error) <= 2**-6 * float(expected.float().norm())
