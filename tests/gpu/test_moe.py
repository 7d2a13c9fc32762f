"""Experts forward and backward by bundled kernels: values, CUDA graphs, streams.

Needs the wheel of grouped.yaml. The kernels by themselves are in `test_grouped` and
`test_k_grouped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.epilogues import ADD, Gate, GateForm, WeightOrder, find_gated
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.launch import select
from nvgemm_runtime.launch.loading.loader import LoadedKernel
from nvgemm_runtime.moe import experts, kernels, routed_experts, sort_by_expert

DEVICE = "cuda"
EXPERTS, DIM, HIDDEN = 6, 256, 384
COUNTS = (700, 0, 1, 129, 1, 256)
Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel looked up yet; that torch computes what is in fp32 is no news."""
    monkeypatch.setattr(select, "_cache", {})
    monkeypatch.setattr(kernels, "_warned", {*kernels.WARNINGS})


def operands(dtype: torch.dtype = torch.bfloat16, *, biased: bool = False) -> Tensors:
    drawn = torch.Generator(DEVICE).manual_seed(5)
    shapes = [(sum(COUNTS), DIM), (EXPERTS, 2 * HIDDEN, DIM), (EXPERTS, DIM, HIDDEN)]
    shapes += [(EXPERTS, 2 * HIDDEN), (EXPERTS, DIM)] if biased else []
    return [
        (torch.randn(shape, device=DEVICE, generator=drawn) * shape[-1] ** -0.5)
        .to(dtype)
        .requires_grad_()
        for shape in shapes
    ]


def ends(counts: Sequence[int] = COUNTS) -> torch.Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32)


def run(given: Tensors, *, offsets: torch.Tensor | None = None, **options: Any) -> Tensors:
    """The result, and the gradients of all operands."""
    x, up, down, *biases = given
    named = dict(zip(("up_bias", "down_bias"), biases))
    out = experts(x, up, down, ends() if offsets is None else offsets, **named, **options)
    grads = torch.autograd.grad(out, given, torch.ones_like(out))
    return [out.detach(), *grads]


def is_by_kernels() -> bool:
    results = select._cache.values()
    return bool(results) and all(isinstance(result, LoadedKernel) for result in results)


def searched_kernels() -> list[Kernel]:
    """The kernels that were looked up."""
    results = select._cache.values()
    return [result.kernel for result in results if isinstance(result, LoadedKernel)]


def error(found: Tensors, wanted: Tensors) -> list[float]:
    return [float((a.float() - b.float()).norm() / b.norm()) for a, b in zip(found, wanted)]


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu_oai"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_no_further_from_fp32_than_by_torch(
    activation: str, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands(biased=biased)
    own = run(given, activation=activation)
    assert is_by_kernels()
    wide = [one.detach().float().requires_grad_() for one in given]
    wanted = run(wide, activation=activation)
    monkeypatch.setattr(select, "_cache", {})
    monkeypatch.setattr(kernels, "launch", lambda *_: "no kernel")
    by_torch = run(given, activation=activation)
    # Both round products to bf16 once; what else differs is the order of fp32 sums.
    for ours, theirs in zip(error(own, wanted), error(by_torch, wanted)):
        assert ours <= 1.05 * theirs + 1e-6


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_two_weights_are_at_most_half_as_far_again_from_fp32_as_one(activation: str) -> None:
    x, up, down = operands()
    gates, ups = (one.detach().clone().requires_grad_() for one in up.chunk(2, 1))

    def run_of_two(*given: torch.Tensor) -> Tensors:
        first, gate, other, last = given
        out = experts(first, (gate, other), last, ends(), activation=activation)
        return [out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out))]

    found = run_of_two(x, gates, ups, down)
    assert is_by_kernels()
    looked_up = {kernel.signature.epilogue for kernel in searched_kernels()}
    forms = (GateForm.UPS, GateForm.GRADIENT)
    expected = {find_gated(Gate(activation), WeightOrder.HALVES, form) for form in forms}
    assert looked_up == {None, ADD, *expected}
    wide = [one.detach().float().requires_grad_() for one in (x, gates, ups, down)]
    wanted = run_of_two(*wide)
    out, of_x, *_, of_down = run([x, up, down], activation=activation)
    of_one = error([out, of_x, of_down], [wanted[0], wanted[1], wanted[-1]])
    of_two = error([found[0], found[1], found[-1]], [wanted[0], wanted[1], wanted[-1]])
    # Gates are rounded before the activation, and one gradient of x before another is added.
    for two, one in zip(of_two, of_one):
        assert two <= 1.5 * one
    assert max(error(found[2:4], wanted[2:4])) < 1e-2


