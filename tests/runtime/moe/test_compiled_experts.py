"""Experts under torch.compile: which kernels run, and that results stay right without them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import cpu_provider
import nvgemm_runtime
from expert_kernels import (
    Installed,
    assert_same,
    build_kernels,
    gradients,
    leaves,
    operands_for_kernels,
)
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_aot.workload.called_gemms import GemmCalls
from nvgemm_runtime.gemm.epilogues import (
    ADD,
    BIAS,
    Epilogue,
    Gate,
    GateForm,
    WeightOrder,
    find_gated,
)
from nvgemm_runtime.gemm.moe_operators import NAMESPACE
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.moe import experts, kernels, routed_experts

pytestmark = pytest.mark.usefixtures("new_process")

KEPT, GRADIENT = Epilogue.parse("swiglu_halves_kept"), Epilogue.parse("swiglu_halves_gradient")
UPS = Epilogue.parse("swiglu_halves_ups")
Install = Callable[..., Installed]


@pytest.fixture(autouse=True)
def no_graphs(inductor_libraries: None) -> Iterator[None]:
    """Nothing compiled before, in memory or in torch's caches."""
    torch._dynamo.reset()
    with fresh_cache(), inductor_config.patch({"cpp.simdlen": 0}):
        yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any] = experts, **options: Any) -> Callable[..., Any]:
    settings: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager", **options}
    return torch.compile(function, **settings)


