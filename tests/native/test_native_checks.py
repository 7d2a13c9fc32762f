"""What the native launcher refuses, and with which message."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from cpu_kernels import Tensors, foreign, operands
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.launch.loading import native


def _slice_of_columns(t: Tensors) -> Tensors:
    return torch.randn(8, 16)[:, ::2], t[1], t[2]


MM_REFUSALS: dict[str, tuple[Callable[[Tensors], tuple[Any, Any, Any]], type, str]] = {
    "rank of a": (lambda t: (t[0][0], *t[1:]), ValueError, "a has 1 dimensions, shape \\(8\\)"),
    "rank of out": (lambda t: (*t[:2], t[2][None]), ValueError, "out has 3 dim.*must have 2"),
    "dtype of a": (lambda t: (t[0].half(), *t[1:]), TypeError, "a is float16; must be float32"),
    "dtype of b": (lambda t: (t[0], t[1].int(), t[2]), TypeError, "b is int32; must be float32"),
    "dtype of out": (lambda t: (*t[:2], t[2].bfloat16()), TypeError, "out is bfloat16; must be"),
    "k": (lambda t: (t[0][:, :4], *t[1:]), ValueError, "shapes.*\\(8, 4\\), \\(8, 8\\) and"),
    "m": (lambda t: (*t[:2], t[2][:4]), ValueError, "shapes of a, b and out.*\\(m, k\\)"),
    "n": (lambda t: (*t[:2], t[2][:, :4]), ValueError, "shapes of a, b and out"),
    "column-major a": (lambda t: (t[0].t(), *t[1:]), ValueError,
        "a has stride 8 along dimension 1"),
    "every second column": (_slice_of_columns, ValueError, "a has stride 2 along dimension 1.*row"),
    "column-major out": (lambda t: (*t[:2], t[2].t()), ValueError, "out has stride 8.*must be 1"),
    "odd contiguous extent": (lambda t: (torch.randn(8, 6), torch.randn(6, 8), t[2]), ValueError,
        "a has 6 elements along dimension 1.*multiple of 4 \\(16 bytes\\)"),
    "odd n": (lambda t: (t[0], torch.randn(8, 6), torch.randn(8, 6)), ValueError,
        "out has 6 elements along dimension 1"),
    "odd stride": (lambda t: (torch.randn(8, 9)[:, :8], *t[1:]), ValueError,
        "a has stride 9 along dimension 0; must be a multiple of 4 elements \\(16 bytes\\)"),
    "stride 0": (lambda t: (torch.randn(1, 8).expand(8, 8), *t[1:]), ValueError,
        "a has stride 0 along dimension 0"),
    "negative stride": (lambda t: (foreign(torch.randn(64), (8, 8), (-8, 1)), *t[1:]), ValueError,
        "a has stride -8 along dimension 0"),
    "wide stride": (lambda t: (foreign(torch.randn(64), (8, 8), (2**31, 1)), *t[1:]), ValueError,
        "a has stride 2147483648 along dimension 0.*in 1..2147483647"),
    "wide extent": (lambda t: (foreign(torch.randn(64), (2**31, 8), (8, 1)), *t[1:]), ValueError,
        "a has shape \\(2147483648, 8\\); each extent must be in 0..2147483647"),
    "negative extent": (lambda t: (foreign(torch.randn(64), (-1, 8), (8, 1)), *t[1:]), ValueError,
        "a has shape \\(-1, 8\\)"),
    "null": (lambda t: (foreign(torch.empty(0), (8, 8), (8, 1)), *t[1:]), ValueError,
        "a begins at a null pointer"),
    "rows that overlap": (lambda t: (torch.randn(64).as_strided((8, 8), (4, 1)), *t[1:]),
        ValueError, "a has shape \\(8, 8\\) and strides \\(4, 1\\), so that elements share memory"),
    "unaligned pointer": (lambda t: (torch.randn(65)[1:].view(8, 8), *t[1:]), ValueError,
        "a begins 4 bytes past an aligned address; must begin at a multiple of 16 bytes"),
    "out is a": (lambda t: (t[2], t[1], t[2]), ValueError, "out overlaps a"),
    "out is b": (lambda t: (t[0], t[2], t[2]), ValueError, "out overlaps b: .* 256 bytes long"),
}  # fmt: skip


@pytest.mark.parametrize("way", ["launch", "operator"])
@pytest.mark.parametrize("case", MM_REFUSALS)
def test_refuses_for_mm(lib: native.Native, aligned: tuple[str, int], case: str, way: str) -> None:
    make, error, message = MM_REFUSALS[case]
    a, b, out = make(operands())
    if way == "launch":
        with pytest.raises(error, match=message):
            lib.launch(aligned[1], a, b, out)
    elif all(isinstance(tensor, torch.Tensor) for tensor in (a, b, out)):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.nvgemm_aot.mm.out(a, b, aligned[0], out=out)


BMM_REFUSALS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "batch of b": (lambda t: (t[0], t[1][:1], t[2]), "shapes.*\\(batch, m, k\\)"),
    "batch of out": (lambda t: (t[0], t[1], t[2][:1]), "shapes of a, b and out"),
    "b for all": (lambda t: (t[0], t[1][:1].expand(3, 8, 8), t[2]), "b has stride 0.*dimension 0"),
    "odd batch stride": (lambda t: (torch.randn(256).as_strided((3, 8, 8), (65, 8, 1)), t[1], t[2]),
        "a has stride 65 along dimension 0"),
    "matrices that overlap": (
        lambda t: (torch.randn(256).as_strided((3, 8, 8), (32, 8, 1)), t[1], t[2]),
        "strides \\(32, 8, 1\\), so that elements share memory"),
    "rows between rows that overlap": (
        lambda t: (torch.randn(256).as_strided((3, 8, 8), (8, 20, 1)), t[1], t[2]),
        "strides \\(8, 20, 1\\), so that elements share memory"),
    "out is a": (lambda t: (t[2], t[1], t[2]), "out overlaps a"),
}  # fmt: skip


@pytest.mark.parametrize("case", BMM_REFUSALS)
def test_refuses_for_bmm(lib: native.Native, batched: tuple[str, int], case: str) -> None:
    make, message = BMM_REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        lib.launch(batched[1], *make(operands(batch=3)))


def test_accepts_a_batch_inside_the_rows(lib: native.Native, batched: tuple[str, int]) -> None:
    a, b, _ = operands(batch=3)
    a, out = torch.randn(8, 3, 8).transpose(0, 1), torch.empty(8, 3, 8).transpose(0, 1)
    lib.launch(batched[1], a, b, out)
    torch.testing.assert_close(out, a @ b)


OVERLAPS: dict[str, tuple[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], bool]] = {
    "columns side by side": (lambda x: (x[:8, :8], x[:8, 8:16]), False),
    "columns side by side, out first": (lambda x: (x[:8, 8:16], x[:8, :8]), False),
    "columns side by side, other rows": (lambda x: (x[2:10, :8], x[:8, 8:16]), False),
    "columns that share four": (lambda x: (x[:8, :8], x[:8, 4:12]), True),
    "columns that wrap around": (lambda x: (x[:8, 12:20], _rows_from(x, 20, 24)), False),
    "columns that wrap around into it": (lambda x: (x[:8, :8], _rows_from(x, 20, 24)), True),
    "rows behind": (lambda x: (x[:8, :8], x[8:16, :8]), False),
    "rows that share one": (lambda x: (x[:8, :8], x[7:15, :8]), True),
    "every second row": (lambda x: (x[:16:2, :8], x[1:17:2, :8]), False),
    "every second row, all columns": (lambda x: (x[:16:2, :8], x[:16, 4:12][::2]), True),
    "corner in the middle": (lambda x: (x[:8, :8], x[4:12, 4:12]), True),
    "twice the pitch": (lambda x: (x[:4, :8], _rows_from(x, 8, 48)[:4]), False),
    "other pitch": (lambda x: (x[:4, :8], _rows_from(x, 8, 28)[:4]), True),
}
"""By name: A and out in one buffer of 24 x 24, and whether it is refused. Rows of another pitch may
be apart, as the last ones are, and are refused all the same."""


def _rows_from(buffer: torch.Tensor, first: int, pitch: int) -> torch.Tensor:
    return buffer.view(-1)[first:].as_strided((8, 8), (pitch, 1))


@pytest.mark.parametrize("case", OVERLAPS)
def test_overlap_of_views_of_one_buffer(
    lib: native.Native, aligned: tuple[str, int], case: str
) -> None:
    make, refused = OVERLAPS[case]
    a, out = make(torch.randn(24, 24))
    b = torch.randn(a.shape[1], out.shape[1])
    if refused:
        with pytest.raises(ValueError, match="out overlaps a"):
            lib.launch(aligned[1], a, b, out)
    else:
        expected = a @ b
        lib.launch(aligned[1], a, b, out)
        torch.testing.assert_close(out, expected)


def test_what_overlaps_is_always_refused(lib: native.Native, aligned: tuple[str, int]) -> None:
    buffer = torch.arange(1024, dtype=torch.float32)
    random = Random(0)
    accepted = 0
    for _ in range(2000):
        (m, k, n), views = (random.choice((1, 2, 3, 5)), 4, random.choice((4, 8))), []
        pitch = random.choice((4, 8, 12, 16, 20))
        for columns in (k, n):
            stride = random.choice((pitch, pitch, 2 * pitch, 24))
            first = 4 * random.randrange(40)
            views.append(buffer[first:].as_strided((m, columns), (max(stride, columns), 1)))
        a, out = views
        overlaps = not set(a.flatten().tolist()).isdisjoint(out.flatten().tolist())
        refused = _is_refused(lib, aligned[1], (a, torch.ones(k, n), out))
        assert refused or not overlaps, (a, out)
        accepted += not refused
        buffer.copy_(torch.arange(1024))
    assert accepted > 500


def _is_refused(lib: native.Native, handle: int, tensors: Tensors) -> bool:
    try:
        lib.launch(handle, *tensors)
    except ValueError as error:
        return "out overlaps a" in str(error)
    return False


def test_single_rows_of_a_batch_may_lie_side_by_side(
    lib: native.Native, batched: tuple[str, int]
) -> None:
    buffer, b = torch.randn(3, 1, 24), torch.randn(3, 8, 8)
    a, out = buffer[..., :8], buffer[..., 8:16]
    expected = a @ b
    lib.launch(batched[1], a, b, out)
    torch.testing.assert_close(out, expected)


def test_refuses_arguments_of_other_types(lib: native.Native, plain: tuple[str, int]) -> None:
    a, b, out = operands()
    with pytest.raises(TypeError, match="a must be a tensor"):
        lib.launch(plain[1], 3, b, out)
    with pytest.raises(TypeError, match="handle must be an int"):
        lib.launch(plain[0], a, b, out)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes at least 4 arguments \\(3 given\\)"):
        lib.launch(plain[1], a, b)  # type: ignore[call-arg]


@pytest.mark.parametrize("handle", [-1, 2**20 - 1, 2**20, 2**62])
def test_refuses_unknown_handles(lib: native.Native, handle: int) -> None:
    with pytest.raises(NoKernelError, match=f"no kernel has the handle {handle}"):
        lib.launch(handle, *operands())


def test_refuses_a_kernel_of_another_operation(
    plain: tuple[str, int], batched: tuple[str, int]
) -> None:
    with pytest.raises(RuntimeError, match="is for bmm, not for mm"):
        torch.ops.nvgemm_aot.mm(*operands()[:2], batched[0])
    with pytest.raises(RuntimeError, match=r"1 and 2 dimensions; kernel .* takes 2"):
        torch.ops.nvgemm_aot.mm(torch.randn(8), torch.randn(8, 8), plain[0])


def test_refuses_sparse_tensors(plain: tuple[str, int]) -> None:
    a, b, _ = operands()
    with pytest.raises(NotImplementedError, match="Sparse"):
        torch.ops.nvgemm_aot.mm(a.to_sparse(), b, plain[0])
