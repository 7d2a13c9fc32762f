"""What Dynamo sees of experts: one operator, whatever they compute and by whatever."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.exc import TorchRuntimeError

from expert_kernels import Installed, assert_same, gradients, operands_for_kernels
from nvgemm_runtime import __version__
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.moe import experts, routed_experts

pytestmark = pytest.mark.usefixtures("new_process")

Install = Callable[..., Installed]


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    """Nothing compiled before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps the graphs that Dynamo makes, and runs them."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        self.seen.append(graph)
        return graph

    def calls(self) -> list[str]:
        """What they call, in order."""
        nodes = (node for graph in self.seen for node in graph.graph.nodes)
        return [str(node.target) for node in nodes if node.op.startswith("call")]


def kernels(install: Install) -> Installed:
    return install(
        {
            "tn": [None, Epilogue.parse("swiglu_halves_kept"), Epilogue.parse("swiglu_halves_ups")],
            "tt": [None, Epilogue.parse("swiglu_halves_gradient")],
        },
        gathered=True,
    )


def check(function: Callable[..., torch.Tensor], made: dict[str, Any], operator: str) -> None:
    """Dynamo sees the operator alone, and a graph that runs it gives what a call gives."""
    graphs = Graphs()
    found = gradients(torch.compile(function, fullgraph=True, backend=graphs), made)
    assert graphs.calls() == [operator]
    assert_same(found, gradients(function, made), 2**-6)


@pytest.mark.parametrize("is_pair", [False, True], ids=["one weight", "two weights"])
def test_sorted_rows(is_pair: bool, install: Install) -> None:
    installed = kernels(install)
    made = operands_for_kernels()
    if is_pair:
        halves = (half.clone().requires_grad_() for half in made["w_up"].detach().chunk(2, 1))
        made["w_up"] = tuple(halves)
    check(experts, made, "nvgemm_moe.experts")
    assert Epilogue.parse("swiglu_halves_gradient") in installed.epilogues()


def test_biases(install: Install) -> None:
    kernels(install)
    check(experts, operands_for_kernels("up_bias", "down_bias"), "nvgemm_moe.experts")


def test_tokens(install: Install) -> None:
    kernels(install)
    made = operands_for_kernels()
    del made["counts"]
    made["chosen"] = torch.arange(36).reshape(18, 2) * 3 % 5  # some are of another rank
    made["routing_weights"] = torch.rand(18, 2).requires_grad_()
    check(routed_experts, made, "nvgemm_moe.routed_experts")


@pytest.mark.parametrize("wanted", [None, torch.bfloat16, torch.float16])
def test_keys_of_caches_have_the_version_and_the_type_of_autocast(
    wanted: torch.dtype | None,
) -> None:
    """By the operands of the operator, which torch reads."""
    graphs = Graphs()
    made = {name: one.detach() for name, one in operands_for_kernels().items()}
    with torch.autocast("cpu", wanted, enabled=wanted is not None):
        found = torch.compile(experts, fullgraph=True, backend=graphs)(**made)
    assert found.dtype is (wanted or torch.bfloat16)
    (call,) = (node for node in graphs.seen[0].graph.nodes if node.op == "call_function")
    assert (call.args[0], call.args[-1]) == (__version__, wanted)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_does_not_fit_is_refused_with_the_message_of_a_call(fullgraph: bool) -> None:
    made = operands_for_kernels()
    made["w_down"] = made["w_down"].detach().half()
    with pytest.raises(TypeError) as called:
        experts(**made)
    with pytest.raises(TorchRuntimeError, match=re.escape(str(called.value))):
        torch.compile(experts, fullgraph=fullgraph, backend="aot_eager")(**made)
