"""The experts' function against a plain loop over experts, and what it refuses."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from expert_kernels import Installed, assert_same, gradients, leaves, operands_for_kernels
from nvgemm_aot.workload.dispatch import GemmCalls
from nvgemm_runtime.gemm.epilogues import Epilogue, Gate, GateForm, WeightOrder, find_gated
from nvgemm_runtime.moe import block, experts, gates, products
from nvgemm_runtime.moe.activations import Activation, GatedActivation
from nvgemm_runtime.settings import DEBUG_VARIABLE

pytestmark = pytest.mark.usefixtures("new_process")

EXPERTS, DIM, HIDDEN, TOKENS = 4, 24, 16, 11
ROUTINGS = {
    "uneven": [5, 0, 1, 12],
    "one expert has all": [0, 0, 18, 0],
    "one row each": [1, 1, 1, 1],
    "no row": [0, 0, 0, 0],
}
ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu")
ORDERS = ("halves", "interleaved", "pair")


def gated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if activation == "swiglu":
        return functional.silu(gate) * up
    if activation == "geglu":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def reference(
    x: torch.Tensor,
    w_up: Any,
    w_down: torch.Tensor,
    *,
    counts: torch.Tensor,
    activation: str = "swiglu",
    weights: str = "halves",
    up_bias: Any = None,
    down_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    routing_weights: torch.Tensor | None = None,
    combine: bool = False,
) -> torch.Tensor:
    """The same by a loop over experts that autograd differentiates."""
    taken = x if indices is None else x[indices]
    outs, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        mine = taken[start : start + count]
        if isinstance(w_up, tuple):
            gate, up = (mine @ one[expert].T for one in w_up)
            if up_bias is not None:
                gate, up = gate + up_bias[0][expert], up + up_bias[1][expert]
        else:
            both = mine @ w_up[expert].T
            if up_bias is not None:
                both = both + up_bias[expert]
            halves = weights == "halves"
            gate, up = both.chunk(2, -1) if halves else (both[:, ::2], both[:, 1::2])
        out = gated(activation, gate, up) @ w_down[expert].T
        outs.append(out if down_bias is None else out + down_bias[expert])
        start += count
    out = torch.cat(outs)
    if routing_weights is not None:
        out = out * routing_weights[:, None]
    return torch.zeros_like(x).index_add(0, indices, out) if combine else out


def operands(
    order: str = "halves",
    *,
    biases: bool = False,
    routing: str = "uneven",
    gather: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Random operands that require gradients, large enough to reach the limit of swiglu_oai."""
    torch.manual_seed(0)
    counts = torch.tensor(ROUTINGS[routing])
    rows = int(counts.sum())

    def leaf(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, dtype=dtype) * scale).requires_grad_()

    made: dict[str, Any] = {"counts": counts, "w_down": leaf(EXPERTS, DIM, HIDDEN)}
    if order == "pair":
        made["w_up"] = (leaf(EXPERTS, HIDDEN, DIM), leaf(EXPERTS, HIDDEN, DIM))
    else:
        made["w_up"] = leaf(EXPERTS, 2 * HIDDEN, DIM)
        made["weights"] = order
    if biases:
        made["down_bias"] = leaf(EXPERTS, DIM)
        pair = (leaf(EXPERTS, HIDDEN), leaf(EXPERTS, HIDDEN))
        made["up_bias"] = pair if order == "pair" else leaf(EXPERTS, 2 * HIDDEN)
    if gather:
        made["indices"] = torch.randint(TOKENS, (rows,))
        made["routing_weights"] = torch.rand(rows, dtype=dtype).requires_grad_()
        made["combine"] = True
    made["x"] = leaf(TOKENS if gather else rows, DIM)
    return made


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("gather", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_a_loop(
    activation: str, order: str, gather: bool, biases: bool
) -> None:
    made = operands(order, biases=biases, gather=gather)
    made["activation"] = activation
    assert_same(gradients(experts, made), gradients(reference, made), 1e-12)


@pytest.mark.parametrize("gather", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_distribution_of_rows(routing: str, gather: bool) -> None:
    made = operands(routing=routing, biases=True, gather=gather)
    assert_same(gradients(experts, made), gradients(reference, made), 1e-12)


def test_offsets_are_the_sums_of_counts() -> None:
    made = operands()
    ends = made["counts"].cumsum(0)
    rest = {name: one for name, one in made.items() if name != "counts"}
    for offsets in (ends, ends.to(torch.int32)):
        assert torch.equal(experts(offsets=offsets, **rest), experts(**made))


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "geglu"])
def test_no_rows_have_gradients_of_routing_weights(activation: str) -> None:
    weights = torch.rand(0, requires_grad=True)
    x, w_up, w_down = (
        torch.randn(*shape, requires_grad=True) for shape in ((7, 32), (4, 64, 32), (4, 32, 32))
    )
    out = experts(
        x, w_up, w_down, counts=torch.zeros(4, dtype=torch.int32), activation=activation,
        indices=torch.zeros(0, dtype=torch.int64), routing_weights=weights, combine=True,
    )  # fmt: skip
    out.sum().backward()
    assert weights.grad is not None
    assert weights.grad.shape == (0,)
    for one in (x, w_up, w_down):
        assert one.grad is not None
        assert not one.grad.any()


