"""The native launcher, with kernels for the CPU and a stand-in for the CUDA driver."""

from __future__ import annotations

import importlib.resources
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elftools.elf.elffile import ELFFile

import cpu_kernels
import fake_driver
from cpu_kernels import signature
from nvgemm_runtime import native
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.problem import DType, Op, Signature
from nvgemm_runtime.target import Target

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Register = Callable[..., tuple[str, int]]

UNALIGNED = 4
TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}


@pytest.fixture(scope="module")
def lib() -> native.Native:
    return native.load()


@pytest.fixture(scope="module")
def register(lib: native.Native, tmp_path_factory: pytest.TempPathFactory) -> Register:
    """Compiles, loads and registers a kernel; returns its id and its handle."""
    directory = tmp_path_factory.mktemp("kernels")
    count = 0

    def register(
        served: Signature | None = None, behaviour: str = "", alignment: int = UNALIGNED
    ) -> tuple[str, int]:
        nonlocal count
        count += 1  # an id of its own for each, whatever the source
        served = served or signature()
        kernel = cpu_kernels.load(served, directory, f"/* {count} */ {behaviour}")
        handle = lib.register_kernel(
            id=kernel.id,
            function_address=kernel.address,
            signature=served,
            alignment_bytes=alignment,
            target=None,
        )
        return kernel.id, handle

    return register


@pytest.fixture(scope="module")
def plain(register: Register) -> tuple[str, int]:
    return register()


@pytest.fixture(scope="module")
def aligned(register: Register) -> tuple[str, int]:
    """A kernel for row-major fp32 that wants 16 bytes: multiples of 4 elements."""
    return register(alignment=16)


@pytest.fixture(scope="module")
def batched(register: Register) -> tuple[str, int]:
    return register(signature(op=Op.BMM), alignment=16)


@pytest.fixture
def loader(lib: native.Native) -> Iterator[Callable[[Any], None]]:
    yield lib.set_loader
    lib.set_loader(None)


def operands(m: int = 8, n: int = 8, k: int = 8, batch: int | None = None) -> Tensors:
    """Row-major A and B with random values, and an output full of NaN."""
    lead = () if batch is None else (batch,)
    a, b = torch.randn(*lead, m, k), torch.randn(*lead, k, n)
    return a, b, torch.full((*lead, m, n), float("nan"))


def of_layout(tensor: torch.Tensor, *, row_major: bool) -> torch.Tensor:
    return tensor if row_major else tensor.mT.contiguous().mT


# Results


@pytest.mark.parametrize("operand", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("op", [Op.MM, Op.BMM])
@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
def test_all_ways_in_compute_the_product(
    lib: native.Native, register: Register, layout: str, op: Op, operand: DType
) -> None:
    served = signature(layout, op=op, operand=operand, out=DType.FP32)
    id, handle = register(served, alignment=operand.size_bytes)
    a, b, out = operands(5, 6, 7, 3 if op is Op.BMM else None)
    a = of_layout(a.to(TORCH[operand]), row_major=served.layout.a_row_major)
    b = of_layout(b.to(TORCH[operand]), row_major=served.layout.b_row_major)
    expected = a.float() @ b.float()
    functional, out_form = getattr(torch.ops.nvgemm_aot, op.value), torch.empty_like(out)
    functional.out(a, b, id, out=out_form)
    lib.launch(handle, a, b, out)
    result = functional(a, b, id)
    assert result.is_contiguous()
    for got in (out, out_form, result):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_bf16_results_are_rounded(register: Register) -> None:
    id, _ = register(signature(operand=DType.BF16), alignment=2)
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    torch.testing.assert_close(torch.ops.nvgemm_aot.mm(a, b, id), a @ b)


def test_views_are_computed_in_place(lib: native.Native, aligned: tuple[str, int]) -> None:
    a, b, _ = operands(8, 8, 16)
    buffer = torch.full((20, 16), float("nan"))
    out = buffer[1:17:2, 4:12]
    lib.launch(aligned[1], a[:, 4:12], b[8:], out)
    torch.testing.assert_close(out, a[:, 4:12] @ b[8:])
    assert buffer.isnan().sum() == buffer.numel() - out.numel()


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (0, 0, 0), (8, 0, 0), (0, 8, 0)])
def test_empty_results_launch_nothing(
    lib: native.Native, register: Register, sizes: tuple[int, int, int]
) -> None:
    id, handle = register(behaviour=cpu_kernels.RAISES)
    a, b, out = operands(*sizes)
    lib.launch(handle, a, b, out)
    assert torch.ops.nvgemm_aot.mm(a, b, id).shape == out.shape


