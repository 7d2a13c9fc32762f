"""The operators that the native launcher gives torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import cpu_kernels
from cpu_kernels import Register, operands, signature
from forked_scripts import ForkedScripts
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.launch.loading import native


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


def test_operands_that_are_no_leaf_are_refused_for_batches_too(batched: tuple[str, int]) -> None:
    a, b, out = operands(batch=2)
    with pytest.raises(RuntimeError, match=r"nvgemm_aot::bmm: b requires grad, and the operator"):
        torch.ops.nvgemm_aot.bmm(a, b.requires_grad_() * 1, batched[0])
    with pytest.raises(RuntimeError, match=r"nvgemm_aot::bmm.out: b requires grad"):
        torch.ops.nvgemm_aot.bmm.out(a, b, batched[0], out=out)


def of_operators(kernel: str) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Sums of a @ a by an operator, as functions of a."""

    def functional(a: torch.Tensor) -> torch.Tensor:
        return torch.ops.nvgemm_aot.mm(a, torch.ones(8, 8), kernel).sum()

    def out_form(a: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(a)
        torch.ops.nvgemm_aot.mm.out(torch.ones(8, 8), a, kernel, out=out)
        return out.sum()

    return [functional, out_form]


@pytest.mark.parametrize("form", [0, 1])
def test_refuses_to_lose_a_derivative_of_a_transform(plain: tuple[str, int], form: int) -> None:
    function, a = of_operators(plain[0])[form], torch.randn(8, 8)
    for transformed in (torch.func.grad(function), torch.func.jacrev(function)):
        with pytest.raises(RuntimeError, match="requires grad, and the operator has no derivative"):
            transformed(a)
    with pytest.raises(RuntimeError, match="requires grad, and the operator has no derivative"):
        torch.func.vjp(function, a)
    with pytest.raises(RuntimeError, match="has a forward-mode tangent"):
        torch.func.jvp(function, (a,), (a,))
    with pytest.raises(RuntimeError, match="has a forward-mode tangent"):
        torch.func.jacfwd(function)(a)


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("recording", [False, True])
def test_refuses_dual_tensors_and_serves_others_beside_them(
    plain: tuple[str, int], form: int, recording: bool
) -> None:
    function, a = of_operators(plain[0])[form], torch.randn(8, 8)
    with forward_ad.dual_level(), torch.set_grad_enabled(recording):
        dual = forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(RuntimeError, match=r"mm.*: [ab] has a forward-mode tangent"):
            function(dual)
        torch.testing.assert_close(function(a), a.sum() * 8)
        torch.testing.assert_close(function(forward_ad.unpack_dual(dual).primal), a.sum() * 8)


def test_functions_of_constants_may_be_transformed(plain: tuple[str, int]) -> None:
    constant = torch.randn(8, 8)

    def function(a: torch.Tensor) -> torch.Tensor:
        return (a * torch.ops.nvgemm_aot.mm(constant, constant, plain[0])).sum()

    got = torch.func.grad(function)(torch.randn(8, 8))
    torch.testing.assert_close(got, constant @ constant)


def test_tracing_records_the_operators(plain: tuple[str, int]) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        out = torch.empty(8, 8)
        torch.ops.nvgemm_aot.mm.out(a, a, plain[0], out=out)
        return torch.ops.nvgemm_aot.mm(out, a, plain[0])

    a, other = torch.randn(8, 8), torch.randn(8, 8)
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(function, tracing_mode=mode)(a)
        torch.testing.assert_close(traced(other), other @ other @ other)


WITHOUT_PYTHON = """
import importlib.resources, sys, torch, tvm_ffi
sys.path[:0] = {path!r}
import cpu_kernels
from pathlib import Path
from nvgemm_runtime.launch.loading import native
native.register_refusals = native._register_fakes = lambda *_: None
lib = native.load()
kernel = cpu_kernels.load(cpu_kernels.signature(), Path({directory!r}))
lib.register_kernel(id=kernel.id, function_address=kernel.address,
    signature=cpu_kernels.signature(), alignment_bytes=4, target=None)
a, out = torch.randn(4, 4), torch.empty(4, 4)
torch.testing.assert_close(torch.ops.nvgemm_aot.mm(a, a, kernel.id), a @ a)
torch.ops.nvgemm_aot.mm.out(a, a, kernel.id, out=out)
torch.testing.assert_close(out, a @ a)
"""


def test_the_library_alone_gives_operators_that_run(scripts: ForkedScripts, tmp_path: Path) -> None:
    done = scripts.run(WITHOUT_PYTHON.format(path=sys.path, directory=str(tmp_path)))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_backward_refuses_a_saved_value_that_an_operator_overwrote(
    plain: tuple[str, int], mode: Any
) -> None:
    a, b, saved = operands()
    loss = (torch.ones(8, 8, requires_grad=True) * saved).sum()
    with mode():
        torch.ops.nvgemm_aot.mm.out(a, b, plain[0], out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_inference_tensor_is_written_to_in_inference_mode_alone(plain: tuple[str, int]) -> None:
    a, b, _ = operands()
    with torch.inference_mode():
        out = torch.full((8, 8), 7.0)
    with pytest.raises(RuntimeError, match="inference tensor"):
        torch.ops.nvgemm_aot.mm.out(a, b, plain[0], out=out)
    assert torch.equal(out, torch.full((8, 8), 7.0))
    with torch.inference_mode():
        torch.ops.nvgemm_aot.mm.out(a, b, plain[0], out=out)
        torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 2, 2)])
