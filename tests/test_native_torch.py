"""The operators that the native launcher gives torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cpu_kernels
from cpu_kernels import Register, operands, signature
from nvgemm_runtime import native
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.problem import DType, Op


@pytest.fixture
def loader(lib: native.Native) -> Iterator[Callable[[Any], None]]:
    yield lib.set_loader
    lib.set_loader(None)


def test_abi_needs_no_tensor(lib: native.Native) -> None:
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
        got = torch.compile(model, fullgraph=True)(a, b)
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


def test_backward_refuses_a_saved_value_that_an_operator_overwrote(plain: tuple[str, int]) -> None:
    a, b, saved = operands()
    loss = (torch.ones(8, 8, requires_grad=True) * saved).sum()
    torch.ops.nvgemm_aot.mm.out(a, b, plain[0], out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_refuses_dtypes_that_no_kernel_has(plain: tuple[str, int]) -> None:
    a, b, _ = operands()
    with pytest.raises(RuntimeError, match="a is of a dtype that no kernel takes; must be float32"):
        torch.ops.nvgemm_aot.mm(a.double(), b, plain[0])


def test_operators_resolve_negative_views(plain: tuple[str, int]) -> None:
    a, b, _ = operands()
    negative = torch._neg_view(a)
    torch.testing.assert_close(torch.ops.nvgemm_aot.mm(negative, b, plain[0]), -a @ b)


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