@pytest.mark.parametrize(
    ("activation", "order"),
    [("swiglu", "halves"), ("geglu", "halves"), ("swiglu_oai", "interleaved")],
)
def test_without_gradients_a_kernel_has_the_gate(activation: str, order: str) -> None:
    given = operands(biased=activation == "swiglu_oai")
    x, up, down, *biases = given
    named = dict(zip(("up_bias", "down_bias"), biases))
    options: dict[str, Any] = {"activation": activation, "weights": order, **named}
    with torch.no_grad():
        out = experts(x, up, down, ends(), **options)
    assert is_by_kernels()
    assert any(kernel.signature.is_gated for kernel in searched_kernels())
    rounded = experts(x, up, down, ends(), **options)
    wide = {name: one.float() for name, one in named.items()}
    exact = experts(x.float(), up.float(), down.float(), ends(), **{**options, **wide})
    # The up projection is not rounded on the way.
    assert error([out], [exact]) <= error([rounded], [exact])


TOKENS, CHOSEN = 301, 3


def by_a_loop(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    chosen: torch.Tensor,
    routing_weights: torch.Tensor,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Experts one after the other: swiglu of halves, or with biases gpt-oss' of neighbours."""
    sums = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(w_down.shape[0]):
        tokens, choice = torch.nonzero(chosen == expert, as_tuple=True)
        both = x[tokens] @ w_up[expert].T
        if up_bias is None or down_bias is None:
            gate, up = both.chunk(2, -1)
            result = (torch.nn.functional.silu(gate) * up) @ w_down[expert].T
        else:
            both = both + up_bias[expert]
            gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            result = hidden @ w_down[expert].T + down_bias[expert]
        weighted = result.float() * routing_weights[tokens, choice, None]
        sums = sums.index_add(0, tokens, weighted)
    return sums.to(x.dtype)


def routed(
    given: Tensors, chosen: torch.Tensor, scores: torch.Tensor, run: Any = routed_experts
) -> Tensors:
    """The result from tokens to tokens, and the gradients of all operands and of scores."""
    x, up, down, *biases = given
    named: dict[str, Any] = dict(zip(("up_bias", "down_bias"), biases))
    if biases:
        named |= {"activation": "swiglu_oai", "weights": "interleaved"}
    out = run(x, up, down, chosen, scores, **named)
    drawn = torch.Generator(DEVICE).manual_seed(7)
    grad = torch.randn(out.shape, device=DEVICE, generator=drawn).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [*given, scores], grad)]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["called", "compiled"])