@pytest.mark.parametrize("batch", [None, 3])
def test_an_empty_k_gives_zeros(
    lib: native.Native, register: Register, batch: int | None
) -> None:
    served = signature(op=Op.MM if batch is None else Op.BMM)
    id, handle = register(served, behaviour=cpu_kernels.RAISES)
    a, b, buffer = operands(8, 12, 0, batch)
    lib.launch(handle, a, b[..., :8], buffer[..., :8])
    assert (buffer[..., :8] == 0).all()
    assert buffer[..., 8:].isnan().all()
    result = getattr(torch.ops.nvgemm_aot, served.op.value)(a, b, id)
    assert result.shape == buffer.shape
    assert (result == 0).all()


def test_an_empty_batch_launches_nothing(register: Register) -> None:
    id, _ = register(signature(op=Op.BMM), behaviour=cpu_kernels.RAISES)
    a, b, out = operands(batch=0)
    assert torch.ops.nvgemm_aot.bmm(a, b, id).shape == out.shape


@pytest.mark.parametrize(
    ("shape", "strides", "canonical"),
    [
        ((1, 8), (5, 1), (8, 1)),
        ((1, 8), (0, 1), (8, 1)),
        ((1, 8), (-(2**40), 1), (8, 1)),
        ((4, 8), (12, 1), (12, 1)),
    ],
)
def test_kernels_see_canonical_strides_of_single_rows(
    lib: native.Native,
    register: Register,
    shape: tuple[int, int],
    strides: tuple[int, int],
    canonical: tuple[int, int],
) -> None:
    _, handle = register(behaviour=cpu_kernels.REPORTS_STRIDES, alignment=16)
    if strides[0] < 0:  # torch has none, so it is handed over by DLPack
        a: Any = _foreign(torch.randn(8), shape, strides)
    else:
        a = torch.randn(64).as_strided(shape, strides)
    out = torch.empty(shape[0], 8)
    lib.launch(handle, a, torch.randn(8, 8), out)
    assert tuple(out.flatten()[:2].tolist()) == canonical


def test_kernels_see_canonical_strides_of_single_matrices(
    lib: native.Native, register: Register
) -> None:
    _, handle = register(signature(op=Op.BMM), cpu_kernels.REPORTS_STRIDES, 16)
    a = torch.randn(64).as_strided((1, 4, 8), (3, 8, 1))
    out = torch.empty(1, 4, 8)
    lib.launch(handle, a, torch.randn(1, 8, 8), out)
    assert out.flatten()[:3].tolist() == [8, 8, 1]


def test_a_single_column_may_have_any_stride(lib: native.Native, plain: tuple[str, int]) -> None:
    a, b = torch.randn(64).as_strided((8, 1), (2, 7)), torch.randn(1, 8)
    out = torch.empty(8, 8)
    lib.launch(plain[1], a, b, out)
    torch.testing.assert_close(out, a @ b)