def test_outs_of_any_rank_are_refused_by_the_checks(
    plain: tuple[str, int], shape: tuple[int, ...]
) -> None:
    a, b, _ = operands()
    with pytest.raises(RuntimeError, match=rf"out has {len(shape)} dimensions"):
        torch.ops.nvgemm_aot.mm.out(a, b, plain[0], out=torch.empty(shape))


def test_an_out_that_is_a_negative_view_is_refused(plain: tuple[str, int]) -> None:
    a, b, out = operands()
    with pytest.raises(RuntimeError, match=r"mm.out: out is a lazily negated view"):
        torch.ops.nvgemm_aot.mm.out(a, b, plain[0], out=torch._neg_view(out))


@pytest.mark.parametrize("sizes", [(3, 0, 4), (0, 3, 4), (0, 0, 4), (3, 4, 0)])
@pytest.mark.parametrize("batch", [None, 0, 2])
def test_fake_results_have_the_strides_of_real_ones(
    register: Register, sizes: tuple[int, int, int], batch: int | None
) -> None:
    op = Op.MM if batch is None else Op.BMM
    id, _ = register(signature(op=op))
    a, b, out = operands(*sizes, batch)
    operator = getattr(torch.ops.nvgemm_aot, op.value)
    real, fake = operator(a, b, id), operator(a.to("meta"), b.to("meta"), id)
    assert real.stride() == fake.stride() == out.stride()


def test_refuses_dtypes_that_no_kernel_has(plain: tuple[str, int]) -> None:
    a, b, _ = operands()
    with pytest.raises(RuntimeError, match="a is of a dtype that no kernel takes; must be float32"):
        torch.ops.nvgemm_aot.mm(a.double(), b, plain[0])


def test_operators_resolve_negative_views(plain: tuple[str, int]) -> None:
    a, b, _ = operands()
    negative = torch._neg_view(a)
    torch.testing.assert_close(torch.ops.nvgemm_aot.mm(negative, b, plain[0]), -a @ b)


def test_unknown_ids_are_refused(lib: native.Native) -> None:
    lib.set_loader(None)  # another test of this process may have set one
    with pytest.raises(RuntimeError, match=r"no kernel feed is loaded, and no loader is set"):
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
