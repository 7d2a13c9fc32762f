"""Every installed kernel computes what its entry says, at several sizes of its signature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from edges import edges, problem_of
from gemm_arguments import Arguments, exact_arguments, poisoned, random_arguments
from gemm_reference import assert_close, assert_exact, has_exact_results
from installed import launch

import nvgemm_runtime
from nvgemm_aot.emulator.checking.small_problems import size_steps
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import Role, role_shape
from nvgemm_runtime.launch.select import load_kernel

Installed = tuple[Bundle, Kernel]


def needs_compact(kernel: Kernel) -> bool:
    convention = parse_calling_convention(kernel.calling_convention)
    assert convention is not None
    return convention.needs_compact


def assert_right(out: torch.Tensor, arguments: Arguments) -> None:
    """Exact where the signature's results can be."""
    if has_exact_results(arguments.problem.signature):
        assert_exact(out, arguments)
    else:
        assert_close(out, arguments)


def test_sums_of_whole_numbers_are_exact(installed: Installed) -> None:
    _, kernel = installed
    if not has_exact_results(kernel.signature):
        pytest.skip("an activation with rounding: the next test is what there is")
    for problem in edges(kernel.signature, kernel.alignment_bytes):
        arguments = exact_arguments(problem)
        assert_exact(launch(kernel, arguments), arguments)


def test_random_data_comes_out_within_rounding(installed: Installed) -> None:
    _, kernel = installed
    for problem in edges(kernel.signature, kernel.alignment_bytes):
        arguments = random_arguments(problem)
        assert_close(launch(kernel, arguments), arguments)


def windows(kernel: Kernel) -> Iterator[tuple[torch.Tensor, tuple[Any, ...], Arguments]]:
    """Poisoned buffers, where in each an output lies, and what is to be written there."""
    signature = kernel.signature
    m, n = 80, 192
    arguments = exact_arguments(problem_of(signature, m, n, 64, count=2))
    shape = role_shape(arguments.problem, Role.OUT)
    if not needs_compact(kernel):
        frame = poisoned((*shape[:-2], m + 4, shape[-1] + 128), signature.out)
        yield frame, (..., slice(2, -2), slice(64, -64)), arguments
    count = math.prod(shape)
    yield poisoned((count + 512,), signature.out), (slice(256, -256),), arguments


def test_writes_nothing_outside_its_output(installed: Installed) -> None:
    """The output is a window in a larger poisoned buffer, which must stay as it was around it."""
    _, kernel = installed
    for frame, place, arguments in windows(kernel):
        before = frame.clone()
        window = frame[place]
        launch(kernel, arguments, window.view(arguments.out.shape))
        assert_right(window.view(arguments.out.shape), arguments)
        window.copy_(before[place])
        assert torch.equal(frame.view(torch.uint8), before.view(torch.uint8))


def test_operators_and_function_agree(installed: Installed) -> None:
    _, kernel = installed
    load_kernel(kernel.id)
    arguments = exact_arguments(edges(kernel.signature, kernel.alignment_bytes)[1])
    if arguments.has_operator:
        name, operands, keywords = arguments.operator_call()
        operator = getattr(torch.ops.nvgemm_aot, name)
        result = operator(*operands, kernel.id, **keywords)
        operator.out(*operands, kernel.id, **keywords, out=arguments.out)
        assert_right(result, arguments)
        assert_right(arguments.out, arguments)
    name, operands, named = arguments.function_call()
    out = poisoned(tuple(arguments.out.shape), kernel.signature.out)
    function = getattr(nvgemm_runtime, name)
    assert function(*operands, out=out, kernel=kernel.id, **named) is out
    assert_right(out, arguments)