def _foreign(tensor: torch.Tensor, shape: Any, strides: Any) -> Any:
    """A tensor of TVM-FFI over memory of torch, with strides that torch refuses."""
    import tvm_ffi

    wrapped = fake_driver.OnDevice(tensor)
    sizes = type(wrapped._shape)._type_ * len(shape)
    wrapped._shape, wrapped._strides = sizes(*shape), sizes(*strides)
    managed = wrapped._managed
    managed.rank, managed.device[0] = len(shape), native.DEVICE_TYPE_CPU
    managed.shape = fake_driver.ctypes.addressof(wrapped._shape)
    managed.strides = fake_driver.ctypes.addressof(wrapped._strides)
    return tvm_ffi.from_dlpack(wrapped)


# Refusals: each check, by its message


def _slice_of_columns(t: Tensors) -> Tensors:
    return torch.randn(8, 16)[:, ::2], t[1], t[2]


MM_REFUSALS: dict[str, tuple[Callable[[Tensors], tuple[Any, Any, Any]], type, str]] = {
    "rank of a": (lambda t: (t[0][0], *t[1:]), ValueError, "a has 1 dimensions, shape \\(8\\)"),
    "rank of out": (lambda t: (*t[:2], t[2][None]), ValueError, "out has 3 dimensions.*must have 2"),
    "dtype of a": (lambda t: (t[0].half(), *t[1:]), TypeError, "a is float16; must be float32"),
    "dtype of b": (lambda t: (t[0], t[1].int(), t[2]), TypeError, "b is int32; must be float32"),
    "dtype of out": (lambda t: (*t[:2], t[2].bfloat16()), TypeError, "out is bfloat16; must be"),
    "k": (lambda t: (t[0][:, :4], *t[1:]), ValueError, "shapes.*\\(8, 4\\), \\(8, 8\\) and"),
    "m": (lambda t: (*t[:2], t[2][:4]), ValueError, "shapes of a, b and out.*\\(m, k\\)"),
    "n": (lambda t: (*t[:2], t[2][:, :4]), ValueError, "shapes of a, b and out"),
    "column-major a": (lambda t: (t[0].t(), *t[1:]), ValueError, "a has stride 8 along dimension 1"),
    "every second column": (_slice_of_columns, ValueError, "a has stride 2 along dimension 1.*row"),
    "column-major out": (lambda t: (*t[:2], t[2].t()), ValueError, "out has stride 8.*must be 1"),
    "odd contiguous extent": (
        lambda t: (torch.randn(8, 6), torch.randn(6, 8), t[2]),
        ValueError,
        "a has 6 elements along dimension 1.*multiple of 4 \\(16 bytes\\)",
    ),
    "odd n": (
        lambda t: (t[0], torch.randn(8, 6), torch.randn(8, 6)),
        ValueError,
        "out has 6 elements along dimension 1",
    ),
    "odd stride": (
        lambda t: (torch.randn(8, 9)[:, :8], *t[1:]),
        ValueError,
        "a has stride 9 along dimension 0; must be a multiple of 4 elements \\(16 bytes\\)",
    ),
    "stride 0": (
        lambda t: (torch.randn(1, 8).expand(8, 8), *t[1:]),
        ValueError,
        "a has stride 0 along dimension 0",
    ),
    "negative stride": (
        lambda t: (_foreign(torch.randn(64), (8, 8), (-8, 1)), *t[1:]),
        ValueError,
        "a has stride -8 along dimension 0",
    ),
    "wide stride": (
        lambda t: (_foreign(torch.randn(64), (8, 8), (2**31, 1)), *t[1:]),
        ValueError,
        "a has stride 2147483648 along dimension 0.*in 1..2147483647",
    ),
    "wide extent": (
        lambda t: (_foreign(torch.randn(64), (2**31, 8), (8, 1)), *t[1:]),
        ValueError,
        "a has shape \\(2147483648, 8\\); each extent must be in 0..2147483647",
    ),
    "negative extent": (
        lambda t: (_foreign(torch.randn(64), (-1, 8), (8, 1)), *t[1:]),
        ValueError,
        "a has shape \\(-1, 8\\)",
    ),
    "null": (
        lambda t: (_foreign(torch.empty(0), (8, 8), (8, 1)), *t[1:]),
        ValueError,
        "a begins at a null pointer",
    ),
    "rows that overlap": (
        lambda t: (torch.randn(64).as_strided((8, 8), (4, 1)), *t[1:]),
        ValueError,
        "a has shape \\(8, 8\\) and strides \\(4, 1\\), so that elements share memory",
    ),
    "unaligned pointer": (
        lambda t: (torch.randn(65)[1:].view(8, 8), *t[1:]),
        ValueError,
        "a begins 4 bytes behind an aligned address; must begin at a multiple of 16 bytes",
    ),
    "out is a": (lambda t: (t[2], t[1], t[2]), ValueError, "out overlaps a"),
    "out is b": (lambda t: (t[0], t[2], t[2]), ValueError, "out overlaps b: .* 256 bytes long"),
}


