"""Experts whose products and gates are computed by kernels: which, and what they give."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    checkpoint,
)
from torch.utils.flop_counter import FlopCounterMode

from expert_kernels import Installed, assert_same, gradients, leaves, operands_for_kernels
from installed_bundles import use
from nvgemm_aot.workload.called_gemms import GemmCalls
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import StorageError
from nvgemm_runtime.gemm.epilogues import (
    ADD,
    BIAS,
    Epilogue,
    Gate,
    GateForm,
    WeightOrder,
    find_gated,
)
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.launch import select
from nvgemm_runtime.launch.loading.loader import KernelLoader
from nvgemm_runtime.moe import backward, experts, gated_products, kernels, products

pytestmark = pytest.mark.usefixtures("new_process")

ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu")


def test_a_kernel_computes_where_one_serves(install: Callable[..., Installed]) -> None:
    installed = install("tn tt", None)
    made = operands_for_kernels()
    found = gradients(experts, made)
    assert [one.layout.value for one in installed.launched] == ["tn", "tn", "tt", "tt"]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-6)
    assert len(installed.launched) == 4


def test_a_kernel_adds_the_biases(install: Callable[..., Installed]) -> None:
    installed = install("tn", None, BIAS)
    made = operands_for_kernels("up_bias", "down_bias")
    found = experts(**made)
    assert installed.epilogues() == [BIAS] * 2
    installed.remove()
    assert_same([found.detach()], [experts(**made).detach()], 2**-6)


def test_torch_adds_the_biases_to_what_a_kernel_multiplied(
    install: Callable[..., Installed],
) -> None:
    installed = install("tn", None)
    made = operands_for_kernels("up_bias", "down_bias")
    found = experts(**made)
    assert installed.epilogues() == [None] * 2
    installed.remove()
    assert torch.equal(found, experts(**made))


@pytest.mark.parametrize("order", ["halves", "interleaved"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_kernel_with_the_gate_serves_where_no_gradient_is_wanted(
    activation: str, order: str, install: Callable[..., Installed]
) -> None:
    epilogue = find_gated(Gate(activation), WeightOrder(order))
    installed = install("tn", None, epilogue)
    biases = ["up_bias"] if epilogue.addend else []
    made = operands_for_kernels(*biases) | {"activation": activation, "weights": order}
    rounded = experts(**made)
    assert installed.epilogues() == [None, None]
    with torch.no_grad():
        found = experts(**made)
    assert installed.epilogues() == [epilogue, None]
    assert_same([found], [rounded.detach()], 2**-5)


@pytest.mark.parametrize("kept", ["one weight", "two weights"])
def test_a_fused_forward_finds_its_kernels_in_six_calls(
    kept: str, install: Callable[..., Installed], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = (
        Epilogue.parse("swiglu_halves")
        if kept == "one weight"
        else Epilogue.parse("swiglu_halves_ups")
    )
    installed = install("tn", None, gate)
    made = operands_for_kernels()
    find, depths = kernels.find_kernel, list[int]()

    def counted(*operands: Any) -> Any:
        callers = traceback.walk_stack(sys._getframe(1))
        names = [frame.f_globals["__name__"] for frame, _ in callers]
        depths.append(sum(name.startswith("nvgemm_runtime.") for name in names))
        return find(*operands)

    monkeypatch.setattr(kernels, "find_kernel", counted)
    with torch.no_grad():
        experts(**(made if kept == "one weight" else of_two_weights(made)))
    assert gate in installed.epilogues()
    assert max(depths) == 6


@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_a_kernel_that_keeps_the_product_serves_where_no_other_has_the_gate(
    order: str, install: Callable[..., Installed]
) -> None:
    kept = find_gated(Gate.SWIGLU, WeightOrder(order), GateForm.KEPT)
    installed = install("tn", None, kept)
    made = operands_for_kernels() | {"weights": order}
    in_training = experts(**made)
    assert installed.epilogues() == [kept, None]
    with torch.no_grad():
        assert torch.equal(experts(**made), in_training)
    assert installed.epilogues() == [kept, None]


@pytest.mark.parametrize("order", ["halves", "interleaved"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_have_the_gate_and_its_gradient_in_training(
    activation: str, order: str, install: Callable[..., Installed]
) -> None:
    kept, gradient = (
        find_gated(Gate(activation), WeightOrder(order), form)
        for form in (GateForm.KEPT, GateForm.GRADIENT)
    )
    installed = install({"tn": [None, kept], "tt": [None, gradient]})
    biases = ["up_bias"] if kept.addend else []
    made = operands_for_kernels(*biases) | {"activation": activation, "weights": order}
    for name in ("x", "w_up", *biases):  # whole numbers, so that both cut off the same gates
        made[name] = made[name].detach().round().requires_grad_()
    found = gradients(experts, made)
    assert installed.epilogues() == [kept, None, gradient, None]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


def test_two_weights_have_the_gradient_of_the_gate_by_a_kernel(
    install: Callable[..., Installed],
) -> None:
    gradient = Epilogue.parse("swiglu_halves_gradient")
    installed = install({"tn": [None], "tt": [None, gradient]})
    made = of_two_weights(operands_for_kernels())
    found = gradients(experts, made)
    assert installed.epilogues() == [None, None, None, gradient, None, None]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


def of_two_weights(made: dict[str, Any]) -> dict[str, Any]:
    """The same operands, with a weight of its own, and a bias, for gates and for ups."""
    parts = {
        name: tuple(one.detach().clone().requires_grad_() for one in made[name].chunk(2, 1))
        for name in ("w_up", "up_bias")
        if name in made
    }
    return {**made, **parts}


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_two_weights_have_the_gate_behind_the_product_of_ups(
    activation: str, install: Callable[..., Installed]
) -> None:
    """What it gave is kept: the backward computes it no more."""
    ups, gradient = (
        find_gated(Gate(activation), WeightOrder.HALVES, form)
        for form in (GateForm.UPS, GateForm.GRADIENT)
    )
    installed = install({"tn": [None, ups], "tt": [None, gradient]})
    made = of_two_weights(operands_for_kernels("down_bias")) | {"activation": activation}
    found = gradients(experts, made)
    assert installed.epilogues() == [None, ups, None, gradient, None, None]
    with torch.no_grad():
        out = experts(**made)
    assert installed.epilogues() == [None, ups, None]
    installed.remove()
    assert_same([out], [experts(**made).detach()], 2**-5)
    assert_same(found, gradients(experts, made), 2**-5)


def of_tokens(made: dict[str, Any], dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    """The same with eleven tokens, some of which several experts have."""
    tokens = torch.randn(11, 32, dtype=torch.bfloat16).requires_grad_()
    return {**made, "x": tokens, "indices": (torch.arange(18) * 5 % 11).to(dtype)}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_a_kernel_takes_rows_where_they_are(
    activation: str, dtype: torch.dtype, install: Callable[..., Installed]
) -> None:
    """It is preferred to one that takes them from a copy, and gives what that gives."""
    joined, kept = (
        find_gated(Gate(activation), WeightOrder.HALVES, form)
        for form in (GateForm.JOINED, GateForm.KEPT)
    )
    installed = install("tn tt", None, joined, kept, gathering=[kept])
    biases = ["up_bias"] if kept.addend else []
    made = of_tokens(operands_for_kernels(*biases), dtype) | {"activation": activation}
    found = gradients(experts, made)
    assert [one.op for one in installed.launched][:2] == [Op.GATHERED_GROUPED_MM, Op.GROUPED_MM]
    assert installed.epilogues()[:2] == [kept, None]
    with torch.no_grad():
        out = experts(**made)
    assert [one.op for one in installed.launched] == [Op.GATHERED_GROUPED_MM, Op.GROUPED_MM]
    copied = {name: one for name, one in made.items() if name != "indices"}
    copied["x"] = made["x"].detach()[made["indices"].long()]
    assert torch.equal(found[0], experts(**copied))
    assert torch.equal(out, found[0])
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


@pytest.mark.parametrize("is_pair", [False, True], ids=["one weight", "two weights"])
@pytest.mark.parametrize(("hidden", "gathers"), [(1024, True), (1032, False)])
def test_wide_experts_have_their_rows_copied(
    hidden: int, gathers: bool, is_pair: bool, install: Callable[..., Installed]
) -> None:
    """Whatever kernels there are: one that was declared for others serves any number of columns."""
    kept, ups = Epilogue.parse("swiglu_halves_kept"), Epilogue.parse("swiglu_halves_ups")
    installed = install("tn tt", None, kept, ups, gathering=[None, kept, ups])
    made = of_tokens(operands_for_kernels())
    made["w_up"] = torch.randn(4, 2 * hidden, 32).bfloat16().requires_grad_()
    made["w_down"] = torch.randn(4, 32, hidden).bfloat16()
    if is_pair:
        made = of_two_weights(made)
    with torch.no_grad():
        experts(**made)
    taken = Op.GATHERED_GROUPED_MM in {one.op for one in installed.launched}
    assert taken is gathers
    assert (ups if is_pair else kept) in installed.epilogues()


def test_kernels_take_rows_where_they_are_for_two_weights(
    install: Callable[..., Installed],
) -> None:
    ups = Epilogue.parse("swiglu_halves_ups")
    installed = install("tn tt", None, ups, gathering=[None, ups])
    made = of_two_weights(of_tokens(operands_for_kernels()))
    found = gradients(experts, made)
    ops = [one.op for one in installed.launched][:3]
    assert ops == [Op.GATHERED_GROUPED_MM, Op.GATHERED_GROUPED_MM, Op.GROUPED_MM]
    assert installed.epilogues()[:3] == [None, ups, None]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


def test_rows_are_copied_for_two_weights_unless_kernels_have_the_gate(
    install: Callable[..., Installed],
) -> None:
    """One that takes rows for the product of gates alone is no reason to do without the gate."""
    ups = Epilogue.parse("swiglu_halves_ups")
    installed = install("tn", None, ups, gathering=[None])
    made = of_two_weights(of_tokens(operands_for_kernels()))
    experts(**made)
    assert {one.op for one in installed.launched} == {Op.GROUPED_MM}
    assert installed.epilogues() == [None, ups, None]


def test_no_row_is_taken_and_tokens_may_have_none(install: Callable[..., Installed]) -> None:
    kept = Epilogue.parse("swiglu_halves_kept")
    install("tn tt", None, kept, gathering=[kept])
    made = of_tokens(operands_for_kernels())
    made |= {"indices": torch.zeros(0, dtype=torch.int64), "counts": torch.zeros(4).long()}
    assert experts(**made).shape == (0, 32)
    out = experts(**made, combine=True)
    assert out.shape == (11, 32)
    assert not out.any()


def test_two_weights_add_one_gradient_of_rows_to_the_other(
    install: Callable[..., Installed],
) -> None:
    """By the kernel of the second product, which rounds the sum once."""
    installed = install({"tn": [None], "tt": [None, ADD]})
    made = of_two_weights(operands_for_kernels())
    found = gradients(experts, made)
    assert installed.epilogues() == [None, None, None, None, None, ADD]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_the_gradient_of_the_last_weights_is_made_before_those_of_gates(
    weighted: bool, install: Callable[..., Installed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which take more memory."""
    made = operands_for_kernels()
    if weighted:
        made["routing_weights"] = torch.rand(18).requires_grad_()
    kept, gradient = Epilogue.parse("swiglu_halves_kept"), Epilogue.parse("swiglu_halves_gradient")
    installed = install({"tn": [None, kept], "tt": [None, gradient]}, gathered=True)
    order: list[Any] = []
    multiply = backward.weight_gradient

    def watched(*given: Any) -> torch.Tensor:
        order.extend(one for one in installed.epilogues() if one is gradient)
        found = multiply(*given)
        order.append(tuple(found.shape))
        return found

    monkeypatch.setattr(backward, "weight_gradient", watched)
    gradients(experts, made)
    assert order == [tuple(made["w_down"].shape), gradient, tuple(made["w_up"].shape)]


