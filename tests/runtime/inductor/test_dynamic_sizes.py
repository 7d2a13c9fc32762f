"""Sizes that are symbols: one compiled graph serves them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo

from inductor_session import InductorSession

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def one_compilation(inductor: InductorSession) -> Iterator[None]:
    """Kernels win, and to compile a second time is an error."""
    inductor.slow_down_aten()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def test_any_m(inductor: InductorSession) -> None:
    b = torch.randn(64, 32)
    first = torch.randn(16, 64)
    torch._dynamo.mark_dynamic(first, 0)
    compiled = inductor.compile(torch.mm, first, b, dynamic=None)
    torch.testing.assert_close(compiled.result, first @ b)
    for m in (16, 33, 48, 7, 2):
        a = torch.randn(m, 64)
        torch.testing.assert_close(compiled.function(a, b), a @ b)
        assert len(inductor.launched(compiled.function, a, b)) == 1, m


def test_any_batch(inductor: InductorSession) -> None:
    first, right = torch.randn(3, 16, 64), torch.randn(3, 64, 32)
    for tensor in (first, right):
        torch._dynamo.mark_dynamic(tensor, 0)
    compiled = inductor.compile(torch.bmm, first, right, dynamic=None)
    torch.testing.assert_close(compiled.result, first @ right)
    for batch in (3, 5, 2, 8):
        a, b = torch.randn(batch, 16, 64), torch.randn(batch, 64, 32)
        torch.testing.assert_close(compiled.function(a, b), a @ b)
        assert len(inductor.launched(compiled.function, a, b)) == 1, batch


def test_every_size(inductor: InductorSession) -> None:
    """What the kernels demand of n and k, 16 bytes here, is seen to at each call."""
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    compiled = inductor.compile(torch.mm, a, b, dynamic=True)
    torch.testing.assert_close(compiled.result, a @ b)
    for (m, n, k), launches in {
        (7, 32, 64): 1,
        (33, 8, 12): 1,
        (16, 33, 64): 0,
        (5, 6, 7): 0,
    }.items():
        a, b = torch.randn(m, k), torch.randn(k, n)
        torch.testing.assert_close(compiled.function(a, b), a @ b)
        assert len(inductor.launched(compiled.function, a, b)) == launches, (m, n, k)


def test_column_major_a_leaves_sizes_that_are_not_aligned_to_aten(
    inductor: InductorSession,
) -> None:
    def model(x: Tensor, b: Tensor) -> Tensor:
        return x.t() @ b

    b = torch.randn(64, 32)
    first = torch.randn(64, 16)
    torch._dynamo.mark_dynamic(first, 1)
    compiled = inductor.compile(model, first, b, dynamic=None)
    torch.testing.assert_close(compiled.result, first.t() @ b)
    for m, launches in ((16, 1), (33, 0), (48, 1), (7, 0)):
        x = torch.randn(64, m)
        torch.testing.assert_close(compiled.function(x, b), x.t() @ b)
        assert len(inductor.launched(compiled.function, x, b)) == launches, m


def test_a_number_of_rows_that_only_the_data_says(inductor: InductorSession) -> None:
    def model(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return a[mask] @ b

    a, b = torch.randn(16, 64), torch.randn(64, 32)
    first = torch.arange(16) % 3 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = inductor.compile(model, first, a, b, fullgraph=True)
        torch.testing.assert_close(compiled.result, model(first, a, b))
        assert len(compiled.launched) == 1
        for rows in (0, 1, 16):
            mask = torch.arange(16) < rows
            torch.testing.assert_close(compiled.function(mask, a, b), model(mask, a, b))


def test_a_size_that_torch_finds_to_be_dynamic(inductor: InductorSession) -> None:
    """Torch compiles for the first size and once more for all; bundles add no compilation."""
    b = torch.randn(64, 32)
    function = torch.compile(lambda a, b: a @ b)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=False):
        for m in (16, 33, 48, 7, 64):
            a = torch.randn(m, 64)
            torch.testing.assert_close(function(a, b), a @ b)
            assert len(inductor.launched(function, a, b)) == 1, m
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