class Graphs:
    """A backend that keeps the graphs that AOTAutograd makes, and runs them."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _: object) -> Any:
            self.seen.append(graph)
            return make_boxed_func(graph.forward)

        self.backend = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
        )

    def operators(self) -> Counter[str]:
        """Those of nvgemm-aot, by name."""
        names = (node.target for graph in self.seen for node in graph.graph.nodes)
        mine = (one for one in names if getattr(one, "namespace", "") == NAMESPACE)
        return Counter(one.overloadpacket.__name__ for one in mine)


def all_kernels(gate: str = "swiglu", order: str = "halves") -> dict[str, list[Epilogue | None]]:
    """Those that a training step and a call without gradients can use."""
    forms = (GateForm.JOINED, GateForm.KEPT, GateForm.GRADIENT)
    joined, kept, gradient = (find_gated(Gate(gate), WeightOrder(order), one) for one in forms)
    return {"tn": [None, joined, kept], "tt": [None, gradient]}


def with_tokens(made: dict[str, Any]) -> dict[str, Any]:
    """With eleven tokens, some of which several experts have."""
    tokens = torch.randn(11, 32, dtype=torch.bfloat16).requires_grad_()
    return {**made, "x": tokens, "indices": torch.arange(18) * 5 % 11}


def kernels_for(order: str) -> dict[str, list[Epilogue | None]]:
    """Those of `all_kernels`, and of two weights ``with its gate`` that of ups."""
    kernels = all_kernels()
    if order.endswith("with its gate"):
        kernels["tn"].append(UPS)
    return kernels


def with_pair(made: dict[str, Any]) -> dict[str, Any]:
    halves = (one.detach().clone().requires_grad_() for one in made["w_up"].chunk(2, 1))
    return {**made, "w_up": tuple(halves)}


# Each backend with each order, and each activation with both.
@pytest.mark.parametrize(
    ("activation", "order", "backend"),
    [
        ("swiglu", "halves", "inductor"),
        ("swiglu", "interleaved", "aot_eager"),
        ("swiglu_oai", "halves", "aot_eager"),
        ("swiglu_oai", "interleaved", "inductor"),
        pytest.param("geglu", "halves", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_step_runs_the_kernels_that_it_runs_when_called(
    activation: str, order: str, backend: str, install: Install
) -> None:
    kernels = all_kernels(activation, order)
    installed = install(kernels)
    biases = ["up_bias"] if activation == "swiglu_oai" else []
    made = operands_for_kernels(*biases) | {"activation": activation, "weights": order}
    found = gradients(compiled(backend=backend), made)
    assert installed.epilogues() == [kernels["tn"][2], None, kernels["tt"][1], None]
    assert_same(found, gradients(experts, made), 2**-7)
    with torch.no_grad():
        out = compiled(backend="inductor")(**made)
        installed.launched.clear()
        out = compiled(backend="inductor")(**made)
        assert installed.epilogues() == [kernels["tn"][1], None]
        assert torch.equal(out, experts(**made))


@pytest.mark.slow
def test_two_weights_have_the_gradient_of_the_gate_by_a_kernel(install: Install) -> None:
    installed = install({"tn": [None], "tt": [None, GRADIENT]})
    made = with_pair(operands_for_kernels())
    found = gradients(compiled(backend="inductor"), made)
    assert installed.epilogues() == [None, None, None, GRADIENT, None, None]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


def test_two_weights_have_the_gate_behind_the_product_of_ups(install: Install) -> None:
    installed = install({"tn": [None, UPS], "tt": [None, GRADIENT]})
    made = with_pair(operands_for_kernels())
    found = gradients(compiled(backend="inductor"), made)
    assert installed.epilogues() == [None, UPS, None, GRADIENT, None, None]
    assert_same(found, gradients(experts, made), 2**-7)
    graphs = Graphs()
    gradients(compiled(backend=graphs.backend), made)
    expected = {"paired_gated_rows": 1, "gate_gradient": 1, "rows": 3, "columns": 3}
    assert graphs.operators() == expected
    with torch.no_grad():
        out = compiled(backend="inductor")(**made)
        installed.launched.clear()
        out = compiled(backend="inductor")(**made)
        assert installed.epilogues() == [None, UPS, None]
        assert torch.equal(out, experts(**made))


def test_two_weights_add_one_gradient_of_rows_to_the_other(install: Install) -> None:
    """In the memory of that one, which nobody else sees."""
    installed = install({"tn": [None, UPS], "tt": [None, GRADIENT, ADD]})
    made = with_pair(operands_for_kernels())
    found = gradients(compiled(backend="inductor"), made)
    assert installed.epilogues() == [None, UPS, None, GRADIENT, None, ADD]
    assert_same(found, gradients(experts, made), 2**-7)
    before = [one.detach().clone() for one in leaves(made)]
    torch._dynamo.reset()
    # A retained graph gives torch none of its buffers.
    with torch._functorch.config.patch(donated_buffer=False):
        out = compiled(backend="inductor")(**made)
    grad, result = torch.randn_like(out), out.detach().clone()
    given = grad.clone()
    first, second = (
        torch.autograd.grad(out, leaves(made), grad, retain_graph=again) for again in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    seen = [(grad, given), (out, result), *zip(leaves(made), before)]
    assert all(torch.equal(one, other) for one, other in seen)
    graphs = Graphs()
    gradients(compiled(backend=graphs.backend), made)
    wanted = {"paired_gated_rows": 1, "gate_gradient": 1, "rows": 1, "added_rows": 1, "columns": 3}
    assert graphs.operators() == wanted


def test_the_operator_of_a_sum_is_what_torch_takes_it_for(install: Install) -> None:
    """It changes none of its operands, and gives none of them back."""
    install({"tt": [None, ADD]})
    a, b = torch.randn(18, 32).bfloat16(), torch.randn(4, 32, 32).bfloat16()
    offsets = torch.tensor([5, 5, 6, 18], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.nvgemm_moe.added_rows.default,
        (a, b, offsets, a, b),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_gradients_are_added_by_the_kernel_of_an_activation_that_no_kernel_has(
    install: Install,
) -> None:
    installed = install({"tn": [None], "tt": [None, ADD]})
    made = with_pair(operands_for_kernels()) | {"activation": "swiglu_oai", "alpha": 1.5}
    found = gradients(compiled(), made)
    assert installed.epilogues() == [None, None, None, None, None, ADD]
    assert_same(found, gradients(experts, made), 2**-5)


def test_a_graph_adds_gradients_where_the_kernel_is_gone(install: Install) -> None:
    installed = install({"tn": [None, UPS], "tt": [None, GRADIENT, ADD]})
    made = with_pair(operands_for_kernels())
    run = compiled()
    found = gradients(run, made)
    installed.remove()
    assert_same(gradients(run, made), found, 2**-5)


@pytest.mark.slow
def test_two_weights_are_two_products_without_the_kernel_or_a_gradient(install: Install) -> None:
    install({"tn": [None], "tt": [None]})
    made = with_pair(operands_for_kernels())
    graphs = Graphs()
    gradients(compiled(backend=graphs.backend), made)
    assert graphs.operators() == {"rows": 6, "columns": 3}
    install({"tn": [None], "tt": [None, GRADIENT]})
    graphs = Graphs()
    with torch.no_grad():
        compiled(backend=graphs.backend)(**made)
    assert graphs.operators() == {"rows": 3}


def test_without_kernels_the_graphs_have_products_alone() -> None:
    graphs = Graphs()
    gradients(compiled(backend=graphs.backend), operands_for_kernels())
    assert graphs.operators() == {"rows": 4, "columns": 2}
    forward = graphs.seen[0].graph
    names = [str(node.target) for node in forward.nodes]
    assert "aten.silu.default" in names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epilogues", "expected"),
    [
        ({"tn": [None, KEPT], "tt": [None]}, {"gated_rows": 1, "rows": 3, "columns": 2}),
        ({"tn": [None], "tt": [None, GRADIENT]}, {"gate_gradient": 1, "rows": 3, "columns": 2}),
    ],
    ids=["kept", "gradient"],
)
def test_each_kernel_is_used_where_the_other_is_missing(
    epilogues: dict[str, list[Epilogue | None]], expected: dict[str, int], install: Install
) -> None:
    installed = install(epilogues)
    made = operands_for_kernels("down_bias")
    graphs = Graphs()
    found = gradients(compiled(backend=graphs.backend), made)
    assert graphs.operators() == {**expected, "columns": 3}
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


@pytest.mark.slow
@pytest.mark.parametrize("wants_scores", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("order", ["halves", pytest.param("pair", marks=pytest.mark.slow)])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_routing_weights(activation: str, order: str, wants_scores: bool, install: Install) -> None:
    """Where ups are cut off, their gradient is of the down projection's result."""
    kernels = all_kernels(activation)
    installed = install({**kernels, "tn": [*kernels["tn"], BIAS]})
    biases = ["up_bias"] if activation == "swiglu_oai" else []
    made = operands_for_kernels("down_bias", *biases)
    for name in ("x", "w_up", *biases):  # whole numbers, so that both cut off the same gates
        made[name] = made[name].detach().round().requires_grad_()
    if order == "pair":
        made = with_pair(made)
        if biases:
            made["up_bias"] = tuple(
                one.detach().clone().requires_grad_() for one in made["up_bias"].chunk(2, 1)
            )
    made |= {
        "indices": torch.arange(18) % 11,
        "combine": True,
        "activation": activation,
        "routing_weights": (torch.rand(18) + 0.5).requires_grad_(wants_scores),
    }
    made["x"] = made["x"].detach()[:11].clone().requires_grad_()
    found = gradients(compiled(), made)
    assert kernels["tt"][1] in installed.epilogues()
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_gathered", [True, False], ids=["by a kernel", "by operators"])
def test_rows_of_tokens_are_added(is_gathered: bool, install: Install) -> None:
    """By a kernel where one serves; else by operators, to the same sums.

    Forward and backward, where also the gradient of rows and the rows themselves are weighed.
    """
    installed = install(all_kernels(), gathered=is_gathered)
    made = operands_for_kernels()
    del made["counts"]
    made["x"] = made["x"].detach()[:9].clone().requires_grad_()
    made["chosen"] = torch.arange(18).reshape(9, 2) * 3 % 5  # some are of another rank
    made["routing_weights"] = torch.rand(9, 2).requires_grad_()
    found = gradients(compiled(routed_experts, backend="inductor"), made)
    added = [one.op for one in installed.launched if one.op is Op.GATHERED_MM]
    assert len(added) == (4 if is_gathered else 0)
    torch._dynamo.reset()
    graphs = Graphs()
    gradients(compiled(routed_experts, backend=graphs.backend), made)
    assert graphs.operators()["gathered_rows"] == len(added)
    installed.remove()
    assert_same(found, gradients(routed_experts, made), 2**-5)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["halves", pytest.param("pair", marks=pytest.mark.slow)])