def test_routing_weights_without_combine_scale_rows() -> None:
    made = operands(gather=True)
    made["combine"] = False
    assert_same(gradients(experts, made), gradients(reference, made), 1e-12)


def test_rows_past_the_last_end_add_nothing() -> None:
    made = operands(gather=True, biases=True)
    expected = gradients(experts, made)
    longer = dict(made)
    longer["indices"] = functional.pad(made["indices"], (0, 3))
    weights = functional.pad(made["routing_weights"].detach(), (0, 3), value=1.0).requires_grad_()
    longer["routing_weights"] = weights
    found = gradients(experts, longer)
    place = next(index for index, one in enumerate(leaves(longer), start=1) if one is weights)
    assert not found[place][-3:].any()
    found[place] = found[place][:-3]
    assert_same(found, expected, 1e-12)


def test_transposed_weights_are_served_and_their_gradients_lie_alike() -> None:
    made = operands()
    stored = made["w_up"].detach().mT.contiguous().requires_grad_()
    viewed = {**made, "w_up": stored.mT}
    out = experts(**viewed)
    (found,) = torch.autograd.grad(out.sum(), stored)
    (expected,) = torch.autograd.grad(experts(**made).sum(), made["w_up"])
    torch.testing.assert_close(found, expected.mT)
    assert found.is_contiguous()


def test_weights_with_gaps_between_elements() -> None:
    made = operands()
    wide = made["w_down"].detach().repeat_interleave(2, -1).repeat_interleave(2, -2)
    found = experts(**{**made, "w_down": wide[:, ::2, ::2]})
    torch.testing.assert_close(found, experts(**made))


def test_bf16_errs_no_more_than_torch_does() -> None:
    """Without kernels both round the activation's parts."""
    made = operands("pair", dtype=torch.bfloat16)
    exact = {
        name: tuple(part.double() for part in one)
        if isinstance(one, tuple)
        else one.double()
        if isinstance(one, torch.Tensor) and one.is_floating_point()
        else one
        for name, one in made.items()
    }
    expected = reference(**exact)

    def error(out: torch.Tensor) -> float:
        return float((out.double() - expected).detach().norm())

    assert error(experts(**made)) <= error(reference(**made))


def test_gpt_oss_activation_is_rounded_once() -> None:
    """By operators in bf16 it would be rounded five times."""
    activation = GatedActivation(kind=Activation.SWIGLU_OAI, alpha=1.702, limit=7.0)
    plan = gates.Plan(
        activation=activation,
        order=WeightOrder.HALVES,
        combine=False,
        wants_grad=True,
        uses_kernels=True,
    )
    torch.manual_seed(0)
    gate, up = (4 * torch.randn(33, 24)).bfloat16(), (4 * torch.randn(33, 24)).bfloat16()
    exact = activation.apply(gate.float(), up.float())
    assert torch.equal(gates.activated(plan, gate, up), exact.bfloat16())
    assert not torch.equal(activation.apply(gate, up), exact.bfloat16())


