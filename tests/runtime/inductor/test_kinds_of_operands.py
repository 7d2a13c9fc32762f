"""Operands of every kind in compiled models: what is computed is right, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from inductor_session import HEADER, InductorSession

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def kernels_win(inductor: InductorSession) -> None:
    inductor.slow_down_aten()


def test_batches(inductor: InductorSession) -> None:
    def model(a: Tensor, b: Tensor, c: Tensor) -> Any:
        return torch.bmm(a, b), torch.bmm(a, c.transpose(1, 2)), a @ b

    arguments = torch.randn(3, 16, 64), torch.randn(3, 64, 32), torch.randn(3, 32, 64)
    compiled = inductor.compile(model, *arguments)
    torch.testing.assert_close(compiled.result, model(*arguments))
    assert len(compiled.launched) == compiled.code[0].count("nvgemm_bmm_") - 2 > 0
    assert "extern_kernels.bmm(" not in compiled.code[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_linear_layer_reads_its_weight_as_it_lies(
    inductor: InductorSession, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    layer = torch.nn.Linear(64, 32, bias=False)
    with mode():
        x = torch.randn(16, 64)
        compiled = inductor.compile(layer, x, fullgraph=True)
        torch.testing.assert_close(compiled.result, layer(x))
    assert len(compiled.launched) == 1


@pytest.mark.slow
def test_strides_that_inductor_leaves_open(inductor: InductorSession) -> None:
    def model(a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(torch.relu(a) @ torch.tanh(b)) @ torch.relu(b.t())

    arguments = torch.randn(16, 64), torch.randn(64, 32)
    compiled = inductor.compile(model, *arguments)
    torch.testing.assert_close(compiled.result, model(*arguments))
    assert len(compiled.launched) == 2


def test_views_that_kernels_cannot_take_go_to_aten(inductor: InductorSession) -> None:
    """The kernels here demand 16 bytes."""

    def model(flat: Tensor, wide: Tensor, b: Tensor) -> Any:
        unaligned = flat[1 : 1 + 16 * 64].view(16, 64)
        aligned = flat[4 : 4 + 16 * 64].view(16, 64)
        return unaligned @ b, aligned @ b, wide[:, 1:65] @ b, wide[:, 4:68] @ b

    arguments = torch.randn(16 * 64 + 8), torch.randn(16, 128), torch.randn(64, 32)
    compiled = inductor.compile(model, *arguments)
    torch.testing.assert_close(compiled.result, model(*arguments))
    assert len(compiled.launched) == 2
    assert compiled.code[0].count("extern_kernels.mm(") == 2


def test_an_input_that_turns_out_unaligned_goes_to_aten(inductor: InductorSession) -> None:
    b, flat = torch.randn(64, 32), torch.randn(16 * 64 + 1)
    aligned, unaligned = flat[:-1].view(16, 64), flat[1:].view(16, 64)

    def model(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    compiled = inductor.compile(model, aligned, b)
    assert len(compiled.launched) == 1
    torch.testing.assert_close(compiled.function(unaligned, b), unaligned @ b)
    assert inductor.launched(compiled.function, unaligned, b) == ()
    assert len(inductor.launched(compiled.function, aligned, b)) == 1


def test_operands_that_share_memory(inductor: InductorSession) -> None:
    def model(x: Tensor, w: Tensor) -> Any:
        square = x[0]
        return square @ square.t(), square.t() @ square, torch.bmm(x, w.expand(3, 64, 32))

    arguments = torch.randn(3, 16, 64), torch.randn(64, 32)
    compiled = inductor.compile(model, *arguments)
    torch.testing.assert_close(compiled.result, model(*arguments))
    assert len(compiled.launched) == 2, "no kernel reads one matrix for a whole batch"


@pytest.mark.slow
def test_results_that_go_into_parts_of_others(inductor: InductorSession) -> None:
    def model(a: Tensor, b: Tensor) -> Any:
        whole = torch.zeros(32, 32)
        whole[:16] = a @ b
        whole[16:].copy_(a @ b)
        return whole, torch.cat([a @ b, b[:16]], 1) @ b

    arguments = torch.randn(16, 64), torch.randn(64, 32)
    compiled = inductor.compile(model, *arguments)
    torch.testing.assert_close(compiled.result, model(*arguments), rtol=1e-4, atol=1e-3)
    assert len(compiled.launched) >= 2


def test_both_branches_of_a_condition(inductor: InductorSession) -> None:
    def model(choice: Tensor, a: Tensor, b: Tensor) -> Any:
        chosen = torch.cond(choice, lambda a, b: a[8:] @ b, lambda a, b: a[:8] @ b, (a, b))
        return chosen, a[:4] @ b

    arguments = torch.randn(16, 64), torch.randn(64, 32)
    compiled = inductor.compile(model, torch.tensor(True), *arguments)
    expected = arguments[0] @ arguments[1]
    torch.testing.assert_close(compiled.result, (expected[8:], expected[:4]))
    assert len(compiled.launched) == 2
    assert compiled.code[0].count(HEADER) == 1
    assert compiled.code[0].count("= nvgemm_aot_gemm(") == 1
    assert len(inductor.launched(compiled.function, torch.tensor(False), *arguments)) == 2


def test_training_uses_kernels_forward_and_for_both_gradients(inductor: InductorSession) -> None:
    layer = torch.nn.Linear(64, 32, bias=False)
    x = torch.randn(16, 64, requires_grad=True)
    above = torch.randn(16, 32)

    def step(function: Any) -> tuple[Tensor, ...]:
        x.grad = layer.weight.grad = None
        result = function(x)
        result.backward(above)
        assert x.grad is not None
        assert layer.weight.grad is not None
        return result.detach(), x.grad, layer.weight.grad

    compiled = torch.compile(layer, dynamic=False, fullgraph=True)
    torch.testing.assert_close(step(compiled), step(layer))
    assert len(inductor.launched(step, compiled)) == 3


def test_autocast_reaches_the_kernels_of_its_type(inductor: InductorSession) -> None:
    def model(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return a @ b

    arguments = torch.randn(16, 64), torch.randn(64, 32)
    compiled = inductor.compile(model, *arguments)
    assert compiled.result.dtype is torch.bfloat16
    torch.testing.assert_close(compiled.result, model(*arguments), rtol=2e-2, atol=2e-2)
    assert len(compiled.launched) == 1