def test_a_kernel_finds_the_gradients_of_routing_weights(order: str, install: Install) -> None:
    """With that of the gate: gpt-oss' ups are cut off, and no product follows."""
    kernels = all_kernels("swiglu_oai")
    summed = Epilogue.parse("swiglu_oai_halves_gradient_sums")
    installed = install({"tn": [*kernels["tn"], BIAS], "tt": [*kernels["tt"], summed]})
    made = operands_for_kernels("down_bias", "up_bias")
    for name in ("x", "w_up", "up_bias"):  # whole numbers, so that both cut off the same gates
        made[name] = made[name].detach().round().requires_grad_()
    if order == "pair":
        made = with_pair(made)
        made["up_bias"] = tuple(
            one.detach().clone().requires_grad_() for one in made["up_bias"].chunk(2, 1)
        )
    made |= {
        "activation": "swiglu_oai",
        "routing_weights": (torch.rand(18) + 0.5).requires_grad_(),
    }
    run = compiled()
    found = gradients(run, made)
    assert summed in installed.epilogues()
    assert_same(found, gradients(experts, made), 2**-5)
    graphs = Graphs()
    gradients(compiled(backend=graphs.backend), made)
    operators = graphs.operators()
    assert operators["gate_gradient_sums"] == 1
    assert "gate_gradient" not in operators
    assert operators["rows"] == (3 if order == "pair" else 2)
    installed.remove()
    assert_same(gradients(run, made), found, 2**-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [("w_down",), ("down_bias",), ("routing_weights",), ("x",), ("w_up", "down_bias")],
    ids="+".join,
)
def test_what_needs_no_gradient_gets_none(wanted: tuple[str, ...], install: Install) -> None:
    installed = install(all_kernels())
    made = operands_for_kernels("down_bias")
    made["routing_weights"] = (torch.rand(18) + 0.5).requires_grad_()
    for name in ("x", "w_up", "w_down", "down_bias", "routing_weights"):
        made[name] = made[name].detach().requires_grad_(name in wanted)
    found = gradients(compiled(), made)
    assert len(found) == 1 + len(wanted)
    has_gate_gradient = bool({"x", "w_up"} & {*wanted})
    assert (GRADIENT in installed.epilogues()) is has_gate_gradient
    assert_same(found, gradients(experts, made), 2**-6)


