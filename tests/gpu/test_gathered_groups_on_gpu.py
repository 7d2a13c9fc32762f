"""Products of groups whose rows of A are named: rows of any number of tokens, and wrong ones.

Needs the wheel of grouped.yaml, whose kernels `test_kernels` looks at as at all others.
"""

from __future__ import annotations

import pytest
import torch
from edges import problem_of
from gemm_arguments import Arguments, exact_arguments, poisoned
from gemm_reference import assert_close
from installed import installed_kernels, launch

from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import Role

DEVICE = "cuda"
KERNELS = [
    kernel for _, kernel in installed_kernels() if kernel.signature.op is Op.GATHERED_GROUPED_MM
]

each = pytest.mark.parametrize(
    "kernel", KERNELS, ids=[f"{one.id[:12]}-{one.signature.key}" for one in KERNELS]
)

RAGGED = (0, 1, 129, 0, 63, 2, 300, 0)
"""Rows of each group."""

REST = 41
"""Rows behind the last group, which nothing computes."""

K = 208
"""Not whole tiles."""

MARGIN = 64
"""Rows and columns of a frame around a result."""


def arguments_for(kernel: Kernel, tokens: int) -> Arguments:
    """Groups of rows of so many tokens, in a frame of NaN; rows past the last end name none."""
    rows = sum(RAGGED) + REST
    columns = 656 if kernel.signature.is_gated else 328
    arguments = exact_arguments(
        problem_of(kernel.signature, rows, columns, K, count=len(RAGGED)), DEVICE
    )
    ends = torch.tensor(RAGGED).cumsum(0).to(torch.int32)
    arguments.tensors[Role.OFFSETS] = ends.to(DEVICE)
    a = poisoned((tokens + 2, K), kernel.signature.a, DEVICE)
    a[1:-1] = arguments.a[torch.arange(tokens, device=DEVICE) % rows]
    arguments.tensors[Role.A] = a[1:-1]
    named = torch.randint(tokens, (rows,), device=DEVICE, dtype=torch.int32)
    named[-REST:] = -1
    arguments.tensors[Role.ROWS] = named
    return arguments


@each
@pytest.mark.parametrize("tokens", [1, 60, 5000])
def test_ragged_groups_are_right_and_nothing_else_is_written(kernel: Kernel, tokens: int) -> None:
    arguments = arguments_for(kernel, tokens)
    rows, width = arguments.out.shape
    frame = poisoned((rows + 2 * MARGIN, width + 2 * MARGIN), kernel.signature.out, DEVICE)
    before = frame.clone()
    arguments.tensors[Role.OUT] = frame[MARGIN:-MARGIN, MARGIN:-MARGIN]
    out = launch(kernel, arguments)
    count = sum(RAGGED)
    assert_close(out[:count], arguments.first_rows(count))
    window = (slice(MARGIN, MARGIN + count), slice(MARGIN, -MARGIN))
    frame[window] = before[window]
    assert torch.equal(frame.view(torch.uint8), before.view(torch.uint8))


@each
@pytest.mark.parametrize("ends", [(10, 64, 4000, 1_000_000_000), (-5, 20, -(2**31), 128)])
def test_wrong_ends_write_nothing_outside_the_result(kernel: Kernel, ends: tuple[int, ...]) -> None:
    """What the result holds is undefined. Behind the rows that are named are some of no token."""
    columns = 656 if kernel.signature.is_gated else 328
    arguments = exact_arguments(
        problem_of(kernel.signature, 128, columns, K, count=len(ends)), DEVICE
    )
    arguments.tensors[Role.OFFSETS] = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    named = torch.full((4096,), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    named[:128] = arguments.tensors[Role.ROWS]
    arguments.tensors[Role.ROWS] = named[:128]
    width = arguments.out.shape[1]
    frame = poisoned((128 + 2 * MARGIN, width + 2 * MARGIN), kernel.signature.out, DEVICE)
    before = frame.clone()
    arguments.tensors[Role.OUT] = frame[MARGIN:-MARGIN, MARGIN:-MARGIN]
    launch(kernel, arguments)
    torch.cuda.synchronize()
    window = (slice(MARGIN, -MARGIN), slice(MARGIN, -MARGIN))
    frame[window] = before[window]
    assert torch.equal(frame.view(torch.uint8), before.view(torch.uint8))


@each
def test_wrong_rows_read_nothing_outside_a(kernel: Kernel) -> None:
    """What the result holds in such a row is undefined, but not NaN, which is all around A."""
    arguments = arguments_for(kernel, 60)
    count = sum(RAGGED)
    wrong = torch.tensor((-1, 60, -(2**31), 2**31 - 1), dtype=torch.int32, device=DEVICE)
    places = torch.arange(0, count, 7, device=DEVICE)
    right = arguments.tensors[Role.ROWS].clone()
    arguments.tensors[Role.ROWS][places] = wrong[torch.arange(len(places), device=DEVICE) % 4]
    out = launch(kernel, arguments)[:count].clone()
    torch.cuda.synchronize()
    assert out.isfinite().all()
    arguments.tensors[Role.ROWS] = right
    expected = launch(kernel, arguments)[:count].clone()
    out[places] = expected[places]
    assert torch.equal(out, expected)
