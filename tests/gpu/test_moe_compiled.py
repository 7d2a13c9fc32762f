"""Compiled experts by bundled kernels with a gate: values, any number of rows, CUDA graphs.

Needs the wheel of grouped.yaml, as `test_moe`, whose operands these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from test_moe import COUNTS, DEVICE, Tensors, ends, error, is_by_kernels, operands, searched_kernels

from nvgemm_runtime.gemm.epilogues import Epilogue, Gate, GateForm, WeightOrder, find_gated
from nvgemm_runtime.launch import select
from nvgemm_runtime.moe import experts, kernels

OTHER_COUNTS = ((0, 87, 300, 0, 500, 200), (3, 2, 1, 0, 0, 1), (256,) * 6)


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled, no kernel looked up yet; that torch computes what is in fp32 is no news."""
    monkeypatch.setattr(select, "_cache", {})
    monkeypatch.setattr(kernels, "_warned", {*kernels.WARNINGS})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def function(is_pair: bool, **options: Any) -> Callable[..., torch.Tensor]:
    """Experts of what `test_moe.operands` gives, in place of ends their own."""

    def run(offsets: torch.Tensor, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        *up, down = given[: 3 if is_pair else 2]
        biases = given[len(up) + 1 :]
        named = dict(zip(("up_bias", "down_bias"), biases))
        w_up: Any = (up[0], up[1]) if is_pair else up[0]
        return experts(x, w_up, down, offsets, **named, **options)

    return run


def step(run: Callable[..., torch.Tensor], offsets: torch.Tensor, given: Tensors) -> Tensors:
    """The result, and the gradients of all operands; copies, as a CUDA graph's are overwritten."""
    torch.compiler.cudagraph_mark_step_begin()
    out = run(offsets, *given)
    kept = out.detach().clone()
    grads = torch.autograd.grad(out, given, torch.ones_like(out))
    return [kept, *(one.clone() for one in grads)]


def split(given: Tensors) -> Tensors:
    """The operands with gate and up as two weights."""
    x, up, *others = given
    halves = (one.detach().clone().requires_grad_() for one in up.chunk(2, 1))
    return [x, *halves, *others]


def gates_found() -> set[Epilogue]:
    """Gated epilogues that were looked up, all of which kernels served."""
    assert is_by_kernels()
    epilogues = {kernel.signature.epilogue for kernel in searched_kernels()}
    return {one for one in epilogues if one is not None and one.gate is not None}


@pytest.mark.parametrize(
    ("activation", "order"),
    [
        ("swiglu", "halves"),
        ("swiglu", "interleaved"),
        ("swiglu", "pair"),
        ("geglu", "halves"),
        ("swiglu_oai", "interleaved"),
    ],
)
def test_no_further_from_fp32_than_when_called(activation: str, order: str) -> None:
    is_pair = order == "pair"
    given = operands(biased=activation == "swiglu_oai")
    given = split(given) if is_pair else given
    options = {"activation": activation} | ({} if is_pair else {"weights": order})
    run = function(is_pair, **options)
    found = step(torch.compile(run, fullgraph=True), ends(), given)
    weight_order = WeightOrder("halves" if is_pair else order)
    forward = GateForm.UPS if is_pair else GateForm.KEPT
    assert gates_found() == {
        find_gated(Gate(activation), weight_order, form) for form in (forward, GateForm.GRADIENT)
    }
    called = step(run, ends(), given)
    wanted = step(run, ends(), [one.detach().float().requires_grad_() for one in given])
    for compiled, direct in zip(error(found, wanted), error(called, wanted)):
        assert compiled <= 1.05 * direct + 1e-6


def test_without_gradients_a_kernel_has_the_gate() -> None:
    given = operands()
    run = function(False)
    with torch.no_grad():
        found = torch.compile(run, fullgraph=True)(ends(), *given)
        assert gates_found() == {Epilogue.parse("swiglu_halves")}
        assert torch.equal(found, run(ends(), *given))


@pytest.mark.parametrize("is_pair", [False, True], ids=["one weight", "two weights"])
def test_one_graph_serves_any_number_of_rows(is_pair: bool) -> None:
    x, *weights = split(operands()) if is_pair else operands()
    run = function(is_pair)
    compiled = torch.compile(run, fullgraph=True)
    for counts in (COUNTS, *OTHER_COUNTS):
        rows = drawn(x, counts)
        torch._dynamo.mark_dynamic(rows, 0)
        given = [rows, *weights]
        with torch._dynamo.config.patch(error_on_recompile=counts is not COUNTS):
            found = step(compiled, ends(counts), given)
        assert Epilogue.parse("swiglu_halves_gradient") in gates_found()
        assert max(error(found, step(run, ends(counts), given))) < 1e-2


def drawn(like: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Rows for all groups."""
    generator = torch.Generator(DEVICE).manual_seed(sum(counts))
    shape = (sum(counts), like.shape[1])
    made = torch.randn(shape, device=DEVICE, generator=generator) * shape[1] ** -0.5
    return made.to(like.dtype).requires_grad_()


@pytest.mark.parametrize("is_pair", [False, True], ids=["one weight", "two weights"])
def test_cuda_graphs_of_inductor_follow_new_ends(is_pair: bool) -> None:
    given = split(operands()) if is_pair else operands()
    run = function(is_pair)
    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    rows = sum(COUNTS)
    torch._dynamo.utils.counters.clear()
    for counts in (*[COUNTS] * 4, (0, 87, 300, 0, 500, 200), (rows, 0, 0, 0, 0, 0)):
        assert sum(counts) == rows
        found = step(compiled, ends(counts), given)
        direct = step(run, ends(counts), given)
        assert max(error(found, direct)) < 1e-2
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert Epilogue.parse("swiglu_halves_gradient") in gates_found()


def test_checkpointing_runs_kernels_with_the_gate() -> None:
    given = operands()

    def run(offsets: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        plain = function(False)
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(
            lambda rows: plain(offsets, rows, *weights), x, use_reentrant=False
        )
        return out

    found = step(torch.compile(run, fullgraph=True), ends(), given)
    assert Epilogue.parse("swiglu_halves_kept") in gates_found()
    assert max(error(found, step(function(False), ends(), given))) < 1e-2
