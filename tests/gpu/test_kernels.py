"""Every installed kernel computes what its entry says, at several sizes of its signature."""

from __future__ import annotations

import pytest
import torch
from operands import assert_close, assert_exact, operands, poisoned, sizes

from nvgemm_runtime.api import bmm, load_kernel, mm
from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.format import Kernel
from nvgemm_runtime.problem import Op

Installed = tuple[Bundle, Kernel]


def test_sums_of_zeros_and_ones_are_exact(installed: Installed) -> None:
    _, kernel = installed
    run = mm if kernel.signature.op is Op.MM else bmm
    for size in sizes(kernel):
        a, b, out = operands(kernel.signature, size, exact=True)
        assert run(a, b, out, kernel=kernel.id) is out
        assert_exact(out, a, b)


def test_random_data_comes_out_within_rounding(installed: Installed) -> None:
    _, kernel = installed
    run = mm if kernel.signature.op is Op.MM else bmm
    for size in sizes(kernel):
        a, b, out = operands(kernel.signature, size, exact=False)
        run(a, b, out, kernel=kernel.id)
        assert_close(out, a, b, kernel.signature)


def test_writes_nothing_outside_its_output(installed: Installed) -> None:
    """The output is a window in a larger poisoned buffer, which must stay as it was around it."""
    _, kernel = installed
    signature = kernel.signature
    step = 64
    a, b, _ = operands(signature, (2, 72, 3 * step, 64), exact=True)
    lead = (2,) if signature.op is Op.BMM else ()
    frame = poisoned((*lead, 72 + 4, 5 * step), signature.out)
    before = frame.clone()
    window = frame[..., 2:-2, step : 4 * step]
    run = mm if signature.op is Op.MM else bmm
    run(a, b, window, kernel=kernel.id)
    assert_exact(window, a, b)
    window.copy_(before[..., 2:-2, step : 4 * step])
    assert torch.equal(frame.view(torch.uint8), before.view(torch.uint8))


def test_operators_and_function_agree(installed: Installed) -> None:
    _, kernel = installed
    load_kernel(kernel.id)
    a, b, out = operands(kernel.signature, sizes(kernel)[1], exact=True)
    operator = getattr(torch.ops.nvgemm_aot, kernel.signature.op.value)
    result = operator(a, b, kernel.id)
    operator.out(a, b, kernel.id, out=out)
    assert_exact(result, a, b)
    assert_exact(out, a, b)


def test_zero_sizes_are_as_aten_has_them(installed: Installed) -> None:
    _, kernel = installed
    run = mm if kernel.signature.op is Op.MM else bmm
    for m, n, k in ((0, 64, 64), (64, 0, 64), (64, 64, 0)):
        a, b, out = operands(kernel.signature, (2, m, n, max(k, 1)), exact=True)
        a, b = a[..., :k], b[..., :k, :]
        run(a, b, out, kernel=kernel.id)
        assert not out.double().any(), "a sum of nothing is zero"


@pytest.mark.parametrize("size", [(1, 37, 4096, 4096), (1, 2048, 14336, 4096)])
def test_large_sizes_are_exact(installed: Installed, size: tuple[int, int, int, int]) -> None:
    _, kernel = installed
    if kernel.signature.op is not Op.MM:
        size = (2, *size[1:])
    if not kernel.signature.layout.a_row_major:
        size = (size[0], -(-size[1] // 16) * 16, *size[2:])
    a, b, out = operands(kernel.signature, size, exact=True)
    run = mm if kernel.signature.op is Op.MM else bmm
    run(a, b, out, kernel=kernel.id)
    assert_exact(out, a, b)
