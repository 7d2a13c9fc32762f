"""Experts of tokens, given what a router chose, against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from expert_kernels import Installed, assert_same, gradients, leaves
from nvgemm_runtime.gemm.epilogues import ADD, BIAS, Gate, GateForm, WeightOrder, find_gated
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.moe import (
    backward,
    block,
    experts,
    gates,
    products,
    routed_experts,
    sort_by_expert,
)
from nvgemm_runtime.moe import gradients as gradients_module
from nvgemm_runtime.moe.operators import sum_products
from nvgemm_runtime.moe.routing import gathered_rows, owned_rows

pytestmark = pytest.mark.usefixtures("new_process")

EXPERTS, TOKENS, CHOSEN = 4, 9, 3
DIM, WIDE = 24, 40
"""Rows that are narrower than gates and ups, and wider ones."""
HIDDEN = 16

HERE = [[0, 1, 3], [3, 0, 1], [1, 3, 0]] * 3
"""Expert 2 has no row."""
ELSEWHERE = [[-1, 1, 4], [7, -1, 9], [3, 3, 0], *HERE[:6]]
"""Some choices are experts of other ranks, all of the second token's too; one token chose twice."""


def operands(
    chosen: list[list[int]],
    *,
    dim: int = DIM,
    biases: bool = False,
    dtype: torch.dtype = torch.float64,
    hidden: int = HIDDEN,
) -> dict[str, Any]:
    torch.manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype).requires_grad_()

    made: dict[str, Any] = {
        "x": leaf(len(chosen), dim),
        "w_up": leaf(EXPERTS, 2 * hidden, dim),
        "w_down": leaf(EXPERTS, dim, hidden),
        "chosen": torch.tensor(chosen),
        "routing_weights": torch.rand(len(chosen), CHOSEN, dtype=dtype).requires_grad_(),
    }
    if biases:
        made |= {"up_bias": leaf(EXPERTS, 2 * hidden), "down_bias": leaf(EXPERTS, dim)}
    return made


def reference(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    chosen: torch.Tensor,
    routing_weights: torch.Tensor,
    *,
    activation: str = "swiglu",
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    results = []
    for token, row in enumerate(x):
        result = torch.zeros_like(row)
        for choice, expert in enumerate(chosen[token].tolist()):
            if not 0 <= expert < EXPERTS:
                continue
            both = w_up[expert] @ row
            both = both if up_bias is None else both + up_bias[expert]
            gate, up = both.chunk(2)
            if activation == "swiglu_oai":
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
                hidden = gate * torch.sigmoid(1.702 * gate) * up
            else:
                hidden = functional.silu(gate) * up
            out = w_down[expert] @ hidden
            out = out if down_bias is None else out + down_bias[expert]
            result = result + routing_weights[token, choice] * out
        results.append(result)
    return torch.stack(results)


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("dim", [DIM, WIDE])
@pytest.mark.parametrize("chosen", [HERE, ELSEWHERE], ids=["here", "elsewhere"])
def test_values_and_gradients_are_those_of_a_loop(
    chosen: list[list[int]], dim: int, activation: str, biases: bool
) -> None:
    made = operands(chosen, dim=dim, biases=biases) | {"activation": activation}
    assert_same(gradients(routed_experts, made), gradients(reference, made), 1e-12)


@pytest.mark.parametrize("dim", [DIM, WIDE])
def test_compiled_in_one_graph(dim: int) -> None:
    torch._dynamo.reset()
    made = operands(ELSEWHERE, dim=dim, biases=True)
    compiled = torch.compile(routed_experts, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled, made), gradients(reference, made), 1e-12)