@pytest.mark.parametrize("way", ["launch", "operator"])
@pytest.mark.parametrize("case", MM_REFUSALS)
def test_refuses_for_mm(
    lib: native.Native, aligned: tuple[str, int], case: str, way: str
) -> None:
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
    "odd batch stride": (
        lambda t: (torch.randn(256).as_strided((3, 8, 8), (65, 8, 1)), t[1], t[2]),
        "a has stride 65 along dimension 0",
    ),
    "matrices that overlap": (
        lambda t: (torch.randn(256).as_strided((3, 8, 8), (32, 8, 1)), t[1], t[2]),
        "strides \\(32, 8, 1\\), so that elements share memory",
    ),
    "rows between rows that overlap": (
        lambda t: (torch.randn(256).as_strided((3, 8, 8), (8, 20, 1)), t[1], t[2]),
        "strides \\(8, 20, 1\\), so that elements share memory",
    ),
    "out is a": (lambda t: (t[2], t[1], t[2]), "out overlaps a"),
}


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
    "other pitch": (lambda x: (x[:4, :8], _rows_from(x, 8, 48)[:4]), True),
}
"""By name: A and out in one buffer of 24 x 24, and whether it is refused. Rows of another pitch may
be apart, as they are here, and are refused all the same."""


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


def test_refuses_arguments_of_other_types(lib: native.Native, plain: tuple[str, int]) -> None:
    a, b, out = operands()
    with pytest.raises(TypeError, match="a must be a tensor"):
        lib.launch(plain[1], 3, b, out)
    with pytest.raises(TypeError, match="handle must be an int"):
        lib.launch(plain[0], a, b, out)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes 4 arguments \\(3 given\\)"):
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
    with pytest.raises(RuntimeError, match="1 and 2 dimensions; kernel .* takes 2"):
        torch.ops.nvgemm_aot.mm(torch.randn(8), torch.randn(8, 8), plain[0])


def test_refuses_sparse_tensors(plain: tuple[str, int]) -> None:
    a, b, _ = operands()
    with pytest.raises((NotImplementedError, RuntimeError), match="Sparse"):
        torch.ops.nvgemm_aot.mm(a.to_sparse(), b, plain[0])


# Kernels and their registration


def test_the_same_id_gives_the_same_handle(lib: native.Native, plain: tuple[str, int]) -> None:
    again = lib.register_kernel(
        id=plain[0], function_address=1, signature=signature(), alignment_bytes=16, target=None
    )
    assert again == plain[1] == lib.find_kernel(plain[0])
    assert lib.find_kernel("0" * 64) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workspace_bytes": 64}, "workspace of 64 bytes"),
        ({"alignment_bytes": 12}, "alignment_bytes is 12; must be a power of two"),
        ({"alignment_bytes": 0}, "alignment_bytes is 0; must be in 1..4096"),
        ({"function_address": 0}, "function_address is 0"),
    ],
)
def test_refuses_to_register(lib: native.Native, change: dict[str, int], message: str) -> None:
    arguments: dict[str, Any] = {
        "id": "bad",
        "function_address": 1,
        "signature": signature(),
        "alignment_bytes": 16,
        "target": None,
    }
    with pytest.raises(ValueError, match=message):
        lib.register_kernel(**arguments | change)
    assert lib.find_kernel("bad") is None


