"""The experts' function against a plain loop over experts, and what it refuses."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from expert_kernels import Installed, assert_same, gradients, leaves, operands_for_kernels
from nvgemm_runtime.gemm.epilogues import Epilogue, Gate, WeightOrder
from nvgemm_runtime.moe import backward, experts, kernels, operators, products
from nvgemm_runtime.moe.activations import GatedActivation
from nvgemm_runtime.moe.plan import ExpertsPlan, KernelUse, activate, pieces_of
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
    activation = GatedActivation(kind=Gate.SWIGLU_OAI, alpha=1.702, limit=7.0)
    plan = ExpertsPlan(
        activation=activation,
        order=WeightOrder.HALVES,
        combine=False,
        wants_grad=True,
        kernels=KernelUse.LAUNCHED,
    )
    torch.manual_seed(0)
    gate, up = (4 * torch.randn(33, 24)).bfloat16(), (4 * torch.randn(33, 24)).bfloat16()
    exact = activation.apply(gate.float(), up.float())
    assert torch.equal(activate(plan, gate, up), exact.bfloat16())
    assert not torch.equal(activation.apply(gate, up), exact.bfloat16())


def test_a_weight_that_requires_no_grad_gets_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    made = operands()
    made["w_up"] = made["w_up"].detach()
    seen: list[tuple[int, ...]] = []
    computed = products.columns_by_torch

    def counted(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        seen.append((a.shape[1], b.shape[1]))
        return computed(a, b, offsets)

    monkeypatch.setattr(products, "columns_by_torch", counted)
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
    kept = [one for one in out.grad_fn.saved_tensors if one is not None]
    (product,) = (one for one in kept if one.shape == (len(out), 2 * HIDDEN))
    saved = weakref.ref(product.untyped_storage())
    del kept, product
    lives: list[bool] = []
    multiply = backward.rows

    def watched(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        lives.append(saved() is not None)
        return multiply(a, b, *rest)

    monkeypatch.setattr(backward, "rows", watched)
    leaves = (made["x"], made["w_up"], made["w_down"])
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    assert lives == [True]  # when the gradient of x is made
    again = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert lives == [True, False]
    assert_same(list(first), list(again), 0.0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_rows_that_are_taken_are_free_before_the_gradient_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = operands(gather=True)
    out = experts(**made)
    taken: list[Any] = []
    lives: list[bool] = []
    multiply, by_columns = backward.rows, backward.weight_gradient

    def kept(grad: torch.Tensor, of_rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        taken.append(weakref.ref(of_rows.untyped_storage()))
        return by_columns(grad, of_rows, *rest)

    def watched(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        lives.extend(one() is not None for one in taken)
        return multiply(a, b, *rest)

    monkeypatch.setattr(backward, "weight_gradient", kept)
    monkeypatch.setattr(backward, "rows", watched)
    leaves = (made["x"], made["w_up"], made["w_down"])
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert lives == [False, False]  # of both weights


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


def test_what_is_in_fp32_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that do not divide into whole pieces, with all that is computed between products."""
    made = operands("interleaved", biases=True, gather=True)
    expected = gradients(experts, made)
    monkeypatch.setattr(operators, "PIECE", 5 * HIDDEN)
    activation = GatedActivation(kind=Gate.SWIGLU, alpha=1.702, limit=7.0)
    plan = ExpertsPlan(
        activation=activation,
        order=None,
        combine=False,
        wants_grad=True,
        kernels=KernelUse.LAUNCHED,
    )
    assert len(pieces_of(plan, torch.empty(18, HIDDEN))) == 4
    assert_same(gradients(experts, made), expected, 1e-15)


def test_one_warning_where_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_warned", set())
    with pytest.warns(UserWarning, match="torch computes a grouped GEMM"):
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
        ({"token_rows": [*range(17), 18]}, r"token_rows\[8, 1\] is 18, must be in 0..17; take"),
        (
            {"token_rows": [1, 0, *range(2, 16), 0, 17]},
            "is 0, which is a row of token 0 in indices",
        ),
        (
            {"token_rows": [0, 0, *range(2, 18)]},
            "is 0, as an earlier element is",
        ),
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
    if "token_rows" in changed:
        made["x"] = made["x"].detach()[:9]
        made["indices"] = torch.arange(18) // 2
        experts(**made, token_rows=torch.arange(18).view(9, 2))
    made |= {name: torch.tensor(values) for name, values in changed.items()}
    if "token_rows" in changed:
        made["token_rows"] = made["token_rows"].view(9, 2)
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
        ({"token_rows": integers(9, 2)}, ValueError, "token_rows needs indices"),
        (
            {"token_rows": integers(18)},
            ValueError,
            "token_rows is .* must have 2 dim",
        ),
        (
            {"indices": integers(18), "token_rows": integers(18, 2)},
            ValueError,
            r"token_rows is \(18, 2\), must be \[tokens, k\] with k at least 1 and an element for "
            "each of the 18",
        ),
        ({"up_bias": (fp64(1), fp64(1))}, ValueError, "must both be pairs, or neither"),
        ({"w_up": PAIR, "up_bias": fp64(1)}, ValueError, "must both be pairs, or neither"),
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
    install("tn", None, Epilogue.parse("swiglu_halves"))
    made = {name: one.detach() for name, one in operands_for_kernels().items()}
    expected = experts(**made)
    made[name] = Wrapped(made[name])
    Wrapped.operators.clear()
    found = experts(**made)
    assert isinstance(found, Wrapped)
    assert "nvgemm_moe.rows.default" in Wrapped.operators
    assert_same([found.inner], [expected], 2**-5)