@pytest.mark.slow
def test_other_constants_than_the_kernels_are_computed_by_operators(install: Install) -> None:
    installed = install(all_kernels("swiglu_oai"))
    made = operands_for_kernels("up_bias") | {"activation": "swiglu_oai"}
    for constants in ({"limit": 6.0}, {"alpha": 1.0}):
        found = gradients(compiled(), made | constants)
        assert installed.epilogues() == [None] * 4
        assert_same(found, gradients(experts, made | constants), 2**-6)
        installed.launched.clear()


def with_rows(made: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """The same experts, and other rows."""
    drawn = torch.randn(sum(counts), 32, dtype=torch.bfloat16).requires_grad_()
    return {**made, "x": drawn, "counts": torch.tensor(counts)}


@pytest.mark.parametrize(
    "order",
    [
        "halves",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("pair", "pair with its gate")),
    ],
)
@pytest.mark.parametrize(
    ("mark", "backend"),
    [
        (torch._dynamo.mark_dynamic, "inductor"),
        (torch._dynamo.decorators.mark_unbacked, "aot_eager"),
    ],
    ids=["dynamic", "unbacked"],
)
def test_one_graph_serves_any_number_of_rows(
    mark: Callable[..., None], backend: str, order: str, install: Install
) -> None:
    installed = install(kernels_for(order))
    made = operands_for_kernels()
    if order != "halves":
        made = with_pair(made)
    run = compiled(backend=backend)
    for counts in ([5, 0, 1, 12], [0, 3, 3, 1], [40, 0, 0, 7]):
        other = with_rows(made, counts)
        expected = gradients(experts, other)
        installed.launched.clear()
        mark(other["x"], 0)
        with torch._dynamo.config.patch(error_on_recompile=counts != [5, 0, 1, 12]):
            found = gradients(run, other)
        assert GRADIENT in installed.epilogues()
        assert_same(found, expected, 2**-7)