def test_threads_register_and_find_thousands_of_kernels(lib: native.Native) -> None:
    ids = [f"made-up-{number}" for number in range(3000)]
    handles: list[list[int]] = []

    def work() -> None:
        found = []
        for id in ids:
            found.append(
                lib.register_kernel(
                    id=id,
                    function_address=1,
                    signature=signature(),
                    alignment_bytes=4,
                    target=None,
                )
            )
            assert lib.find_kernel(id) == found[-1]
        handles.append(found)

    _in_threads(work, 4)
    assert len(handles) == 4
    assert all(found == handles[0] for found in handles)
    assert len(set(handles[0])) == len(ids)


def test_first_calls_of_a_kernel_do_not_overlap(lib: native.Native, register: Register) -> None:
    _, handle = register(behaviour=cpu_kernels.RACES_ON_FIRST_CALL)
    failures = []

    def work() -> None:
        a, b, out = operands()
        try:
            lib.launch(handle, a, b, out)
            torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-5)
        except Exception as error:
            failures.append(error)

    _in_threads(work, 8)
    assert not failures


def _in_threads(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (cpu_kernels.RAISES, "kernel {id}: out of patience"),
        (cpu_kernels.RETURNS_SILENTLY, "kernel {id} failed without saying why"),
    ],
)
def test_what_a_kernel_raises_names_it(
    lib: native.Native, register: Register, behaviour: str, message: str
) -> None:
    id, handle = register(behaviour=behaviour)
    with pytest.raises(RuntimeError, match=message.format(id=id)):
        lib.launch(handle, *operands())
    with pytest.raises(RuntimeError, match=message.format(id=id)):
        torch.ops.nvgemm_aot.mm(*operands()[:2], id)


def test_unknown_ids_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"no kernel feed is loaded, and nothing is set to load"):
        torch.ops.nvgemm_aot.mm(*operands()[:2], "feed")


def test_the_loader_is_asked_for_unknown_ids(
    lib: native.Native, loader: Callable[[Any], None], tmp_path: Path
) -> None:
    served = signature("tt", operand=DType.BF16, out=DType.FP32)
    kernel = cpu_kernels.load(served, tmp_path, "/* loaded on demand */")
    asked = []

    def load(id: str) -> None:
        asked.append(id)
        if id == kernel.id:
            lib.register_kernel(
                id=id,
                function_address=kernel.address,
                signature=served,
                alignment_bytes=2,
                target=None,
            )

    loader(load)
    a, b = torch.randn(4, 4).bfloat16(), torch.randn(4, 4).bfloat16()
    for _ in range(2):
        result = torch.ops.nvgemm_aot.mm(a, b, kernel.id)
    torch.testing.assert_close(result, a.float() @ b.float())
    with pytest.raises(RuntimeError, match="no kernel cafe is loaded; no installed bundle has it"):
        torch.ops.nvgemm_aot.mm(a, b, "cafe")
    assert asked == [kernel.id, "cafe"]


def test_what_the_loader_raises_is_passed_on(
    lib: native.Native, loader: Callable[[Any], None]
) -> None:
    def load(id: str) -> None:
        raise NoKernelError(f"{id} is for another GPU")

    loader(load)
    with pytest.raises(NoKernelError, match="beef is for another GPU"):
        lib.out_dtype("beef")
    with pytest.raises(RuntimeError, match="beef is for another GPU"):
        torch.ops.nvgemm_aot.mm(*operands()[:2], "beef")


# Under torch


def test_abi_needs_no_tensor() -> None:
    assert torch.ops.nvgemm_aot.abi() == native.abi() == native.ABI