def test_a_sum_of_groups_may_take_the_place_of_what_is_added(adding: Installed) -> None:
    """Ends of groups lie inside of tiles, whose rows behind an end others may have written."""
    _, kernel = adding
    for m, n, k in ((37, 256, 128), (1003, 1032, 512), (4096, 2048, 768)):
        arguments = random_arguments(problem_of(kernel.signature, m, n, k, count=7))
        apart = launch(kernel, arguments)
        for _ in range(3):
            added = arguments.tensors[Role.ADDEND].clone()
            offsets = arguments.tensors[Role.OFFSETS]
            load_kernel(kernel.id).launch(arguments.a, arguments.b, added, offsets, added)
            assert torch.equal(added, apart)


def test_zero_sizes_are_as_aten_has_them(plain: Installed) -> None:
    _, kernel = plain
    signature = kernel.signature
    run = nvgemm_runtime.mm if signature.op is Op.MM else nvgemm_runtime.bmm
    if signature.is_gated:
        run = nvgemm_runtime.gated_mm
    for m, n, k in ((0, 64, 64), (64, 0, 64), (64, 64, 0)):
        a, b, out = exact_arguments(problem_of(signature, 64, 64, 64)).operands()
        a, b, out = a[..., :m, :k], b[..., :k, :n], out[..., :m, : signature.out_columns(n)]
        assert run(a, b, out, kernel=kernel.id) is out
        assert not out.double().any(), "a sum of nothing is zero"


LARGE = [(1, 4096, 4096), (37, 4096, 4096), (2048, 14336, 4096), (8192, 1024, 8192)]


def test_is_right_whatever_its_workspace_held_before(sharing: Installed) -> None:
    """Several waves of tiles, after memory that the launch gets was filled with ones."""
    _, kernel = sharing
    assert kernel.workspace is not None
    step_m, _, _ = size_steps(kernel.signature, kernel.alignment_bytes)
    problem = problem_of(kernel.signature, -(-3000 // step_m) * step_m, 8192, 512, count=2)
    arguments = exact_arguments(problem)
    size = kernel.workspace.size_bytes(problem)
    torch.empty(size, dtype=torch.uint8, device=arguments.out.device).fill_(0xFF)
    assert_right(launch(kernel, arguments), arguments)


def _product_of(arguments: Arguments, k: int) -> int:
    """Of a result of several products: which one reads column ``k`` of the first A."""
    if arguments.problem.signature.op is not Op.K_GROUPED_MM:
        return 0
    return int((arguments.tensors[Role.OFFSETS] <= k).sum())


def test_nan_comes_out_as_nan(installed: Installed) -> None:
    """Of a row of A with one NaN, whatever follows the sum: relu of NaN is NaN, as torch's."""
    _, kernel = installed
    if kernel.signature.a.is_integer or kernel.signature.a.packed > 1:
        pytest.skip("a type without NaN")
    arguments = exact_arguments(edges(kernel.signature, kernel.alignment_bytes)[1])
    a = arguments.a
    if kernel.signature.op is Op.GATHERED_GROUPED_MM:
        arguments.tensors[Role.ROWS] = torch.arange(len(a), dtype=torch.int32, device=a.device)
    row = a[0] if a.dim() == 3 else a
    row[5, 3] = math.nan
    out = launch(kernel, arguments)
    of_row = (out[_product_of(arguments, 3)] if out.dim() == 3 else out)[5]
    assert of_row.double().isnan().all()
    assert out.double().isnan().sum() == of_row.numel()


@pytest.mark.parametrize("size", LARGE)
def test_large_sizes_are_right(installed: Installed, size: tuple[int, int, int]) -> None:
    _, kernel = installed
    step_m, _, _ = size_steps(kernel.signature, kernel.alignment_bytes)
    m = -(-size[0] // step_m) * step_m
    n, k = size[1:]
    if kernel.signature.op is Op.GATHERED_MM:  # B of these arguments has m * k rows
        k = 64
    arguments = exact_arguments(problem_of(kernel.signature, m, n, k, count=2))
    assert_right(launch(kernel, arguments), arguments)