@pytest.mark.parametrize("scores_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [DIM, 4 * HIDDEN], ids=["wide", "narrow"])
@pytest.mark.parametrize("biased", [False, True], ids=["swiglu", "swiglu_oai"])
def test_tokens_to_tokens_no_further_from_fp32_than_by_torch(
    biased: bool, dim: int, scores_dtype: torch.dtype, is_compiled: bool
) -> None:
    """With choices that are experts of another rank, whose rows hold what memory held before."""
    drawn = torch.Generator(DEVICE).manual_seed(6)
    shapes = [(TOKENS, dim), (EXPERTS, 2 * HIDDEN, dim), (EXPERTS, dim, HIDDEN)]
    shapes += [(EXPERTS, 2 * HIDDEN), (EXPERTS, dim)] if biased else []
    given = [
        (torch.randn(shape, device=DEVICE, generator=drawn) * shape[-1] ** -0.5)
        .bfloat16()
        .requires_grad_()
        for shape in shapes
    ]
    chosen = torch.rand(TOKENS, EXPERTS + 2, device=DEVICE, generator=drawn).topk(CHOSEN).indices
    scores = torch.rand(TOKENS, CHOSEN, device=DEVICE, generator=drawn).to(scores_dtype)
    scores.requires_grad_()
    run = routed_experts
    if is_compiled:
        torch._dynamo.reset()
        run = torch.compile(routed_experts, fullgraph=True)
    junk = torch.full((TOKENS * CHOSEN * 4, dim), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    del junk
    own = routed(given, chosen, scores, run)
    assert is_by_kernels()
    assert {Op.GATHERED_MM, Op.GATHERED_GROUPED_MM} <= {
        one.signature.op for one in searched_kernels()
    }
    assert GateForm.GRADIENT_SUMS in {one.signature.form for one in searched_kernels()}
    assert torch.equal(own[0], routed(given, chosen, scores, run)[0])  # added in a fixed order
    wide = [one.detach().float().requires_grad_() for one in given]
    wanted = routed(wide, chosen, scores.detach().float().requires_grad_(), by_a_loop)
    by_torch = routed(given, chosen, scores, by_a_loop)
    errors = [*zip(error(own, wanted), error(by_torch, wanted))]
    assert all(ours <= 1.25 * torchs + 1e-4 for ours, torchs in errors), errors


def tokens_to_tokens(
    given: Tensors, chosen: torch.Tensor, scores: torch.Tensor, grad: torch.Tensor
) -> Tensors:
    """The result, and the gradients of all operands and of each row's weight."""
    x, up, down, *bias = given
    routing = sort_by_expert(chosen, EXPERTS)
    weights = scores.detach().reshape(-1)[routing.order].requires_grad_()
    out = experts(
        x, up, down, routing.offsets, indices=routing.indices, token_rows=routing.token_rows,
        routing_weights=weights, combine=True, down_bias=bias[0] if bias else None,
    )  # fmt: skip
    return [out.detach(), *torch.autograd.grad(out, [*given, weights], grad)]


@pytest.mark.parametrize("spoiled", ["tokens", "gradient", "weights"])
@pytest.mark.parametrize("dim", [DIM, 4 * HIDDEN], ids=["wide", "narrow"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "down bias"])
def test_rows_behind_the_last_end_may_be_nan(biased: bool, dim: int, spoiled: str) -> None:
    """Tokens that have no other rows, the gradient of their results, or all such rows' weights."""
    drawn = torch.Generator(DEVICE).manual_seed(9)
    shapes = [(TOKENS, dim), (EXPERTS, 2 * HIDDEN, dim), (EXPERTS, dim, HIDDEN)]
    shapes += [(EXPERTS, dim)] if biased else []
    given = [
        (torch.randn(shape, device=DEVICE, generator=drawn) * shape[-1] ** -0.5)
        .bfloat16()
        .requires_grad_()
        for shape in shapes
    ]
    chosen = torch.rand(TOKENS, EXPERTS + 2, device=DEVICE, generator=drawn).topk(CHOSEN).indices
    chosen[::7] = -1
    elsewhere = (chosen < 0) | (chosen >= EXPERTS)
    scores = torch.rand(TOKENS, CHOSEN, device=DEVICE, generator=drawn)
    grad = torch.randn(TOKENS, dim, device=DEVICE, generator=drawn).bfloat16()
    found = []
    for filling in (0.0, torch.nan):
        tokens, grads, weights = given[0].detach().clone(), grad.clone(), scores.clone()
        if spoiled == "tokens":
            tokens[::7] = filling
        elif spoiled == "gradient":
            grads[::7] = filling
        else:
            weights[elsewhere] = filling
        leaves = [tokens.requires_grad_(), *given[1:]]
        found.append(tokens_to_tokens(leaves, chosen, weights, grads))
    assert is_by_kernels()
    assert {Op.GATHERED_MM, Op.K_GROUPED_MM} <= {one.signature.op for one in searched_kernels()}
    assert GateForm.GRADIENT_SUMS in {one.signature.form for one in searched_kernels()}
    of_zeros, of_nan = found
    assert all(one.isfinite().all() for one in of_nan)
    assert all(torch.equal(one, other) for one, other in zip(of_nan, of_zeros))
    assert all(one.any() for one in of_zeros)
    assert not of_nan[0][::7].any()


@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "weighted"])
def test_under_autocast_the_result_has_its_type(has_weights: bool) -> None:
    x, up, down = (one.detach().float().requires_grad_() for one in operands())
    chosen = torch.arange(x.shape[0] * 2, device=DEVICE).view(-1, 2) % EXPERTS
    scores = torch.rand(chosen.shape, device=DEVICE) if has_weights else None
    with torch.autocast("cuda", torch.bfloat16):
        out = routed_experts(x, up, down, chosen, scores)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