@pytest.mark.parametrize("op", [Op.MM, Op.BMM])
def test_opcheck(register: Register, op: Op) -> None:
    id, _ = register(signature(op=op))
    a, b, out = operands(5, 6, 7, 2 if op is Op.BMM else None)
    packet = getattr(torch.ops.nvgemm_aot, op.value)
    torch.library.opcheck(packet.default, (a, b, id))
    torch.library.opcheck(packet.out, (a, b, id), {"out": out.zero_()})


def test_compiles_without_graph_breaks(plain: tuple[str, int]) -> None:
    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(a.shape[0], b.shape[1])
        torch.ops.nvgemm_aot.mm.out(a.relu(), b, plain[0], out=out)
        return torch.ops.nvgemm_aot.mm(out, b, plain[0]) + 1

    a, b, _ = operands()
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(a, b)
    torch.testing.assert_close(got, a.relu() @ b @ b + 1)


def test_fake_tensors_get_shape_and_dtype(register: Register) -> None:
    id, _ = register(signature(operand=DType.BF16, out=DType.FP32))
    meta = torch.ops.nvgemm_aot.mm(
        torch.empty(5, 7, dtype=torch.bfloat16, device="meta"),
        torch.empty(7, 3, dtype=torch.bfloat16, device="meta"),
        id,
    )
    assert (meta.shape, meta.dtype, meta.stride()) == ((5, 3), torch.float32, (3, 1))
    with pytest.raises(RuntimeError, match="k must agree"):
        torch.ops.nvgemm_aot.mm(
            torch.empty(5, 7, device="meta"), torch.empty(8, 3, device="meta"), id
        )


@pytest.mark.parametrize("which", [0, 1, 2])
def test_refuses_operands_that_require_grad(plain: tuple[str, int], which: int) -> None:
    tensors = operands()
    tensors[which].requires_grad_()
    a, b, out = (tensor * 1 if tensor.requires_grad else tensor for tensor in tensors)
    with pytest.raises(RuntimeError, match=r"requires grad, and the operator has no derivative"):
        torch.ops.nvgemm_aot.mm.out(a, b, plain[0], out=out)
    if which < 2:
        with pytest.raises(RuntimeError, match="requires grad"):
            torch.ops.nvgemm_aot.mm(*tensors[:2], plain[0])
        with torch.no_grad():
            result = torch.ops.nvgemm_aot.mm(*tensors[:2], plain[0])
        torch.testing.assert_close(result, (a @ b).detach())


def test_operators_resolve_negative_views(plain: tuple[str, int]) -> None:
    a, b, _ = operands()
    negative = torch._neg_view(a)
    torch.testing.assert_close(torch.ops.nvgemm_aot.mm(negative, b, plain[0]), -a @ b)


# Processes