def sorted_operands(made: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `experts` for those of `routed_experts`."""
    routing = sort_by_expert(made["chosen"], EXPERTS)
    weights = made["routing_weights"].detach().reshape(-1)[routing.order].requires_grad_()
    rest = {name: one for name, one in made.items() if name != "chosen"}
    return {
        **rest,
        "offsets": routing.offsets,
        "indices": routing.indices,
        "token_rows": routing.token_rows,
        "routing_weights": weights,
        "combine": True,
    }


def test_rows_of_tokens_change_the_order_of_sums_alone() -> None:
    made = sorted_operands(operands(ELSEWHERE, biases=True))
    without = {**made, "token_rows": None}
    assert_same(gradients(experts, made), gradients(experts, without), 1e-14)


def test_weights_are_optional_and_need_no_gradient() -> None:
    made = operands(ELSEWHERE)
    ones = torch.ones(TOKENS, CHOSEN, dtype=torch.float64)
    expected = gradients(reference, {**made, "routing_weights": ones})
    assert_same(gradients(routed_experts, {**made, "routing_weights": ones}), expected, 1e-12)
    assert_same(gradients(routed_experts, {**made, "routing_weights": None}), expected, 1e-12)


@pytest.mark.parametrize("narrow", [torch.int32, torch.int64])
def test_no_tokens(narrow: torch.dtype) -> None:
    made = operands([]) | {"chosen": torch.zeros(0, CHOSEN, dtype=narrow)}
    out, *grads = gradients(routed_experts, made)
    assert out.shape == (0, DIM)
    assert all(one.shape == leaf.shape for one, leaf in zip(grads, leaves(made)))
    assert not any(one.any() for one in grads)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_rows_behind_the_last_end_may_be_anything(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = operands(ELSEWHERE, biases=True) | {"activation": activation}
    expected = gradients(routed_experts, made)

    def spoiled(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *rest: Any) -> Any:
        out = products.rows(a, b, offsets, *rest)
        out[int(offsets[-1]) :] = torch.nan
        return out

    for module in (backward, block, gates, gradients_module):
        monkeypatch.setattr(module, "rows", spoiled)
    assert_same(gradients(routed_experts, made), expected, 0.0)


def test_a_weight_of_another_ranks_expert_may_be_anything() -> None:
    made = operands(ELSEWHERE)
    elsewhere = (made["chosen"] < 0) | (made["chosen"] >= EXPERTS)
    spoiled = made["routing_weights"].detach().masked_fill(elsewhere, torch.nan).requires_grad_()
    found = gradients(routed_experts, {**made, "routing_weights": spoiled})
    assert_same(found, gradients(routed_experts, made), 0.0)


def test_choices_beyond_32_bits_are_of_other_ranks() -> None:
    chosen = torch.tensor([[2**32, 1], [0, 2**40 + 3]])
    assert sort_by_expert(chosen, EXPERTS).offsets.tolist() == [1, 2, 2, 2]
    with pytest.raises(ValueError, match="experts is 0, must be 1 or more"):
        sort_by_expert(chosen, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [1, 2**15 - 2, 2**15 - 1, 40_000])  # sorted in 16 bits, or 32
def test_any_number_is_an_expert_here_or_of_another_rank(experts: int, dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    elsewhere = [-1, experts, experts + 1, 2**15, 2**16, ends.min, ends.max]
    flat = [one for one in elsewhere if not 0 <= one < experts] + [experts - 1, 0]
    routing = sort_by_expert(torch.tensor([flat], dtype=dtype), experts)
    owned = int(routing.offsets[-1])
    assert owned == 2
    assert [flat[one] for one in routing.order[:owned].tolist()] == sorted([experts - 1, 0])
    assert routing.order[owned:].tolist() == [*range(len(flat) - 2)]
    assert int(routing.offsets[0]) == (2 if experts == 1 else 1)


def test_on_a_gpu_flop_counters_see_operators_that_they_know() -> None:
    with FakeTensorMode(), FlopCounterMode(display=False):
        rows = torch.empty(6, 8, dtype=torch.bfloat16, device="cuda")
        sums = sum_products(rows, rows, is_compiled=False)
        found = gathered_rows(rows, torch.empty(3, 2, dtype=torch.int32, device="cuda"))
    assert (sums.dtype, sums.shape) == (torch.float32, (6,))
    assert (found.dtype, found.shape) == (torch.bfloat16, (3, 8))


# (hidden, dim): gates and ups are wider than rows, and narrower.
@pytest.mark.parametrize(("hidden", "dim"), [(32, 32), (32, 96)], ids=["wide", "narrow"])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("form", [GateForm.GRADIENT, GateForm.GRADIENT_SUMS])
def test_gradients_behind_kernels_have_weights_once(
    activation: str, hidden: int, dim: int, form: GateForm, install: Callable[..., Installed]
) -> None:
    """Operands of 16 bits, weights of 32: near what fp64 gives of the same values."""
    kept, gradient = (
        find_gated(Gate(activation), WeightOrder.HALVES, one) for one in (GateForm.KEPT, form)
    )
    installed = install({"tn": [None, kept, BIAS], "tt": [None, gradient]})
    made = operands(ELSEWHERE, dim=dim, hidden=hidden, biases=True, dtype=torch.float32)
    if kept.addend is None:
        del made["up_bias"]
    made |= {
        name: (one.detach() / 8).bfloat16().requires_grad_()
        for name, one in made.items()
        if name not in ("chosen", "routing_weights")
    }
    made["activation"] = activation
    out = routed_experts(**made)
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, leaves(made), grad)]
    assert {kept, gradient} <= {*installed.epilogues()}
    exact = {
        name: one.detach().double().requires_grad_() if one.is_floating_point() else one
        for name, one in made.items()
        if isinstance(one, torch.Tensor)
    }
    out = reference(**exact, activation=activation)
    expected = [out, *torch.autograd.grad(out, leaves(exact), grad.double())]
    # Values are rounded to 2^-9 a few times on the way.
    assert_same(found, expected, 2**-6)


@pytest.mark.parametrize("is_pair", [False, True], ids=["one weight", "two weights"])
def test_a_kernel_weighs_and_adds_rows(
    is_pair: bool, install: Callable[..., Installed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results in the forward; in the backward rows for up weights, and the tokens' gradient."""
    installed = install("tn tt", None, ADD, gathered=True)
    made = operands(ELSEWHERE, dim=32, hidden=32, dtype=torch.bfloat16)
    if is_pair:
        parts = made["w_up"].chunk(2, 1)
        made["w_up"] = tuple(one.detach().clone().requires_grad_() for one in parts)
    empty = torch.Tensor.new_empty

    def filled(tensor: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        out = empty(tensor, *shape, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)  # of rows that no expert has
    found = gradients(routed_experts, made)
    assert [one.op for one in installed.launched].count(Op.GATHERED_MM) == 3
    installed.remove()
    assert_same(found, gradients(routed_experts, made), 2**-5)


@pytest.mark.parametrize("served", [False, True], ids=["torch", "kernel"])
def test_all_rows_of_a_matrix_in_order(served: bool, install: Callable[..., Installed]) -> None:
    installed = install("tn", None, gathered=True) if served else None
    matrix, weights = torch.randn(9, 40).bfloat16(), torch.randn(9, 1)
    found = gathered_rows(matrix, None, weights)
    assert bool(installed and installed.launched) is served
    assert torch.equal(found, (matrix.float() * weights).bfloat16())


@pytest.mark.parametrize("narrow", [torch.int32, torch.int64])
@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("served", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("chosen", [1, 3])
def test_rows_outside_a_matrix_add_nothing(
    chosen: int,
    served: bool,
    has_weights: bool,
    narrow: torch.dtype,
    install: Callable[..., Installed],
) -> None:
    """Whatever their weights are, and whatever rows hold that nothing names."""
    installed = install("tn", None, gathered=True) if served else None
    torch.manual_seed(0)
    matrix = torch.randn(9, 48).bfloat16()[:, :40]  # rows with gaps
    matrix[8] = torch.nan
    rows = torch.randint(-3, 8, (20, chosen), dtype=narrow)
    rows[rows == -3] = 9
    if narrow is torch.int64:  # that 32 bits would make 1 and 3 of
        rows[0], rows[1] = 2**32 + 1, -(2**32) + 3
    weights = torch.randn(20, chosen).masked_fill((rows < 0) | (rows > 8), torch.inf)
    expected = torch.zeros(20, 40)
    for row, place in (rows.clamp(0, 8) == rows).nonzero().tolist():
        factor = float(weights[row, place]) if has_weights else 1.0
        expected[row] += factor * matrix[int(rows[row, place])].float()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # which changes nothing
    try:
        found = gathered_rows(matrix, rows, weights if has_weights else None)
    finally:
        torch.set_default_dtype(usual)
    assert bool(installed and installed.launched) is served
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("owned", [0, 5, 11, 12])
def test_rows_that_no_expert_has_get_numbers_outside_the_matrix(
    owned: int, dtype: torch.dtype
) -> None:
    token_rows = torch.randperm(12).to(dtype).view(4, 3)
    before = token_rows.clone()
    found = owned_rows(token_rows, torch.tensor([0, owned, owned], dtype=torch.int32))
    assert (found.dtype, found.shape) == (dtype, (4, 3))
    is_here = before < owned
    assert int(is_here.sum()) == owned
    assert torch.equal(found[is_here], before[is_here])
    assert (found[~is_here] >= 12).all()
    assert torch.equal(token_rows, before)


@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("served", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("owned", [0, 5, 12])
def test_sums_of_owned_rows_have_nothing_of_others(
    owned: int, served: bool, has_weights: bool, install: Callable[..., Installed]
) -> None:
    """Whatever is in these, and in their weights."""
    installed = install("tn", None, gathered=True) if served else None
    torch.manual_seed(0)
    matrix, token_rows = torch.randn(12, 32).bfloat16(), torch.randperm(12).view(4, 3)
    matrix[owned:] = torch.nan
    is_here = token_rows < owned
    weights = torch.rand(4, 3).masked_fill(~is_here, torch.nan) if has_weights else None
    ends = torch.tensor([owned, owned], dtype=torch.int32)
    found = gathered_rows(matrix, owned_rows(token_rows, ends), weights)
    assert bool(installed and installed.launched) is served
    factors = is_here.float() if weights is None else weights.nan_to_num(0)
    expected = (matrix.nan_to_num(0).float()[token_rows] * factors[..., None]).sum(1)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7)


def test_sums_of_biases_have_all_of_a_weight() -> None:
    """Also what 16 bits do not hold of it."""
    grad = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16).expand(2, 8).contiguous()
    weights = torch.tensor([1 + 2**-10, 1.0])
    found = backward._bias_gradient(grad, torch.tensor([2], dtype=torch.int32), weights)
    assert found.tolist() == [[2**-10] * 8]


def test_sorting() -> None:
    chosen = torch.tensor(ELSEWHERE)
    routing = sort_by_expert(chosen, EXPERTS)
    counts = [int((chosen == expert).sum()) for expert in range(EXPERTS)]
    assert routing.offsets.diff(prepend=torch.zeros(1)).tolist() == counts
    flat = chosen.reshape(-1)
    begin = 0
    for expert, end in enumerate(routing.offsets.tolist()):
        of_expert = routing.order[begin:end]
        assert set(flat[of_expert].tolist()) <= {expert}
        assert of_expert.tolist() == sorted(of_expert.tolist())
        begin = end
    assert torch.equal(routing.indices, routing.order // CHOSEN)
    assert torch.equal(routing.order[routing.token_rows.reshape(-1)], torch.arange(flat.numel()))


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"chosen": torch.zeros(TOKENS, CHOSEN)}, TypeError, "chosen is torch.float32, must be in"),
        ({"chosen": torch.zeros(TOKENS).int()}, ValueError, r"chosen is \(9,\), must have 2 dim"),
        ({"chosen": None}, TypeError, "chosen is None, must be a tensor"),
        ({"chosen": HERE}, TypeError, "chosen is of type list, must be a tensor"),
        ({"chosen": torch.zeros(TOKENS, CHOSEN).int().to("meta")}, ValueError, "chosen is on meta"),
        ({"x": None}, TypeError, "x is None, must be a tensor"),
        ({"w_down": torch.ones(()).double()}, ValueError, r"w_down is \(\), must have 3 dim"),
        ({"routing_weights": [1.0]}, TypeError, "routing_weights is of type list"),
        ({"chosen": torch.zeros(8, CHOSEN).int()}, ValueError, r"chosen is \(8, 3\).*9 tokens of"),
        (
            {"chosen": torch.zeros(TOKENS, 0).int(), "routing_weights": None},
            ValueError,
            r"chosen is \(9, 0\), must be \[tokens, k\] with k at least 1",
        ),
        (
            {"routing_weights": torch.rand(TOKENS * CHOSEN)},
            ValueError,
            r"routing_weights is \(27,\), m",
        ),
        ({"routing_weights": torch.rand(TOKENS, 2)}, ValueError, r"\(9, 2\), must have the shape"),
        ({"activation": "relu"}, ValueError, "activation is 'relu'"),
        ({"w_down": torch.ones(0, DIM, HIDDEN).double()}, ValueError, "no size may be 0"),
    ],
)
def test_refuses_what_does_not_fit(
    changed: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        routed_experts(**{**operands(HERE), **changed})