def test_a_capture_may_be_the_first_use_and_follows_new_ends() -> None:
    given = operands()
    offsets = ends()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.mm(given[0], given[0].mT)  # torch's own first use
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(given, offsets=offsets)
    assert is_by_kernels()
    for counts in (COUNTS, (0, 87, 300, 0, 500, 200)):
        offsets.copy_(ends(counts))
        graph.replay()
        torch.cuda.synchronize()
        direct = run(given, offsets=ends(counts))
        assert all(torch.equal(a, b) for a, b in zip(captured, direct))


def test_a_capture_from_tokens_may_be_the_first_use_and_follows_new_choices() -> None:
    """The kernels that take rows where they are, and that give the gradients of scores."""
    _, up, down = operands()
    drawn = torch.Generator(DEVICE).manual_seed(8)
    x = torch.randn(TOKENS, DIM, device=DEVICE, generator=drawn).bfloat16().requires_grad_()
    scores = torch.rand(TOKENS, CHOSEN, device=DEVICE, generator=drawn).requires_grad_()
    choices = [
        torch.rand(TOKENS, EXPERTS, device=DEVICE, generator=drawn).topk(CHOSEN).indices
        for _ in range(2)
    ]
    chosen = choices[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.mm(x, x.mT)  # torch's own first use
        torch.sort(chosen.reshape(-1), stable=True)
    torch.cuda.current_stream().wait_stream(stream)

    def step(of: torch.Tensor) -> Tensors:
        out = routed_experts(x, up, down, of, scores)
        return [out.detach(), *torch.autograd.grad(out, (x, up, down, scores), out.detach())]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(chosen)
    assert is_by_kernels()
    assert Op.GATHERED_GROUPED_MM in {one.signature.op for one in searched_kernels()}
    assert GateForm.GRADIENT_SUMS in {one.signature.form for one in searched_kernels()}
    for other in choices[::-1]:
        chosen.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(other)))


def test_two_streams_at_once_give_what_one_gives() -> None:
    given = operands()
    alone = run(given)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[Tensors] = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run(given))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, alone))


def test_compiled_as_one_graph() -> None:
    given = operands()
    compiled = torch.compile(
        lambda x, up, down: experts(x, up, down, ends()).float().square().sum(), fullgraph=True
    )
    eager = experts(*given, ends()).float().square().sum()
    value = compiled(*given)
    assert torch.allclose(value, eager, rtol=1e-3)
    grads = torch.autograd.grad(value, given)
    direct = torch.autograd.grad(eager, given)
    assert is_by_kernels()
    assert max(error(list(grads), list(direct))) < 1e-2