def watch_memory(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, int]]:
    """Of each product from here on: where a matrix that is added begins, and where the result."""
    launch = kernels.launch
    seen: list[tuple[int | None, int]] = []

    def watched(op: Op, a: Any, b: Any, out: Any, extras: ExtraOperands) -> str:
        added = extras.addend if extras.adds_matrix else None
        seen.append((None if added is None else added.data_ptr(), out.data_ptr()))
        return launch(op, a, b, out, extras)

    monkeypatch.setattr(kernels, "launch", watched)
    return seen


@pytest.mark.parametrize("combine", [False, True], ids=["rows", "rows of tokens"])
def test_the_sum_is_written_where_the_first_gradient_of_rows_is(
    combine: bool, install: Callable[..., Installed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that the graph is run backward."""
    installed = install({"tn": [None], "tt": [None, ADD]})
    made = of_two_weights(operands_for_kernels())
    if combine:
        made["x"] = made["x"].detach()[:9].clone().requires_grad_()
        made["token_rows"] = torch.randperm(18).reshape(9, 2)
        made["indices"] = torch.empty(18, dtype=torch.int64)
        made["indices"][made["token_rows"].flatten()] = torch.arange(9).repeat_interleave(2)
        made["counts"] = torch.tensor([5, 0, 1, 9])  # three rows add nothing
        made["combine"] = True
    out = experts(**made)
    seen = watch_memory(monkeypatch)
    found = [
        torch.autograd.grad(out, leaves(made), torch.ones_like(out), retain_graph=again)
        for again in (True, False)
    ]
    assert installed.epilogues().count(ADD) == 2
    sums = [place for place, (added, _) in enumerate(seen) if added is not None]
    assert len(sums) == 2
    for place in sums:
        added, result = seen[place]
        assert added == result
        assert seen[place - 1] == (None, result)
    assert all(torch.equal(one, other) for one, other in zip(*found))
    installed.remove()
    out = experts(**made)
    expected = torch.autograd.grad(out, leaves(made), torch.ones_like(out))
    assert_same(list(found[0]), list(expected), 2**-5)


def test_a_dispatch_mode_sees_the_sum_of_two_gradients_of_rows(
    install: Callable[..., Installed],
) -> None:
    installed = install({"tn": [None], "tt": [None, ADD]})
    made = of_two_weights(operands_for_kernels())
    expected = gradients(experts, made)
    assert ADD in installed.epilogues()
    with FlopCounterMode(display=False):
        found = gradients(experts, made)
    assert installed.epilogues() == [None] * 6
    assert_same(found, expected, 2**-5)


@pytest.mark.parametrize("rows", [0, 18])
def test_rows_added_to_a_matrix(rows: int, install: Callable[..., Installed]) -> None:
    """By a kernel, by another one and torch, and by torch alone; to a matrix of any strides."""
    torch.manual_seed(0)
    a, b = torch.randn(rows, 32).bfloat16(), torch.randn(4, 32, 32).bfloat16()
    ends = torch.tensor([5, 5, 6, 18], dtype=torch.int32).clamp(max=rows)
    other_a, other_b = torch.randn(rows, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16()
    results = []
    for epilogues in ([None, ADD], [None], []):
        if epilogues:
            installed = install({"tt": epilogues})
        else:
            installed.remove()
        results.append(products.added_rows(a, b, ends, other_a, other_b))
        wanted = {2: [None, ADD], 1: [None, None], 0: []}[len(epilogues)]
        assert installed.epilogues() == (wanted if rows else [])
        by_column = products.rows(other_a, other_b, ends).T.contiguous().T
        products.add_rows(by_column, a, b, ends)
        results.append(by_column)
        installed.launched.clear()
    for one in results:
        assert one.shape == (rows, 32)
        assert_same([one], [results[0]], 2**-6)
    assert not rows or not torch.equal(results[0], results[2]), "rounded once, and twice"


@pytest.mark.parametrize("sizes", [(18, 0, 32), (18, 32, 0), (0, 32, 32)])
def test_nothing_is_added_of_no_element(
    sizes: tuple[int, int, int], install: Callable[..., Installed]
) -> None:
    install({"tt": [None, ADD]})
    m, k, n = sizes
    out = torch.ones(m, n).bfloat16()
    ends = torch.full((4,), m, dtype=torch.int32)
    products.add_rows(out, torch.ones(m, k).bfloat16(), torch.ones(4, k, n).bfloat16(), ends)
    assert torch.equal(out, torch.ones(m, n).bfloat16())


def test_a_bias_and_a_matrix_of_one_shape_have_kernels_of_their_own(
    install: Callable[..., Installed],
) -> None:
    """There are as many rows as groups, and nothing else tells the calls apart."""
    installed = install({"tt": [None, BIAS, ADD]})
    torch.manual_seed(0)
    a, b, added = torch.randn(4, 32), torch.randn(4, 32, 32), torch.randn(4, 32)
    a, b, added = a.bfloat16(), b.bfloat16(), added.bfloat16()
    ends = torch.tensor([4, 4, 4, 4], dtype=torch.int32)
    product = a.double() @ b[0].double()
    for _ in range(2):
        summed = added.clone()
        products.add_rows(summed, a, b, ends)
        biased = products.rows(a, b, ends, added)
        assert installed.epilogues() == [ADD, BIAS]
        assert_same(
            [summed.double(), biased.double()], [product + added, product + added[0]], 2**-6
        )


@pytest.mark.slow  # it looks at every object of the process
@pytest.mark.parametrize("served", ["products", "sums"])
def test_no_second_matrix_is_kept_for_a_sum(
    served: str, install: Callable[..., Installed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no kernel adds, there are two for a while: the sum, and what torch adds to it."""
    install({"tt": {"products": [None], "sums": [None, ADD]}[served]})
    a, b = torch.ones(18, 64).bfloat16(), torch.ones(4, 64, 48).bfloat16()
    ends = torch.tensor([5, 5, 6, 18], dtype=torch.int32)
    alive: list[int] = []

    def is_result(one: Any) -> bool:
        # Other tests leave tensors whose sizes are symbols, which must not be compared.
        is_plain = type(one) is torch.Tensor and all(type(extent) is int for extent in one.shape)
        return is_plain and one.shape == (18, 48)

    def watched(module: ModuleType, name: str) -> None:
        compute = getattr(module, name)

        def counted(*operands: Any) -> Any:
            gc.collect()
            alive.append(sum(map(is_result, gc.get_objects())))
            return compute(*operands)

        monkeypatch.setattr(module, name, counted)

    watched(kernels, "launch")
    watched(products, "rows_by_torch")
    assert (products.added_rows(a, b, ends, a, b) == 128).all()
    expected = {"products": [1, 1, 2], "sums": [1, 1]}
    assert alive == expected[served]


@pytest.mark.parametrize("lacking", ["activation", "bias", "kernel of gates", "gradient"])
def test_two_weights_do_without_the_gate_where_it_cannot_be(
    lacking: str, install: Callable[..., Installed]
) -> None:
    """Of gpt-oss, whose models have one weight; with biases; or where a kernel is missing."""
    ups, gradient = Epilogue.parse("swiglu_halves_ups"), Epilogue.parse("swiglu_halves_gradient")
    tn: list[Epilogue | None] = [ups] if lacking == "kernel of gates" else [None, ups]
    tn += [BIAS] if lacking == "bias" else []
    installed = install({"tn": tn, "tt": [None] if lacking == "gradient" else [None, gradient]})
    biases = ["up_bias"] if lacking == "bias" else []
    made = of_two_weights(operands_for_kernels(*biases))
    made["activation"] = "swiglu_oai" if lacking == "activation" else "swiglu"
    found = gradients(experts, made)
    launched = installed.epilogues()
    assert (ups in launched) is (lacking == "gradient")
    assert (gradient in launched) is (lacking == "bias")
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


@pytest.mark.parametrize("has_ups", [True, False], ids=["gate behind ups", "two products"])
def test_what_two_weights_keep_for_the_backward(
    has_ups: bool, install: Callable[..., Installed]
) -> None:
    """Gates and ups, and what the gate gave only where a kernel gave it."""
    ups, gradient = Epilogue.parse("swiglu_halves_ups"), Epilogue.parse("swiglu_halves_gradient")
    installed = install({"tn": [None, ups] if has_ups else [None], "tt": [None, gradient]})
    made = of_two_weights(operands_for_kernels())
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    given = {one.untyped_storage().data_ptr() for one in leaves(made)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts(**made)
    assert (ups in installed.epilogues()) is has_ups
    ends = 4 * made["counts"].shape[0]
    assert sum(size for at, size in kept.items() if at not in given) - ends == 18 * 32 * 2 * (
        3 if has_ups else 2
    )


def test_rows_too_long_for_three_parts_have_two(
    install: Callable[..., Installed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the gradient of the gate is still by its kernel."""
    gradient = Epilogue.parse("swiglu_halves_gradient")
    installed = install({"tn": [None, Epilogue.parse("swiglu_halves_ups")], "tt": [None, gradient]})
    monkeypatch.setattr(gated_products, "has_kernel", lambda *_: False)
    made = of_two_weights(operands_for_kernels())
    found = gradients(experts, made)
    assert installed.epilogues() == [None, None, None, gradient, None, None]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


def test_routing_weights_that_need_no_gradient_scale_what_kernels_take(
    install: Callable[..., Installed],
) -> None:
    kept, gradient = Epilogue.parse("swiglu_halves_kept"), Epilogue.parse("swiglu_halves_gradient")
    installed = install({"tn": [None, kept], "tt": [None, gradient]})
    weights = torch.rand(18) + 0.5
    made = operands_for_kernels("down_bias") | {"routing_weights": weights}
    found = gradients(experts, made)
    assert gradient in installed.epilogues()
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("is_pair", [False, True], ids=["one weight", "two weights"])
def test_a_kernel_finds_the_gradients_of_routing_weights(
    activation: str, is_pair: bool, install: Callable[..., Installed]
) -> None:
    """With that of the gate; no product follows, and no other kernel is asked for."""
    gate = Gate(activation)
    forms = (GateForm.KEPT, GateForm.GRADIENT, GateForm.GRADIENT_SUMS)
    kept, gradient, summed = (find_gated(gate, WeightOrder.HALVES, form) for form in forms)
    installed = install({"tn": [None, BIAS, kept], "tt": [None, gradient, summed]})
    made = operands_for_kernels("down_bias", *(["up_bias"] if kept.addend else []))
    if is_pair:
        made = of_two_weights(made)
    made |= {"activation": activation, "routing_weights": (torch.rand(18) + 0.5).requires_grad_()}
    out = experts(**made)
    installed.epilogues()
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves(made), grad, retain_graph=True)
    launched = installed.epilogues()
    assert launched[0] is summed
    assert gradient not in launched
    installed.remove()
    without = install({"tn": [None, BIAS, kept], "tt": [None, gradient]})
    assert_same(list(found), list(torch.autograd.grad(out, leaves(made), grad)), 2**-6)
    assert without.epilogues()[0] is gradient


def test_routing_weights_that_need_no_gradient_want_no_sums(
    install: Callable[..., Installed],
) -> None:
    summed = Epilogue.parse("swiglu_halves_gradient_sums")
    installed = install(
        {"tn": [None, Epilogue.parse("swiglu_halves_kept")],
         "tt": [None, Epilogue.parse("swiglu_halves_gradient"), summed]}
    )  # fmt: skip
    gradients(experts, operands_for_kernels() | {"routing_weights": torch.rand(18)})
    assert summed not in installed.epilogues()


@pytest.mark.parametrize(
    ("frozen", "activation", "expected"),
    [
        ((), "swiglu", [Epilogue.parse("swiglu_halves_gradient")]),
        ((), "swiglu_oai", [Epilogue.parse("swiglu_oai_halves_gradient"), None]),
        (("x", "w_up", "up_bias"), "swiglu", [None]),
        (("x", "w_up", "routing_weights"), "swiglu", []),
        (("w_down",), "swiglu", [Epilogue.parse("swiglu_halves_gradient")]),
    ],
    ids=["all", "ups are cut", "before the gate", "weights of rows, too", "weights of down"],
)
def test_a_kernel_takes_the_gradient_where_it_gives_all_that_is_wanted(
    frozen: tuple[str, ...],
    activation: str,
    expected: list[Epilogue | None],
    install: Callable[..., Installed],
) -> None:
    """The gradient of a row's weight is that of ups times ups. Where those are cut off, it is that
    of the down projection's result times that: its product follows."""
    kept, gradient = (
        find_gated(Gate(activation), WeightOrder.HALVES, form)
        for form in (GateForm.KEPT, GateForm.GRADIENT)
    )
    installed = install({"tn": [None, kept], "tt": [None, gradient]})
    biases = ["up_bias"] if kept.addend else []
    made = operands_for_kernels("down_bias", *biases)
    made["routing_weights"] = (torch.rand(18) + 0.5).requires_grad_()
    for name in {*frozen} & {*made}:
        made[name] = made[name].detach()
    for name in ("x", "w_up"):  # whole numbers, so that both cut off the same gates
        made[name] = made[name].detach().round().requires_grad_(made[name].requires_grad)
    made["activation"] = activation
    out = experts(**made)
    installed.epilogues()
    wanted = [one for one in made.values() if isinstance(one, torch.Tensor) and one.requires_grad]
    found = torch.autograd.grad(out, wanted, torch.ones_like(out))
    assert installed.epilogues()[: len(expected) or 1] == expected
    installed.remove()
    again = experts(**made)
    assert_same(list(found), list(torch.autograd.grad(again, wanted, torch.ones_like(out))), 2**-5)


@pytest.mark.parametrize(
    "setting", ["gather and add", "checkpoint", "autocast", "transposed weights of down"]
)
def test_kernels_have_the_gate_in_training(setting: str, install: Callable[..., Installed]) -> None:
    kept, gradient = Epilogue.parse("swiglu_halves_kept"), Epilogue.parse("swiglu_halves_gradient")
    installed = install({"tn": [None, kept, gradient], "tt": [None, gradient]})
    made = operands_for_kernels()
    call: Callable[..., torch.Tensor] = experts
    if setting == "gather and add":
        made |= {"indices": torch.arange(18) % 11, "combine": True}
        made["x"] = made["x"].detach()[:11].clone().requires_grad_()
    elif setting == "checkpoint":

        def call(**given: Any) -> torch.Tensor:
            def of_rows(x: torch.Tensor) -> torch.Tensor:
                return experts(**{**given, "x": x})

            return checkpoint(of_rows, given["x"], use_reentrant=False)

    elif setting == "autocast":
        for name in ("x", "w_up", "w_down"):
            made[name] = made[name].detach().float().requires_grad_()

        def call(**given: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return experts(**given)

    else:
        made["w_down"] = made["w_down"].detach().mT.contiguous().mT.requires_grad_()
    found = gradients(call, made)
    launched = installed.epilogues()
    assert gradient in launched
    assert launched.count(kept) == (2 if setting == "checkpoint" else 1)
    installed.remove()
    assert_same(found, gradients(call, made), 2**-5)


def test_a_dispatch_mode_sees_operators_in_the_backward_too(
    install: Callable[..., Installed],
) -> None:
    """As selective checkpointing has, and whatever counts what runs."""
    kept, gradient = Epilogue.parse("swiglu_halves_kept"), Epilogue.parse("swiglu_halves_gradient")
    installed = install({"tn": [None, kept], "tt": [None, gradient]})
    made = operands_for_kernels()
    out = experts(**made)
    assert installed.epilogues() == [kept, None]
    with FlopCounterMode(display=False):
        torch.autograd.grad(out, made["x"], torch.ones_like(out))
    assert installed.epilogues() == [None, None]


def test_operators_take_the_gradient_of_a_product_that_a_kernel_kept(
    install: Callable[..., Installed],
) -> None:
    installed = install({"tn": [None, Epilogue.parse("swiglu_halves_kept")], "tt": [None]})
    made = operands_for_kernels()
    found = gradients(experts, made)
    assert installed.epilogues() == [Epilogue.parse("swiglu_halves_kept"), None, None, None]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


def test_what_follows_operators_sees_the_products(install: Callable[..., Installed]) -> None:
    """Fake tensors have no memory, and a recording counts operators."""
    installed = install("tn", Epilogue.parse("swiglu_halves"))
    made = operands_for_kernels()
    calls = GemmCalls("sm_90a")
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), calls:
        experts(**made)
    assert [str(one.signature.op.value) for one in calls.problems.elements()] == ["grouped_mm"] * 2
    assert not installed.launched


def test_a_gate_of_other_constants_than_the_kernels_is_not_its(
    install: Callable[..., Installed],
) -> None:
    installed = install("tn", None, Epilogue.parse("swiglu_oai_halves"))
    made = operands_for_kernels("up_bias") | {"activation": "swiglu_oai"}
    for constants in ({"limit": 6.0}, {"alpha": 1.0}):
        with torch.no_grad():
            found = experts(**made, **constants)
        assert installed.epilogues() == [None, None]
        assert torch.equal(found, experts(**made, **constants))
        installed.launched.clear()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["x", "w_up", "w_down"])
def test_a_negated_view_is_negated(
    name: str, grad: bool, install: Callable[..., Installed]
) -> None:
    """Such as ``z.conj().imag``, whose memory has the other sign."""
    installed = install("tn tt", None, Epilogue.parse("swiglu_halves"))
    made = {each: one.detach() for each, one in operands_for_kernels().items()}
    made["w_up"].requires_grad_(grad)
    expected = experts(**made)
    assert installed.epilogues() == (
        [None] * 2 if grad else [Epilogue.parse("swiglu_halves"), None]
    )
    made[name] = torch._neg_view(-made[name])
    assert torch.equal(experts(**made), expected)
    assert len(installed.epilogues()) == 2


def test_an_unreadable_bundle_is_tried_again(
    install: Callable[..., Installed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an error that passes, nor a kernel that stands in meanwhile, is kept."""
    first = install("tn", None).path
    second = tmp_path / "second.nvgemm"
    second.write_bytes(first.read_bytes())
    use(monkeypatch, first, second)
    monkeypatch.setattr(select, "LOADER", KernelLoader())
    read, tried = Bundle.payload, list[str]()
    unreadable: set[str]

    def payload(bundle: Bundle, kernel: Kernel) -> bytes:
        tried.append(bundle.path.name)
        if bundle.path.name in unreadable:
            raise StorageError(f"{bundle.path}: cannot read: Input/output error")
        return read(bundle, kernel)

    monkeypatch.setattr(Bundle, "payload", payload)
    a, b = torch.ones(18, 32).bfloat16(), torch.ones(4, 32, 32).bfloat16().mT
    ends = torch.tensor([5, 5, 6, 18], dtype=torch.int32)
    for unreadable in ({first.name, second.name}, {first.name}, set()):
        assert (products.rows(a, b, ends) == 32).all()
        assert tried == ([first.name, second.name] if unreadable else [first.name])
        tried.clear()
        monkeypatch.setattr(select, "LOADER", KernelLoader())
