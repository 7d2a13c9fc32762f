"""torchtitan's own experts beside those that its overrides put in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from installed_bundles import use
from nvgemm_runtime.moe import kernels

pytest.importorskip("torchtitan", reason="see test_moe_torchtitan_installed, which installs it")

from torchtitan.config.configurable import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

import nvgemm_runtime.moe.integrations.torchtitan as moe_torchtitan

COUNTS = torch.tensor([5, 0, 1, 12])


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


KINDS = [GroupedExperts, GptOssGroupedExperts]
EXPERTS = (moe_torchtitan.NvgemmExperts, moe_torchtitan.NvgemmGptOssExperts)
TOKENS, CHOSEN = 18, 2


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    monkeypatch.setattr(kernels, "_warned", {*kernels.WARNINGS})


def replaced(config: Any, *names: str) -> Any:
    """What overrides of these names put in place of a config."""
    root = Root(experts=config)
    targets = [f"nvgemm_runtime.moe.integrations.torchtitan.{name}" for name in names]
    assert len(apply_overrides(OverrideConfig(imports=list(targets)), root)) == 1
    return root.experts


def with_weights_of(own: Any, ours: Any) -> Any:
    """The second module, with the first one's weights, which are drawn."""
    torch.manual_seed(0)
    for one in own.parameters():
        torch.nn.init.normal_(one, std=0.2)
    ours.load_state_dict(own.state_dict())
    return ours


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        # bf16 rounds to 2^-9; torchtitan rounds the activation's parts, so a few of them add up.
        assert one.dtype is other.dtype
        error = (one.float() - other.float()).norm()
        assert float(error) <= 2**-6 * float(other.float().norm())


@pytest.mark.parametrize("kind", KINDS)
def test_the_override_computes_what_torchtitan_does(kind: Callable[..., Any]) -> None:
    config = kind.Config(dim=32, hidden_dim=48, num_experts=4)
    ours = replaced(config, "nvgemm_experts", "nvgemm_gpt_oss_experts").build()
    assert isinstance(ours, EXPERTS)
    own = kind(config)
    with_weights_of(own, ours)
    assert_close(step(ours), step(own))


def routed_config(kind: Callable[..., Any]) -> Any:
    return RoutedExperts.Config(
        inner_experts=kind.Config(dim=32, hidden_dim=48, num_experts=4),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=4, top_k=CHOSEN),
    )


def routed_step(module: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(2, TOKENS // 2, 32, dtype=dtype).requires_grad_()
    scores = torch.rand(2, TOKENS // 2, CHOSEN).requires_grad_()
    chosen = torch.rand(2, TOKENS // 2, 3).topk(CHOSEN).indices  # the last expert has none
    counts = torch.bincount(chosen.flatten(), minlength=4)
    out = module(x, scores, chosen, counts)
    out.backward(torch.randn_like(out))
    return [out.detach(), x.grad, scores.grad, *(one.grad for one in module.parameters())]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GroupedExperts, torch.bfloat16),
        (GroupedExperts, torch.float32),
        (GptOssGroupedExperts, torch.bfloat16),  # of fp32, torchtitan's own add bf16 to fp32
    ],
)
def test_from_tokens_to_tokens(
    kind: Callable[..., Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 by one call; in fp32, which is not rounded before it is added, by torchtitan's."""
    calls: list[int] = []
    computed = moe_torchtitan.routed_experts

    def counted(*tensors: torch.Tensor, **named: Any) -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = computed(*tensors, **named)
        return out

    monkeypatch.setattr(moe_torchtitan, "routed_experts", counted)
    ours = replaced(routed_config(kind), "nvgemm_routed_experts").build()
    assert isinstance(ours.inner_experts, EXPERTS)
    own = RoutedExperts(routed_config(kind))
    with_weights_of(own, ours)
    hooked: list[int] = []
    ours.inner_experts.register_forward_pre_hook(lambda *_: hooked.append(1))
    assert_close(routed_step(ours, dtype), routed_step(own, dtype))
    assert hooked == [1]  # as FSDP's, which gathers weights
    assert len(calls) == (dtype is torch.bfloat16)


def test_experts_of_another_kind_stay() -> None:
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    config = routed_config(GroupedExperts)
    config.inner_experts = Config(dim=32, hidden_dim=48, num_experts=4)
    assert replaced(config, "nvgemm_routed_experts") is config


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_other_ranks_are_left_to_the_dispatcher(kind: Callable[..., Any]) -> None:
    class Dispatcher(LocalTokenDispatcher):
        """One of expert parallelism, as far as its type goes."""

        seen = 0

        def combine(self, *given: Any) -> torch.Tensor:
            type(self).seen += 1
            out: torch.Tensor = super().combine(*given)
            return out

    ours = replaced(routed_config(kind), "nvgemm_routed_experts").build()
    own = RoutedExperts(routed_config(kind))
    with_weights_of(own, ours)
    ours.token_dispatcher = Dispatcher(LocalTokenDispatcher.Config(num_experts=4, top_k=CHOSEN))
    assert_close(routed_step(ours, torch.bfloat16), routed_step(own, torch.bfloat16))
    assert Dispatcher.seen == 1