@pytest.mark.slow
def test_no_row_is_computed_without_a_kernel(install: Install) -> None:
    install(all_kernels())
    made = operands_for_kernels()
    run = compiled(dynamic=True)
    gradients(run, made)
    none = with_rows(made, [0, 0, 0, 0])
    assert_same(gradients(run, none), gradients(experts, none), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("is_pair", [False, True], ids=["one weight", "two weights"])
def test_symbolic_sizes_of_weights_are_no_obstacle(is_pair: bool, install: Install) -> None:
    installed = install(kernels_for("pair with its gate"))
    made = operands_for_kernels()
    made = with_pair(made) if is_pair else made
    for weight in (*(made["w_up"] if is_pair else (made["w_up"],)), made["w_down"]):
        torch._dynamo.mark_dynamic(weight, 0)
    torch._dynamo.mark_dynamic(made["counts"], 0)
    found = gradients(compiled(), made)
    assert installed.epilogues() == (
        [None, UPS, None, GRADIENT, None, None] if is_pair else [KEPT, None, GRADIENT, None]
    )
    assert_same(found, gradients(experts, made), 2**-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_pair",
    [
        pytest.param(False, id="one weight"),
        pytest.param(True, id="two weights", marks=pytest.mark.slow),
    ],
)
def test_a_graph_takes_rows_where_they_are(is_pair: bool, install: Install) -> None:
    """By the kernels that do so when called; without them, it copies the rows."""
    epilogues = [None, UPS] if is_pair else [KEPT]
    installed = install("tn tt", None, KEPT, UPS, gathering=epilogues)
    made = with_tokens(operands_for_kernels())
    made = with_pair(made) if is_pair else made
    run = compiled(backend="inductor")
    gradients(run, made)
    installed.launched.clear()
    found = gradients(run, made)
    taken = [one.epilogue for one in installed.launched if one.op is Op.GATHERED_GROUPED_MM]
    assert taken == epilogues
    assert_same(found, gradients(experts, made), 2**-7)
    with torch.no_grad():
        out = compiled(backend="inductor")(**made)
    assert torch.equal(out, found[0])
    installed.remove()
    installed.launched.clear()
    again = gradients(run, made)
    assert not installed.launched
    assert_same(again, found, 2**-5)


@pytest.mark.parametrize("order", ["halves", "pair", "pair with its gate"])
def test_a_graph_runs_where_its_kernels_are_gone(
    order: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = install(kernels_for(order))
    made = operands_for_kernels("down_bias")
    if order != "halves":
        made = with_pair(made)
    run = compiled()
    gradients(run, made)
    installed.remove()
    installed.launched.clear()
    monkeypatch.setattr(kernels, "_warned", set())
    with pytest.warns(UserWarning, match="give no warning") as seen:
        found = gradients(run, made)
    texts = [str(one.message) for one in seen]
    lost = (kernels.BY_TORCH, kernels.GATE_LOST)
    assert all(sum(what in text for text in texts) == 1 for what in lost)
    assert len(seen) == 2
    assert not installed.launched
    assert_same(found, gradients(experts, made), 2**-6)


def test_a_graph_of_a_call_without_gradients_runs_where_its_kernels_are_gone(
    install: Install,
) -> None:
    installed = install(all_kernels())
    made = operands_for_kernels()
    run = compiled()
    with torch.no_grad():
        run(**made)
        installed.remove()
        installed.launched.clear()
        found = run(**made)
        assert not installed.launched
        assert_same([found], [experts(**made)], 2**-6)


def test_operands_that_kernels_cannot_read_are_computed_without(install: Install) -> None:
    """That they begin at no aligned address is not known while a graph is made."""
    installed = install(all_kernels(), candidates=1)
    made = operands_for_kernels()
    run = compiled()
    expected = gradients(run, made)
    installed.launched.clear()
    apart = dict(made)
    for name in ("x", "w_up"):
        base = torch.empty(made[name].numel() + 1, dtype=torch.bfloat16)
        shifted = base[1:].view(made[name].shape)
        shifted.copy_(made[name].detach())
        apart[name] = shifted.detach().requires_grad_()
        assert apart[name].data_ptr() % 16
    found = gradients(run, apart)
    launched = installed.epilogues()
    assert KEPT not in launched
    assert GRADIENT in launched
    assert_same(found, expected, 2**-5)


@pytest.mark.slow
def test_off_traces_no_kernel_with_a_gate(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = install(all_kernels())
    made = operands_for_kernels()
    with nvgemm_runtime.mode("off"):
        gradients(compiled(), made)
    assert installed.epilogues() == [None] * 4
    torch._dynamo.reset()
    gradients(compiled(backend="inductor", options={"nvgemm_aot_mode": "off"}), made)
    assert installed.epilogues() == [None] * 4
    torch._dynamo.reset()
    gradients(compiled(), made)
    assert installed.epilogues() == [KEPT, None, GRADIENT, None]


def checkpointed(made: dict[str, Any], **options: Any) -> torch.Tensor:
    def of_rows(x: torch.Tensor) -> torch.Tensor:
        return experts(**{**made, "x": x}).relu()

    out: torch.Tensor = checkpoint(of_rows, made["x"], use_reentrant=False, **options)
    return out


def saves(operator: object) -> Callable[..., Any]:
    def policy(_: object, called: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_it = called is operator
        return CheckpointPolicy.MUST_SAVE if is_it else CheckpointPolicy.MUST_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_selective", [False, True], ids=["full", "selective"])
def test_checkpointing(is_selective: bool, backend: str, install: Install) -> None:
    made = operands_for_kernels()
    gated = torch.ops.nvgemm_moe.gated_rows.default
    options = {"context_fn": saves(gated)} if is_selective else {}

    def run(**given: Any) -> torch.Tensor:
        return checkpointed(given, **options)

    plain = install({"tn": [None], "tt": [None]})
    gradients(compiled(run, backend=backend), made)
    # Torch 2.11 computes nothing again of what a function with its own backward made.
    is_computed_again = not is_selective and len(plain.epilogues()) > 4
    torch._dynamo.reset()
    installed = install(all_kernels())
    found = gradients(compiled(run, backend=backend), made)
    launched = installed.epilogues()
    assert launched.count(KEPT) == 1 + is_computed_again
    assert launched.count(GRADIENT) == 1
    installed.remove()
    assert_same(found, gradients(lambda **given: experts(**given).relu(), made), 2**-5)


def saved_bytes(run: Callable[..., torch.Tensor], made: dict[str, Any]) -> int:
    """Memory of what is kept for the backward and is no operand."""
    kept: dict[int, int] = {}

    def keep(one: torch.Tensor) -> torch.Tensor:
        storage = one.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        out = run(**made)
    del out
    tensors = [one for one in made.values() if isinstance(one, torch.Tensor)]
    given = {one.untyped_storage().data_ptr() for one in tensors}
    return sum(size for place, size in kept.items() if place not in given)


def test_no_more_is_saved_than_when_called(install: Install) -> None:
    install(all_kernels())
    made = operands_for_kernels()
    made["counts"] = made["counts"].to(torch.int32)
    when_called = saved_bytes(experts, made)
    assert when_called >= 18 * 96 * 2  # the product and what the activation makes of it
    assert saved_bytes(compiled(backend="inductor"), made) <= when_called


def test_autocast(install: Install) -> None:
    installed = install(all_kernels())
    made = operands_for_kernels()
    for name in ("x", "w_up", "w_down"):
        made[name] = made[name].detach().float().requires_grad_()

    def run(**given: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return experts(**given)

    found = gradients(compiled(run), made)
    assert installed.epilogues() == [KEPT, None, GRADIENT, None]
    assert_same(found, gradients(run, made), 2**-7)


def test_transposed_weights_of_the_down_projection(install: Install) -> None:
    installed = install({"tn": [None, KEPT, GRADIENT], "tt": [None]})
    made = operands_for_kernels()
    made["w_down"] = made["w_down"].detach().mT.contiguous().mT.requires_grad_()
    found = gradients(compiled(), made)
    assert installed.epilogues() == [KEPT, None, GRADIENT, None]
    assert_same(found, gradients(experts, made), 2**-7)


def test_inference_mode(install: Install) -> None:
    installed = install(all_kernels())
    made = operands_for_kernels()
    with torch.inference_mode():
        out = compiled(backend="inductor")(**made)
    assert installed.epilogues() == [Epilogue.parse("swiglu_halves"), None]
    with torch.no_grad():
        assert torch.equal(out, experts(**made))


def test_a_second_derivative_is_refused(install: Install) -> None:
    install(all_kernels())
    made = operands_for_kernels()
    out = compiled()(**made)
    (grad,) = torch.autograd.grad(out.sum(), made["x"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not .*support double backward"):
        grad.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_no_operators_with_a_gate(strict: bool, install: Install) -> None:
    """So a version of nvgemm-aot that knows none of them can run it."""
    install(all_kernels())

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = operands_for_kernels()
            self.w_up = torch.nn.Parameter(made["w_up"].detach())
            self.w_down = torch.nn.Parameter(made["w_down"].detach())

        def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return experts(x, self.w_up, self.w_down, counts=counts)

    layer, made = Layer(), operands_for_kernels()
    given = made["x"].detach(), made["counts"]
    with torch.no_grad():
        program = torch.export.export(layer, given, strict=strict)
        names = {str(node.target) for node in program.graph.nodes}
        mine = {name for name in names if name.startswith(NAMESPACE)}
        assert mine == {f"{NAMESPACE}.rows.default"}
        assert_same([program.module()(*given)], [layer(*given)], 2**-6)


def test_what_watches_a_compiled_backward_sees_its_products(install: Install) -> None:
    """Torch compiles nothing under a dispatch mode, but runs a backward that it has compiled."""
    install(all_kernels())
    made = operands_for_kernels()
    run = compiled()
    expected = gradients(run, made)
    for call in (run, experts):
        out = call(**made)
        torch.manual_seed(1)
        with GemmCalls("sm_90a") as calls:
            grads = torch.autograd.grad(out, leaves(made), torch.randn_like(out))
        assert_same(list(grads), expected[1:], 2**-6)
        assert {problem.key: count for problem, count in calls.problems.items()} == {
            "grouped_mm/tt/bf16xbf16/fp32/bf16/g4m18n32k32": 1,
            "grouped_mm/tt/bf16xbf16/fp32/bf16/g4m18n32k64": 1,
            "k_grouped_mm/nt/bf16xbf16/fp32/bf16/g4m32n32k18": 1,
            "k_grouped_mm/nt/bf16xbf16/fp32/bf16/g4m64n32k18": 1,
        }
        assert not calls.undeclarable


def test_a_counter_of_flops_runs_a_compiled_backward(install: Install) -> None:
    install(all_kernels())
    made = operands_for_kernels()
    run = compiled()
    expected = gradients(run, made)
    out = run(**made)
    torch.manual_seed(1)
    with FlopCounterMode(display=False):
        grads = torch.autograd.grad(out, leaves(made), torch.randn_like(out))
    assert_same(list(grads), expected[1:], 0.0)


def test_a_recording_counts_the_products_of_a_pair(install: Install) -> None:
    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((18, 32), (4, 32, 64))]
    offsets = torch.tensor([5, 5, 6, 18], dtype=torch.int32)
    a, b = given
    with GemmCalls("sm_90a") as calls:
        torch.ops.nvgemm_moe.paired_rows(a, b, b, offsets, None, None)
    keys = [problem.key for problem in calls.problems.elements()]
    assert keys == ["grouped_mm/tt/bf16xbf16/fp32/bf16/g4m18n64k32"] * 2


def test_a_recording_counts_the_products_of_rows_that_are_taken(install: Install) -> None:
    """As experts have them that run without such kernels: of copied rows."""
    a, b = torch.empty(11, 32).bfloat16(), torch.empty(4, 32, 64).bfloat16()
    offsets, rows = torch.tensor([5, 5, 6, 18]).int(), torch.zeros(18, dtype=torch.int32)
    with GemmCalls("sm_90a") as calls:
        torch.ops.nvgemm_moe.paired_gated_rows(a, b, b, offsets, UPS.name, rows)
        torch.ops.nvgemm_moe.gated_rows(a, b, offsets, None, KEPT.name, rows)
    keys = [problem.key for problem in calls.problems.elements()]
    assert keys == ["grouped_mm/tt/bf16xbf16/fp32/bf16/g4m18n64k32"] * 3


def test_a_recording_counts_the_products_of_a_sum(install: Install) -> None:
    shapes = ((18, 32), (4, 32, 64), (18, 48), (4, 48, 64))
    a, b, other_a, other_b = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    offsets = torch.tensor([5, 5, 6, 18], dtype=torch.int32)
    with GemmCalls("sm_90a") as calls:
        torch.ops.nvgemm_moe.added_rows(a, b, offsets, other_a, other_b)
    keys = [problem.key for problem in calls.problems.elements()]
    start = "grouped_mm/tt/bf16xbf16/fp32/bf16"
    assert keys == [f"{start}/g4m18n64k48", f"{start}/g4m18n64k32"]


def test_kernels_whose_results_depend_on_timing_are_not_traced_where_that_is_forbidden(
    new_process: None, tmp_path: Path, kernel_cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = cpu_provider.TimingDependent()
    built = build_kernels(
        all_kernels(), (), tmp_path, kernel_cache, provider=provider, candidates=1
    )
    installed = Installed(built, monkeypatch)
    made = operands_for_kernels()
    gradients(compiled(), made)
    assert KEPT in installed.epilogues()
    torch.use_deterministic_algorithms(True)
    try:
        graphs = Graphs()
        gradients(compiled(backend=graphs.backend), made)
    finally:
        torch.use_deterministic_algorithms(False)
    assert graphs.operators() == {"rows": 4, "columns": 2}
    assert not installed.launched