def test_a_weight_that_requires_no_grad_gets_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    made = operands()
    made["w_up"] = made["w_up"].detach()
    seen: list[tuple[int, ...]] = []
    computed = products._torch_columns

    def counted(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        seen.append((a.shape[1], b.shape[1]))
        return computed(a, b, offsets)

    monkeypatch.setattr(products, "_torch_columns", counted)
    experts(**made).sum().backward()
    assert seen == [(DIM, HIDDEN)]
    assert made["x"].grad is not None


def test_gradients_accumulate() -> None:
    made = operands()
    for _ in range(2):
        experts(**made).sum().backward()
    (expected,) = torch.autograd.grad(experts(**made).sum(), made["w_up"])
    torch.testing.assert_close(made["w_up"].grad, 2 * expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    made = operands(gather=True)

    def checkpointed(**given: Any) -> torch.Tensor:
        rest = {name: one for name, one in given.items() if name != "x"}
        function = functools.partial(experts, **rest)
        out: torch.Tensor = checkpoint(function, given["x"], use_reentrant=reentrant)
        return out

    out = checkpointed(**made)
    out.sum().backward()
    found = [one.grad for one in leaves(made)]
    expected = torch.autograd.grad(experts(**made).sum(), leaves(made))
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_autocast_computes_in_its_type_and_gives_gradients_in_the_weights() -> None:
    made = operands(gather=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(**made)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert all(one.grad is not None and one.grad.dtype is torch.float32 for one in leaves(made))


def test_what_is_saved_is_free_before_the_last_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays where the graph is retained, for which a second backward gives the same."""
    made = operands(routing="uneven")
    out = experts(**made)
    saved = weakref.ref(out.grad_fn.saved_tensors[8].untyped_storage())
    lives: list[bool] = []
    multiply = block.rows

    def watched(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        lives.append(saved() is not None)
        return multiply(a, b, *rest)

    monkeypatch.setattr(block, "rows", watched)
    leaves = (made["x"], made["w_up"], made["w_down"])
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    assert lives == [True]  # when the gradient of x is made
    again = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert lives == [True, False]
    assert_same(list(first), list(again), 0.0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_double_backward_is_refused() -> None:
    made = operands()
    out = experts(**made)
    with pytest.raises(RuntimeError, match="without create_graph=True"):
        torch.autograd.grad(out.sum(), made["x"], create_graph=True)


@pytest.mark.parametrize("order", ORDERS)
def test_compiles_to_one_graph(order: str) -> None:
    torch._dynamo.reset()
    made = operands(order, biases=True, gather=True, dtype=torch.float32)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled, made), gradients(experts, made), 1e-5)


def test_inductor_compiles_it() -> None:
    torch._dynamo.reset()
    made = operands(dtype=torch.float32)
    compiled = torch.compile(experts, fullgraph=True)
    assert_same(gradients(compiled, made), gradients(experts, made), 1e-5)


def test_a_kernel_computes_where_one_serves(install: Callable[..., Installed]) -> None:
    installed = install("tn tt", None)
    made = operands_for_kernels()
    found = gradients(experts, made)
    assert [one.layout.value for one in installed.launched] == ["tn", "tn", "tt", "tt"]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-6)
    assert len(installed.launched) == 4


def test_a_kernel_adds_the_biases(install: Callable[..., Installed]) -> None:
    installed = install("tn", None, Epilogue.BIAS)
    made = operands_for_kernels("up_bias", "down_bias")
    found = experts(**made)
    assert installed.epilogues() == [Epilogue.BIAS] * 2
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
    gradient = Epilogue.SWIGLU_HALVES_GRADIENT
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


@pytest.mark.parametrize("lacking", ["activation", "bias", "kernel of gates", "gradient"])
def test_two_weights_do_without_the_gate_where_it_cannot_be(
    lacking: str, install: Callable[..., Installed]
) -> None:
    """Of gpt-oss, whose models have one weight; with biases; or where a kernel is missing."""
    ups, gradient = Epilogue.SWIGLU_HALVES_UPS, Epilogue.SWIGLU_HALVES_GRADIENT
    tn: list[Epilogue | None] = [ups] if lacking == "kernel of gates" else [None, ups]
    tn += [Epilogue.BIAS] if lacking == "bias" else []
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
    ups, gradient = Epilogue.SWIGLU_HALVES_UPS, Epilogue.SWIGLU_HALVES_GRADIENT
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
    gradient = Epilogue.SWIGLU_HALVES_GRADIENT
    installed = install({"tn": [None, Epilogue.SWIGLU_HALVES_UPS], "tt": [None, gradient]})
    monkeypatch.setattr(gates, "serves_ups", lambda *_: False)
    made = of_two_weights(operands_for_kernels())
    found = gradients(experts, made)
    assert installed.epilogues() == [None, None, None, gradient, None, None]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


@pytest.mark.parametrize("order", ORDERS)
def test_selective_checkpointing_may_save_all_or_nothing(order: str) -> None:
    """A mode that keeps what operators give refuses whatever writes into that."""
    made = operands(order)
    expected = gradients(experts, made)
    for kept in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE):

        def call(kept: CheckpointPolicy = kept, **given: Any) -> torch.Tensor:
            contexts = functools.partial(
                create_selective_checkpoint_contexts, lambda *_, **__: kept
            )
            found: torch.Tensor = checkpoint(
                experts, **given, use_reentrant=False, context_fn=contexts
            )
            return found

        assert_same(gradients(call, made), expected, 0.0)


def test_routing_weights_that_need_no_gradient_scale_what_kernels_take(
    install: Callable[..., Installed],
) -> None:
    kept, gradient = Epilogue.SWIGLU_HALVES_KEPT, Epilogue.SWIGLU_HALVES_GRADIENT
    installed = install({"tn": [None, kept], "tt": [None, gradient]})
    weights = torch.rand(18) + 0.5
    made = operands_for_kernels("down_bias") | {"routing_weights": weights}
    found = gradients(experts, made)
    assert gradient in installed.epilogues()
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


@pytest.mark.parametrize(
    ("frozen", "activation", "expected"),
    [
        ((), "swiglu", [Epilogue.SWIGLU_HALVES_GRADIENT]),
        ((), "swiglu_oai", [Epilogue.SWIGLU_OAI_HALVES_GRADIENT, None]),
        (("x", "w_up", "up_bias"), "swiglu", [None]),
        (("x", "w_up", "routing_weights"), "swiglu", []),
        (("w_down",), "swiglu", [Epilogue.SWIGLU_HALVES_GRADIENT]),
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
    kept, gradient = Epilogue.SWIGLU_HALVES_KEPT, Epilogue.SWIGLU_HALVES_GRADIENT
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
    kept, gradient = Epilogue.SWIGLU_HALVES_KEPT, Epilogue.SWIGLU_HALVES_GRADIENT
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
    installed = install({"tn": [None, Epilogue.SWIGLU_HALVES_KEPT], "tt": [None]})
    made = operands_for_kernels()
    found = gradients(experts, made)
    assert installed.epilogues() == [Epilogue.SWIGLU_HALVES_KEPT, None, None, None]
    installed.remove()
    assert_same(found, gradients(experts, made), 2**-5)


def test_what_follows_operators_sees_the_products(install: Callable[..., Installed]) -> None:
    """Fake tensors have no memory, and a recording counts operators."""
    installed = install("tn", Epilogue.SWIGLU_HALVES)
    made = operands_for_kernels()
    calls = GemmCalls("sm_90a")
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), calls:
        experts(**made)
    assert [str(one.signature.op.value) for one in calls.problems.elements()] == ["grouped_mm"] * 2
    assert not installed.launched


def test_a_gate_of_other_constants_than_the_kernels_is_not_its(
    install: Callable[..., Installed],
) -> None:
    installed = install("tn", None, Epilogue.SWIGLU_OAI_HALVES)
    made = operands_for_kernels("up_bias") | {"activation": "swiglu_oai"}
    for constants in ({"limit": 6.0}, {"alpha": 1.0}):
        with torch.no_grad():
            found = experts(**made, **constants)
        assert installed.epilogues() == [None, None]
        assert torch.equal(found, experts(**made, **constants))
        installed.launched.clear()


def test_what_is_in_fp32_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that do not divide into whole pieces, with all that is computed between products."""
    made = operands("interleaved", biases=True, gather=True)
    expected = gradients(experts, made)
    monkeypatch.setattr(gates, "_PIECE", 5 * HIDDEN)
    activation = GatedActivation(kind=Activation.SWIGLU, alpha=1.702, limit=7.0)
    plan = gates.Plan(
        activation=activation, order=None, combine=False, wants_grad=True, uses_kernels=True
    )
    assert len(gates._pieces(plan, torch.empty(18, HIDDEN))) == 4
    assert_same(gradients(experts, made), expected, 1e-15)


def test_one_warning_where_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_warned", set())
    with pytest.warns(UserWarning, match="torch computes a grouped product"):
        experts(**operands(dtype=torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experts(**operands(routing="one row each", dtype=torch.bfloat16)).sum().backward()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"offsets": [5, 4, 6, 18]}, r"offsets\[1\] is 4, must be in 5..18"),
        ({"offsets": [5, 5, 6, 19]}, r"offsets\[3\] is 19, must be in 6..18"),
        ({"offsets": [-1, 5, 6, 18]}, r"offsets\[0\] is -1, must be in 0..18"),
        ({"offsets": [5, 5, 6, 2**32 + 18]}, "is 4294967314, must be in 6..18"),
        ({"counts": [5, -1, 1, 12]}, r"counts\[1\] is -1, must be in 0..13"),
        ({"counts": [5, 0, 2, 12]}, r"counts\[3\] is 12, must be in 0..11"),
        ({"indices": [0] * 17 + [TOKENS]}, r"indices\[17\] is 11, must be in 0..10"),
        ({"indices": [-1] + [0] * 17}, r"indices\[0\] is -1, must be in 0..10"),
    ],
)
def test_debugging_refuses_values_out_of_range(
    changed: dict[str, list[int]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    made = operands(gather=True)
    experts(**made)
    if "offsets" in changed:
        del made["counts"]
    made |= {name: torch.tensor(values) for name, values in changed.items()}
    with pytest.raises(ValueError, match=message):
        experts(**made)


def test_debugging_checks_ends_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    torch._dynamo.reset()
    made = operands(dtype=torch.float32)
    made["counts"] = torch.tensor([5, 0, 2, 12])
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="ends at row 19"):
        compiled(**made)


def fp64(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def integers(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


PAIR = (fp64(EXPERTS, HIDDEN, DIM), fp64(EXPERTS, HIDDEN, DIM))


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"activation": "relu"}, ValueError, "activation is 'relu'"),
        ({"weights": "thirds"}, ValueError, "weights is 'thirds'"),
        ({"counts": None}, ValueError, "either offsets or counts"),
        ({"offsets": integers(EXPERTS)}, ValueError, "either offsets or counts"),
        ({"x": None}, TypeError, "x is None, must be a tensor"),
        ({"w_up": list(PAIR)}, TypeError, "w_up is of type list"),
        ({"w_up": (*PAIR, PAIR[0])}, ValueError, "w_up has 3 tensors, must be a pair"),
        ({"w_up": (PAIR[0], None)}, TypeError, r"w_up\[1\] is None"),
        ({"counts": torch.ones(EXPERTS)}, TypeError, "counts is torch.float32, must be one of int"),
        ({"counts": integers(EXPERTS).cfloat()}, TypeError, "counts is torch.complex64"),
        ({"counts": integers(EXPERTS).bool()}, TypeError, "counts is torch.bool"),
        ({"indices": fp64(18)}, TypeError, "indices is torch.float64, must be one of int32, int64"),
        ({"w_down": fp64(4, DIM, HIDDEN).cfloat()}, TypeError, "w_down is torch.complex64"),
        ({"x": fp64(18, DIM).to(torch.float8_e4m3fn)}, TypeError, "must be one of bfloat16, flo"),
        ({"x": fp64(18, DIM).bfloat16()}, TypeError, "w_up is torch.float64, x is torch.bfloat16"),
        ({"w_up": (PAIR[0], PAIR[1].half())}, TypeError, r"w_up\[1\] is torch.float16, x is"),
        ({"counts": integers(EXPERTS).to("meta")}, ValueError, "counts is on meta, x on cpu"),
        ({"w_up": (PAIR[0], PAIR[1].to("meta"))}, ValueError, r"w_up\[1\] is on meta"),
        ({"x": fp64(2, 9, DIM)}, ValueError, r"x is \(2, 9, 24\), must have 2 dim.*tokens, dim"),
        ({"x": fp64(18, 7)}, ValueError, r"x is \(18, 7\), must be \(18, 24\)"),
        ({"w_up": fp64(32, DIM)}, ValueError, r"w_up is \(32, 24\), must have 3 dim.*2 \* hidden"),
        (
            {"w_up": (PAIR[0], PAIR[1].mT)},
            ValueError,
            r"w_up\[1\] is \(4, 24, 16\), must be \(4, 16",
        ),
        ({"w_down": fp64(DIM, HIDDEN)}, ValueError, "w_down is .*must have 3 dim"),
        ({"w_down": fp64(EXPERTS, DIM, 9)}, ValueError, r"w_up is .*must be \(4, 18, 24\)"),
        ({"w_down": fp64(0, DIM, HIDDEN)}, ValueError, "no size may be 0"),
        ({"w_down": fp64(EXPERTS, DIM, 0)}, ValueError, "no size may be 0"),
        ({"counts": integers(3)}, ValueError, r"counts is \(3,\), must be \(4,\): \[experts\]"),
        ({"indices": integers()}, ValueError, r"indices is \(\), must have 1 dimensions: \[rows"),
        ({"routing_weights": fp64(17)}, ValueError, r"routing_weights is \(17,\), must be \(18,\)"),
        ({"down_bias": fp64(EXPERTS, 7)}, ValueError, r"down_bias is .*must be \(4, 24\)"),
        ({"combine": True}, ValueError, "combine needs indices"),
        ({"up_bias": (fp64(1), fp64(1))}, ValueError, "must be a pair exactly"),
        ({"w_up": PAIR, "up_bias": fp64(1)}, ValueError, "must be a pair exactly"),
        (
            {"w_up": PAIR, "up_bias": (fp64(4, HIDDEN), fp64(4, 3))},
            ValueError,
            r"up_bias\[1\] is \(4, 3\), must be \(4, 16\)",
        ),
    ],
)
def test_refuses_what_does_not_fit(
    changed: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        experts(**{**operands(), **changed})


@pytest.mark.parametrize("gather", [False, True], ids=["rows", "tokens"])
def test_tensors_without_memory_have_a_result_without_memory(gather: bool) -> None:
    made = operands(gather=gather)
    there = {name: one.to("meta") if torch.is_tensor(one) else one for name, one in made.items()}
    out = experts(**there)
    assert out.device.type == "meta"
    assert out.shape == experts(**made).shape


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["x", "w_up", "w_down"])
def test_a_negated_view_is_negated(
    name: str, grad: bool, install: Callable[..., Installed]
) -> None:
    """Such as ``z.conj().imag``, whose memory has the other sign."""
    installed = install("tn tt", None, Epilogue.SWIGLU_HALVES)
    made = {each: one.detach() for each, one in operands_for_kernels().items()}
    made["w_up"].requires_grad_(grad)
    expected = experts(**made)
    assert installed.epilogues() == ([None] * 2 if grad else [Epilogue.SWIGLU_HALVES, None])
    made[name] = torch._neg_view(-made[name])
    assert torch.equal(experts(**made), expected)
    assert len(installed.epilogues()) == 2


class Wrapped(torch.Tensor):
    """A tensor that handles operators itself, as those of quantized or sharded weights do."""

    operators: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.operators.append(str(operator))
        args, kwargs = tree_map_only(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, operator(*args, **kwargs))


@pytest.mark.parametrize("name", ["w_up", "w_down"])
def test_a_weight_that_handles_operators_sees_its_product(
    name: str, install: Callable[..., Installed]
) -> None:
    install("tn", None, Epilogue.SWIGLU_HALVES)
    made = {name: one.detach() for name, one in operands_for_kernels().items()}
    expected = experts(**made)
    made[name] = Wrapped(made[name])
    Wrapped.operators.clear()
    found = experts(**made)
    assert isinstance(found, Wrapped)
    assert "nvgemm_moe.rows.default" in Wrapped.operators
    assert_same([found.inner], [expected], 2**-5)