def test_a_forked_child_goes_on_with_kernels_of_the_cpu(
    lib: native.Native, register: Register
) -> None:
    _, handle = register()
    a, b, out = operands()
    lib.launch(handle, a, b, out)
    child = os.fork()
    if child == 0:
        out.zero_()
        lib.launch(handle, a, b, out)
        os._exit(0 if torch.allclose(out, a @ b, atol=1e-5) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_forked_during_a_first_call_can_make_it(
    lib: native.Native, register: Register
) -> None:
    slow = "{ struct timespec pause = {0, 300000000}; nanosleep(&pause, 0); }"
    _, handle = register(behaviour=slow)
    a, b, out = operands()
    thread = threading.Thread(target=lambda: lib.launch(handle, a, b, out))
    thread.start()
    while not _is_sleeping(thread):
        pass
    child = os.fork()
    if child == 0:
        own = torch.empty_like(out)
        lib.launch(handle, a, b, own)
        os._exit(0 if torch.allclose(own, a @ b, atol=1e-5) else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def _is_sleeping(thread: threading.Thread) -> bool:
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


def test_the_interpreter_exits_cleanly(register: Register, tmp_path: Path) -> None:
    script = f"""
import os, sys, torch
sys.path[:0] = {sys.path!r}
import cpu_kernels
from pathlib import Path
from nvgemm_runtime import native
kernel = cpu_kernels.load(cpu_kernels.signature(), Path({str(tmp_path)!r}))
lib = native.load()
handle = lib.register_kernel(id=kernel.id, function_address=kernel.address,
    signature=cpu_kernels.signature(), alignment_bytes=4, target=None)
lib.set_loader(lambda id: None)
for _ in range(5):
    if os.fork() == 0:
        a = torch.ones(4, 4)
        lib.launch(handle, a, a, torch.empty(4, 4))
        torch.ops.nvgemm_aot.mm(a, a, kernel.id)
        sys.exit(0)
    assert os.wait()[1] == 0
"""
    # Four fresh interpreters and five forked ones each, which all tear everything down.
    processes = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    for process in processes:
        assert process.communicate()[1] == b""
        assert process.returncode == 0


# On a device, as far as a stand-in for the driver goes


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_driver.build(tmp_path_factory.mktemp("driver"))


CUDA = """
import ctypes, os, torch, tvm_ffi
import cpu_kernels, fake_driver
from pathlib import Path
from nvgemm_runtime import native
from nvgemm_runtime.target import Target
lib = native.load()
driver = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
def register(behaviour="", arch="sm_90a"):
    kernel = cpu_kernels.load(cpu_kernels.signature(), Path(os.environ["LD_LIBRARY_PATH"]), behaviour)
    return lib.register_kernel(id=kernel.id, function_address=kernel.address,
        signature=cpu_kernels.signature(), alignment_bytes=16, target=Target(arch=arch))
def on(tensor, device=0):
    return tvm_ffi.from_dlpack(fake_driver.OnDevice(tensor, device))
a, b, out = torch.randn(8, 8), torch.randn(8, 8), torch.full((8, 8), float("nan"))
def launch(handle, device=0):
    lib.launch(handle, on(a, device), on(b, device), on(out, device))
"""


def test_cuda_makes_the_device_current_and_restores_the_one_before(driver: Path) -> None:
    script = f"""{CUDA}
handle = register({fake_driver.LEAVES_ANOTHER_DEVICE_CURRENT!r})
current = ctypes.c_void_p()
for before in (None, 0x1000, 0x1001):
    driver.cuCtxSetCurrent(ctypes.c_void_p(before))
    for _ in range(2):
        out.fill_(float("nan"))
        launch(handle)
        driver.cuCtxGetCurrent(ctypes.byref(current))
        assert current.value == before, (current.value, before)
        torch.testing.assert_close(out, a @ b)
"""
    fake_driver.run(driver, script)


def test_cuda_fills_with_zeros_on_the_current_stream(driver: Path) -> None:
    script = f"""{CUDA}
empty_a, empty_b, buffer = torch.empty(8, 0), torch.empty(0, 8), torch.ones(8, 16)
with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), 0x77):
    lib.launch(register(), on(empty_a), on(empty_b), on(buffer[:, 4:12]))
assert (buffer[:, 4:12] == 0).all() and buffer.sum() == 64
print(ctypes.c_int.in_dll(driver, "memsets").value,
      ctypes.c_void_p.in_dll(driver, "last_stream").value)
"""
    assert fake_driver.run(driver, script).split() == ["1", str(0x77)]


def test_cuda_runs_only_on_architectures_of_the_target(driver: Path) -> None:
    archs = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_100f", "sm_103f", "sm_120f")
    capabilities = (80, 89, 90, 100, 103, 120, 121)
    script = f"""{CUDA}
for capability in {capabilities}:
    os.environ["FAKE_CAPABILITY"] = str(capability)
    for arch in {archs}:
        handle = register(f"/* {{arch}} on {{capability}} */", arch)
        for _ in range(2):  # a refusal is not forgotten
            try:
                launch(handle)
                message = ""
            except ValueError as error:
                message = str(error)
        print(message)
"""
    printed = iter(fake_driver.run(driver, script).split("\n"))
    for capability in capabilities:
        for arch in archs:
            major, minor = divmod(capability, 10)
            message = next(printed)
            assert (message == "") == Target(arch=arch).runs_on((major, minor)), message
            said = f"cuda:0 has compute capability {major}.{minor}; a kernel for {arch} runs on"
            assert message == "" or said in message


def test_cuda_reports_what_the_driver_says(driver: Path) -> None:
    script = f"""{CUDA}
from nvgemm_runtime.errors import DriverError
for device in (2, 64):
    try:
        launch(register(), device)
    except DriverError as error:
        print(error)
"""
    assert fake_driver.run(driver, script).splitlines() == [
        "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE (101)",
        "tensors are on cuda:64; must be in 0..63",
    ]


def test_cuda_refuses_operands_on_two_devices(driver: Path) -> None:
    script = f"""{CUDA}
for operands in ((on(a), on(b, 1), on(out)), (on(a), on(b), out)):
    try:
        lib.launch(register(), *operands)
    except ValueError as error:
        print(error)
"""
    first, second = fake_driver.run(driver, script).splitlines()
    assert first.endswith("b is on cuda:1 and a on cuda:0; all must be on one device")
    assert second.endswith("out is on cpu; the kernel runs on cuda")


def test_cuda_is_refused_in_a_child_of_a_process_that_used_it(driver: Path) -> None:
    script = f"""{CUDA}
handle = register()
def child():
    if os.fork() == 0:
        try:
            launch(handle)
            print("runs", flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
child()
launch(handle)
child()
launch(handle)
"""
    first, second = fake_driver.run(driver, script).splitlines()
    assert first == "runs"
    assert "was forked from one that had launched on CUDA" in second


def test_refuses_tensors_of_the_cpu_for_cuda(lib: native.Native, plain: tuple[str, int]) -> None:
    handle = lib.register_kernel(
        id="for cuda",
        function_address=1,
        signature=replace(signature()),
        alignment_bytes=4,
        target=Target(arch="sm_90a"),
    )
    with pytest.raises(ValueError, match="a is on cpu; the kernel runs on cuda"):
        lib.launch(handle, *operands())


# The library file


def _library() -> ELFFile:
    resource = importlib.resources.files("nvgemm_runtime").joinpath("_native.so")
    return ELFFile(resource.open("rb"))


def test_the_library_needs_only_what_every_process_has() -> None:
    tags = list(_library().get_section_by_name(".dynamic").iter_tags())
    needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    assert needed <= {
        "libtorch_cpu.so",
        "libtvm_ffi.so",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "libpthread.so.0",
    }
    assert {"libtorch_cpu.so", "libtvm_ffi.so"} <= needed
    assert not {tag.entry.d_tag for tag in tags} & {"DT_RPATH", "DT_RUNPATH"}


def test_the_library_exports_only_functions_of_tvm_ffi() -> None:
    symbols = _library().get_section_by_name(".dynsym").iter_symbols()
    exported = {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"}
    assert exported
    assert all(name.startswith("__tvm_ffi_") for name in exported)


def test_the_library_loads_with_old_systems() -> None:
    """Of manylinux_2_28: glibc 2.28, and the C++ library of GCC 8."""
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
    section = _library().get_section_by_name(".gnu.version_r")
    for _, versions in section.iter_versions():
        for version in versions:
            family, _, number = version.name.partition("_")
            wanted = tuple(int(part) for part in number.split("."))
            assert wanted <= newest.get(family, wanted), version.name


def test_importing_the_module_loads_nothing() -> None:
    script = "import nvgemm_runtime.native, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
