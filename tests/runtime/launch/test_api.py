"""The public functions, from tensors to results, with bundled kernels for the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import cpu_provider
import nvgemm_runtime
from forked_scripts import ForkedScripts, forked_scripts
from installed_bundles import use
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import NoKernelError, StorageError
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.launch import api, select
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.launch.loading.loader import KernelLoader
from nvgemm_runtime.matching.matches import Basis
from synthetic_content import synthetic_content

Tensor = torch.Tensor


@pytest.fixture(autouse=True, scope="module")
def own_loader() -> Iterator[None]:
    """Take back what the product sets once a process: other tests set their own."""
    yield
    native.load().set_loader(None)
    api._launcher.cache_clear()


@pytest.fixture
def installed(cpu_bundle: BuiltBundle, monkeypatch: pytest.MonkeyPatch) -> BuiltBundle:
    use(monkeypatch, cpu_bundle.path)
    return cpu_bundle


@pytest.fixture
def strict(kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltBundle:
    """A bundle of one kernel, which demands 16 bytes."""
    declared = [cpu_provider.problem(sizes=(64, 64, 64))]
    bundle = cpu_provider.build_bundle(declared, tmp_path, kernel_cache, candidates=1)
    use(monkeypatch, bundle.path)
    return bundle


def operands(
    served: Signature, m: int, n: int, k: int, batch: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """A and B in a signature's types and layouts, and the product in its type."""
    lead = (batch,) if served.op is Op.BMM else ()

    def some(row_major: bool, *shape: int) -> Tensor:
        values = torch.randint(-8, 9, shape) if served.a.is_integer else torch.randn(shape)
        tensor = values.to(torch_dtype(served.a))
        return tensor if row_major else tensor.mT.contiguous().mT

    a = some(served.layout.a_row_major, *lead, m, k)
    b = some(served.layout.b_row_major, *lead, k, n)
    wide = torch.int32 if served.a.is_integer else torch.float32
    return a, b, (a.to(wide) @ b.to(wide)).to(torch_dtype(served.out))


def function(served: Signature) -> Callable[..., Tensor]:
    return {Op.MM: nvgemm_runtime.mm, Op.BMM: nvgemm_runtime.bmm}[served.op]


def assert_same(got: Tensor, expected: Tensor) -> None:
    if expected.dtype is torch.int32:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("served", cpu_provider.SIGNATURES, ids=lambda served: served.key)
@pytest.mark.parametrize(
    ("sizes", "basis"),
    [((16, 32, 64), Basis.DECLARED), ((37, 16, 48), Basis.SIGNATURE), ((3, 5, 7), Basis.SIGNATURE)],
)
def test_computes_declared_and_other_sizes_of_every_signature(
    installed: BuiltBundle, served: Signature, sizes: tuple[int, int, int], basis: Basis
) -> None:
    a, b, expected = operands(served, *sizes)
    explanation = nvgemm_runtime.explain(a, b)
    assert explanation.match is not None, explanation
    assert explanation.match.basis is basis
    assert explanation.reasons == ()
    result = function(served)(a, b)
    assert result.dtype is expected.dtype
    assert_same(result, expected)
    out = torch.full_like(expected, 77)
    assert function(served)(a, b, out=out) is out
    assert_same(out, expected)


def test_every_kernel_can_be_named_by_id_and_as_loaded(installed: BuiltBundle) -> None:
    for kernel in installed.header.kernels:
        a, b, expected = operands(kernel.signature, 16, 16, 32)
        out = torch.empty_like(expected)
        assert_same(function(kernel.signature)(a, b, kernel=kernel.id), expected)
        loaded = api.load_kernel(kernel.id)
        assert loaded.kernel.id == kernel.id
        assert_same(function(kernel.signature)(a, b, out, loaded), expected)


def test_choose_gives_the_best_ranked_kernel(installed: BuiltBundle) -> None:
    a, b, expected = operands(cpu_provider.SIGNATURES[0], 16, 32, 64)
    out = torch.empty_like(expected)
    match = nvgemm_runtime.explain(a, b).match
    assert match is not None
    chosen = nvgemm_runtime.choose(a, b, out)
    assert chosen.kernel == match.kernels[0].kernel
    nvgemm_runtime.mm(a, b, out=out, kernel=chosen)
    assert_same(out, expected)


def test_a_damaged_payload_costs_its_bundle_alone(
    cpu_bundle: BuiltBundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    paths = [tmp_path / f"{name}.nvgemm" for name in "abc"]
    whole = cpu_bundle.path.read_bytes()
    body_bytes = sum(kernel.span.stored_bytes for kernel in cpu_bundle.header.kernels)
    damaged = whole[:-body_bytes] + bytes(body_bytes)
    a, b = torch.ones(16, 64), torch.ones(64, 32)
    for path, content in zip(paths, (damaged, damaged, whole), strict=True):
        path.write_bytes(content)
    use(monkeypatch, *paths)
    monkeypatch.setattr(select, "LOADER", KernelLoader())
    assert torch.equal(nvgemm_runtime.mm(a, b), a @ b)
    assert [path.name in caplog.text for path in paths] == [True, True, False]
    assert len(caplog.records) == 2
    assert [found.problem is None for found in nvgemm_runtime.bundles()] == [False, False, True]
    use(monkeypatch, *paths[:2])
    monkeypatch.setattr(select, "LOADER", KernelLoader())
    with pytest.raises(NoKernelError, match=r"b\.nvgemm: \[frame") as caught:
        nvgemm_runtime.mm(a, b)
    assert len([reason for reason in caught.value.reasons if "[frame" in reason]) == 2


def test_a_bundle_that_cannot_be_read_for_a_moment_is_tried_again(
    cpu_bundle: BuiltBundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    paths = [tmp_path / f"{name}.nvgemm" for name in "ab"]
    for path in paths:
        path.write_bytes(cpu_bundle.path.read_bytes())
    use(monkeypatch, *paths)
    monkeypatch.setattr(select, "LOADER", KernelLoader())
    a, b = torch.ones(16, 64), torch.ones(64, 32)
    read, unreadable, tried = Bundle.payload, ["a.nvgemm"], []

    def payload(self: Bundle, kernel: Kernel) -> bytes:
        tried.append(self.path.name)
        if self.path.name in unreadable:
            raise StorageError(f"{self.path}: cannot read: Input/output error")
        return read(self, kernel)

    monkeypatch.setattr(Bundle, "payload", payload)
    assert torch.equal(nvgemm_runtime.mm(a, b), a @ b)
    assert tried == ["a.nvgemm", "b.nvgemm"]
    assert [found.problem for found in nvgemm_runtime.bundles()] == [None, None]
    monkeypatch.setattr(select, "LOADER", KernelLoader())
    unreadable.append("b.nvgemm")
    with pytest.raises(StorageError, match="cannot read: Input/output error"):
        nvgemm_runtime.mm(a, b)
    unreadable.clear()
    tried.clear()
    assert torch.equal(nvgemm_runtime.mm(a, b), a @ b)
    assert tried == ["a.nvgemm"], "the best again"
    assert not caplog.records


def test_explanations_can_be_read(installed: BuiltBundle) -> None:
    a, b = torch.zeros(16, 64), torch.zeros(64, 32)
    lines = str(nvgemm_runtime.explain(a, b)).splitlines()
    assert lines[0] == "mm/tt/fp32xfp32/fp32/fp32/m16n32k64: declared"
    assert lines[1].startswith("  1. ")
    assert "Cpu_" in lines[1]
    other = str(nvgemm_runtime.explain(a[:4], b))
    assert "m4n32k64: signature, ranked as mm/tt/fp32xfp32/fp32/fp32/m16n32k64" in other
    assert "no kernel\n  " in str(nvgemm_runtime.explain(a.double(), b.double()))


def test_bundles_says_what_was_found(installed: BuiltBundle) -> None:
    (found,) = nvgemm_runtime.bundles()
    assert (found.path, found.origin) == (installed.path, "NVGEMM_AOT_BUNDLES")
    assert found.problem is None


@pytest.mark.parametrize(
    ("a", "b"), [((0, 8), (8, 4)), ((4, 8), (8, 0)), ((4, 0), (0, 8)), ((0, 0), (0, 0))]
)
@pytest.mark.parametrize("by_id", [False, True])
def test_sizes_of_zero_give_what_torch_gives(
    installed: BuiltBundle, a: tuple[int, int], b: tuple[int, int], by_id: bool
) -> None:
    kernel = next(k for k in installed.header.kernels if k.signature.key.startswith("mm/tt/fp32"))
    left, right = torch.ones(a), torch.ones(b)
    result = nvgemm_runtime.mm(left, right, kernel=kernel.id if by_id else None)
    assert torch.equal(result, left @ right)
    out = torch.full((a[0], b[1]), float("nan"))
    nvgemm_runtime.mm(left, right, out=out, kernel=kernel.id if by_id else None)
    assert torch.equal(out, left @ right)


def test_sizes_of_zero_need_shapes_that_fit_too(installed: BuiltBundle) -> None:
    with pytest.raises(ValueError, match="do not multiply"):
        nvgemm_runtime.mm(torch.ones(0, 5), torch.ones(7, 3))
    with pytest.raises(ValueError, match=r"must have \[0, 3\]"):
        nvgemm_runtime.mm(torch.ones(0, 5), torch.ones(5, 3), out=torch.ones(1, 3))
    with pytest.raises(NoKernelError, match=r"nothing to compute because m is 0; .* zeros"):
        nvgemm_runtime.choose(torch.ones(0, 5), torch.ones(5, 3), torch.ones(0, 3))
    explanation = nvgemm_runtime.explain(torch.ones(4, 0), torch.ones(0, 3))
    assert "nothing to compute because k is 0" in str(explanation)


@pytest.mark.parametrize(
    ("a", "b", "out", "message"),
    [
        (torch.ones(4, 0), torch.ones(0, 4).half(), None, "no kernel computes fp32 x fp16"),
        (torch.ones(4, 0).double(), torch.ones(0, 4).double(), None, "no kernel takes torch.float"),
        (torch.ones(4, 0), torch.ones(0, 4), torch.ones(4, 4).long(), "no kernel takes torch.int6"),
        (torch.ones(4, 0), torch.ones(0, 4), torch.ones(4, 4).int(), "fp32 x fp32 to int32"),
        (torch.ones(4, 0), torch.ones(0, 4), torch.ones(4).expand(4, 4), "elements share memory"),
        (torch.ones(4, 0), torch.ones(0, 4), torch.ones(4, 4).T, "out is not row-major"),
        (torch.ones(0, 4), torch.ones(4, 4).half(), None, "no kernel computes fp32 x fp16"),
        (torch.ones(0, 4).char(), torch.ones(4, 4).byte(), None, "no kernel computes int8 x uint8"),
        (torch.ones(0, 4).to(torch.float8_e4m3fn), torch.ones(4, 4).bfloat16(), None,
         "no kernel computes fp8_e4m3 x bf16 to bf16; pass a and b in one dtype, or both in fp8"),
        (torch.ones(2, 4, 0), torch.ones(2, 0, 4), torch.ones(99).as_strided((2, 4, 4), (4, 4, 1)),
         "elements share memory"),
    ],
)  # fmt: skip
def test_sizes_of_zero_need_types_and_an_out_that_fit_too(
    installed: BuiltBundle, a: Tensor, b: Tensor, out: Tensor | None, message: str
) -> None:
    with pytest.raises(NoKernelError, match=message):
        (nvgemm_runtime.bmm if a.dim() == 3 else nvgemm_runtime.mm)(a, b, out=out)
    assert out is None or (out == 1).all()


def test_integers_of_size_zero_may_give_fp32(installed: BuiltBundle) -> None:
    a, b, out = torch.ones(4, 0).char(), torch.ones(0, 4).char(), torch.ones(4, 4)
    assert torch.equal(nvgemm_runtime.mm(a, b, out=out), torch.zeros(4, 4))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_refuses_to_lose_a_gradient(installed: BuiltBundle, which: int) -> None:
    tensors = [torch.ones(16, 16) for _ in range(3)]
    tensors[which].requires_grad_()
    a, b, out = tensors
    with pytest.raises(RuntimeError, match="requires grad"):
        nvgemm_runtime.mm(a, b, out=out)
    with torch.no_grad():
        assert torch.equal(nvgemm_runtime.mm(a, b), (a @ b).detach())


def chosen(name: str, a: Tensor, b: Tensor, out: Tensor) -> Any:
    """What is passed as the kernel of a call: one way to name the best."""
    loaded = nvgemm_runtime.choose(a, b, out)
    return {"none": None, "id": loaded.kernel.id, "loaded": loaded}[name]


ways = pytest.mark.parametrize("way", ["none", "id", "loaded"])


@ways
@pytest.mark.parametrize("which", [0, 1, 2])
def test_refuses_dual_tensors(installed: BuiltBundle, way: str, which: int) -> None:
    tensors = [torch.ones(16, 16) for _ in range(3)]
    kernel = chosen(way, *tensors)
    with forward_ad.dual_level():
        nvgemm_runtime.mm(*tensors, kernel)
        tensors[which] = forward_ad.make_dual(tensors[which], torch.ones(16, 16))
        with pytest.raises(RuntimeError, match=r"mm: .* has a forward-mode tangent"):
            nvgemm_runtime.mm(*tensors, kernel)


@ways
def test_refuses_to_run_inside_transforms(installed: BuiltBundle, way: str) -> None:
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    kernel = chosen(way, a, b, torch.ones(16, 16))

    def function(a: Tensor) -> Tensor:
        return nvgemm_runtime.mm(a, b, out=torch.ones(16, 16), kernel=kernel).sum()

    for transformed in (torch.func.grad(function), torch.func.jacrev(function)):
        with pytest.raises(RuntimeError, match="requires grad"):
            transformed(a)
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.func.vjp(function, a)
    with pytest.raises(RuntimeError, match="has a forward-mode tangent"):
        torch.func.jvp(function, (a,), (a,))
    for other in (torch.func.vmap(function), torch.func.functionalize(function)):
        batch = a if other is not torch.func.vmap else a[None]
        with pytest.raises((ValueError, RuntimeError)):
            other(batch)


@ways
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_backward_refuses_a_saved_value_that_a_call_overwrote(
    installed: BuiltBundle, way: str, mode: Any
) -> None:
    a, b, saved = torch.ones(16, 16), torch.ones(16, 16), torch.ones(16, 16)
    loss = (torch.ones(16, 16, requires_grad=True) * saved).sum()
    with mode():
        nvgemm_runtime.mm(a, b, saved, chosen(way, a, b, saved))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@ways
def test_an_inference_tensor_may_be_written_to(installed: BuiltBundle, way: str) -> None:
    """Nobody can have saved it for a derivative, so nothing is lost."""
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    with torch.inference_mode():
        out = torch.full((16, 16), 7.0)
    kernel = chosen(way, a, b, out)
    assert torch.equal(nvgemm_runtime.mm(a, b, out, kernel), a @ b)
    with torch.inference_mode():
        assert torch.equal(nvgemm_runtime.mm(a, b, out, kernel), a @ b)


@ways
@pytest.mark.parametrize("given", [False, True])
def test_refuses_to_be_missing_in_a_trace(installed: BuiltBundle, way: str, given: bool) -> None:
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    kernel = chosen(way, a, b, torch.ones(16, 16))

    def function(a: Tensor) -> Tensor:
        return nvgemm_runtime.mm(a, b, torch.ones(16, 16) if given else None, kernel)

    with pytest.raises(RuntimeError, match=r"ProxyTorchDispatchMode, .* torch.ops.nvgemm_aot.mm"):
        make_fx(function)(a)
    if not (given and way == "loaded"):  # a look that the quickest call does without
        with pytest.raises(RuntimeError, match=r"torch.jit.trace, .* torch.ops.nvgemm_aot.mm"):
            torch.jit.trace(function, (a,))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="by FakeTensorMode"):
        function(torch.ones(16, 16))


@ways
def test_refuses_fake_tensors_outside_their_mode(installed: BuiltBundle, way: str) -> None:
    real = torch.ones(16, 16)
    kernel = chosen(way, real, real, torch.ones(16, 16))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
    with pytest.raises((ValueError, RuntimeError), match=r"fake|Fake"):
        nvgemm_runtime.mm(fake, fake, torch.ones(16, 16), kernel)


@ways
def test_compiled_functions_may_call_it_between_their_graphs(
    installed: BuiltBundle, way: str
) -> None:
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    kernel = chosen(way, a, b, torch.ones(16, 16))

    def function(a: Tensor) -> Tensor:
        return nvgemm_runtime.mm(a + 1, b, kernel=kernel) * 2

    torch.testing.assert_close(torch.compile(function)(a), (a + 1) @ b * 2)


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_refuses_negative_views(installed: BuiltBundle, way: str, dtype: torch.dtype) -> None:
    a, b, out = (torch.ones(16, 16, dtype=dtype) for _ in range(3))
    kernel = chosen(way, a, b, out)
    with pytest.raises(ValueError, match="resolve_neg"):
        nvgemm_runtime.mm(torch._neg_view(a), b, kernel=kernel)
    if way == "loaded" and dtype is torch.bfloat16:
        return  # no well-meant operation makes such a view, and there is no time to look for one
    with pytest.raises(ValueError, match="resolve_neg"):
        nvgemm_runtime.mm(a, b, torch._neg_view(out), kernel)


@ways
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: t.to_sparse(), r"a has layout torch.sparse_coo, must .* \.to_dense\(\)"),
        (lambda t: t.to_sparse_csr(), r"a has layout torch.sparse_csr, must .* \.to_dense\(\)"),
        (lambda t: t.to_mkldnn(), r"a has layout torch._mkldnn, must .* \.to_dense\(\)"),
        (lambda t: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8), "a is quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_refuses_tensors_that_are_no_matrices_in_memory(
    installed: BuiltBundle, way: str, make: Callable[[Tensor], Tensor], message: str
) -> None:
    a, b, out = torch.ones(16, 16), torch.ones(16, 16), torch.ones(16, 16)
    kernel = chosen(way, a, b, out)
    with pytest.raises((ValueError, TypeError), match=message) as error:
        nvgemm_runtime.mm(make(a), b, out, kernel)
    assert "frame #" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        nvgemm_runtime.mm(make(a), b, kernel=kernel)
    assert message[:9] in str(nvgemm_runtime.explain(make(a), b))


@pytest.mark.parametrize("kernel", ["none", "id", "loaded"])
@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (torch.ones(4), torch.ones(4, 4), ValueError, "rank 2|1 dimensions, shape"),
        (torch.ones(2, 4, 4), torch.ones(2, 4, 4), ValueError, "rank 2|3 dimensions, shape"),
        (torch.ones(4, 4), torch.ones(5, 4), ValueError, r"do not multiply|shapes of a, b and out"),
        (torch.ones(4, 4).double(), torch.ones(4, 4).double(), (NoKernelError, TypeError),
         "no kernel takes torch.float64|a is float64; must be float32"),
        (torch.ones(4, 4), torch.ones(4, 4).half(), (NoKernelError, TypeError),
         "no bundled kernel computes .*fp32xfp16|b is float16; must be float32"),
        (torch.ones(4, 4), torch.ones(4, 4, device="meta"), ValueError,
         r"two devices \(cpu and me"),
    ],
)  # fmt: skip
def test_wrong_operands_are_refused_however_the_kernel_is_named(
    installed: BuiltBundle, kernel: str, a: Tensor, b: Tensor, error: Any, message: str
) -> None:
    id_ = next(k.id for k in installed.header.kernels if k.signature.key.startswith("mm/tt/fp32"))
    named: Any = {"none": None, "id": id_, "loaded": api.load_kernel(id_)}[kernel]
    with pytest.raises(error, match=message):
        nvgemm_runtime.mm(a, b, kernel=named)
    with pytest.raises(error, match=message):
        nvgemm_runtime.mm(a, b, out=torch.empty(4, 4), kernel=named)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_kernel_of_the_other_operation_is_refused(
    installed: BuiltBundle, given: bool, loaded: bool
) -> None:
    id_ = next(k.id for k in installed.header.kernels if k.signature.op is Op.BMM)
    kernel = api.load_kernel(id_) if loaded else id_
    out = torch.ones(4, 4) if given else None
    with pytest.raises(ValueError, match=rf"mm: kernel {id_[:12]} computes bmm/"):
        nvgemm_runtime.mm(torch.ones(4, 4), torch.ones(4, 4), out, kernel)


@pytest.mark.parametrize("given", [False, True])
def test_a_kernel_of_another_kind_is_refused(installed: BuiltBundle, given: bool) -> None:
    a, out = torch.ones(4, 4), torch.ones(4, 4) if given else None
    message = r"kernel must be an id, a kernel from choose\(\), or None \(got int\)"
    with pytest.raises(TypeError, match=message):
        nvgemm_runtime.mm(a, a, out, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"platform": "linux_aarch64"}, "built for platform linux_aarch64, this is linux_"),
        ({"arch": "sm_90a", "cuda": "cu12"}, "built for cu12, torch uses cu13"),
    ],
)
def test_an_id_from_a_bundle_for_another_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str], reason: str
) -> None:
    base = synthetic_content(kernels=1, problems=1)
    path = tmp_path / "foreign.nvgemm"
    write_bundle(path, replace(base, target=replace(base.target, **other)))
    use(monkeypatch, path)
    monkeypatch.setattr(select, "torch_cuda", lambda: "cu13")
    (id_,) = api.INSTALLATION.kernels()
    with pytest.raises(NoKernelError, match=rf"kernel {id_[:12]} of {path}: {reason}"):
        api.load_kernel(id_)


def test_an_out_that_overlaps_an_operand_is_refused(installed: BuiltBundle) -> None:
    a = torch.ones(16, 16)
    with pytest.raises(ValueError, match="out overlaps a"):
        nvgemm_runtime.mm(a, torch.ones(16, 16), out=a)


def test_unknown_ids_are_refused(installed: BuiltBundle) -> None:
    with pytest.raises(NoKernelError, match=r"no installed bundle holds kernel (ab){6};"):
        nvgemm_runtime.mm(torch.ones(4, 4), torch.ones(4, 4), kernel="ab" * 32)


def test_operands_are_refused_before_the_launch_where_alignment_rules_every_kernel_out(
    strict: BuiltBundle,
) -> None:
    assert torch.equal(
        nvgemm_runtime.mm(torch.ones(3, 64), torch.ones(64, 4)), 64 * torch.ones(3, 4)
    )
    for a, b in (
        (torch.ones(3, 62), torch.ones(62, 4)),
        (torch.ones(3, 64), torch.ones(64, 5)),
        (torch.ones(3, 66)[:, 1:65], torch.ones(64, 4)),
        (torch.ones(3, 128)[:, :62], torch.ones(62, 4)),
    ):
        explanation = nvgemm_runtime.explain(a, b)
        assert explanation.match is None
        assert "need 16" in explanation.reasons[0]
        with pytest.raises(NoKernelError, match="aligned to") as error:
            nvgemm_runtime.mm(a, b)
        assert error.value.reasons == explanation.reasons


def test_a_row_is_served_in_whichever_layout_is_bundled(
    kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = [cpu_provider.problem("nt", sizes=(16, 16, 16))]
    use(monkeypatch, cpu_provider.build_bundle(declared, tmp_path, kernel_cache).path)
    a, b = torch.randn(1, 16), torch.randn(16, 16)
    assert "mm/nt/" in str(nvgemm_runtime.explain(a, b))
    torch.testing.assert_close(nvgemm_runtime.mm(a, b), a @ b)


def test_a_miss_lists_every_reason(
    strict: BuiltBundle, real_bundles: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    broken, open_ = tmp_path / "broken.nvgemm", tmp_path / "open.nvgemm"
    broken.write_bytes(b"broken")
    open_.touch()
    open_.chmod(0o666)
    use(monkeypatch, strict.path, broken, open_, *real_bundles.values())
    explanation = nvgemm_runtime.explain(torch.ones(4, 4).half(), torch.ones(4, 4).half())
    said = "\n".join(explanation.reasons)
    assert explanation.match is None
    assert "no bundled kernel computes mm/tt/fp16xfp16/fp32/fp16" in explanation.reasons[0]
    assert "(bundled: mm/tt/fp32xfp32/fp32/fp32)" in explanation.reasons[0]
    for part in (
        "built for sm_90a, this device is cpu",
        "built for sm_100f, this device is cpu",
        "broken.nvgemm: [truncated]",
        "open.nvgemm can be written by others",
    ):
        assert part in said, said
    with pytest.raises(NoKernelError) as error:
        nvgemm_runtime.mm(torch.ones(4, 4).half(), torch.ones(4, 4).half())
    assert error.value.reasons == explanation.reasons
    assert all(reason in str(error.value) for reason in error.value.reasons)


def test_without_bundles_says_how_to_get_some(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    with pytest.raises(NoKernelError, match="install a kernel wheel"):
        nvgemm_runtime.mm(torch.ones(4, 4), torch.ones(4, 4))


@pytest.fixture(scope="module")
def scripts() -> Iterator[ForkedScripts]:
    """Scripts in processes that have imported torch and us, and used neither."""
    with forked_scripts("import torch, nvgemm_runtime") as scripts:
        yield scripts


def in_a_fork(scripts: ForkedScripts, script: str, bundle: BuiltBundle, *arguments: str) -> str:
    environment = {**os.environ, "NVGEMM_AOT_BUNDLES": str(bundle.path)}
    done = scripts.run(script, *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_a_new_process(script: str, bundle: BuiltBundle) -> str:
    environment = {**os.environ, "NVGEMM_AOT_BUNDLES": str(bundle.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


OPERATORS = """
import sys, torch, nvgemm_runtime
from nvgemm_runtime.launch.loading.loader import LOADER
nvgemm_runtime.load_operators()
kernel = sys.argv[1]
assert LOADER.get(kernel) is None
a, b = torch.randn(16, 64), torch.randn(64, 32)
for _ in range(2):
    torch.testing.assert_close(torch.ops.nvgemm_aot.mm(a, b, kernel), a @ b)
assert LOADER.get(kernel) is not None
try:
    torch.ops.nvgemm_aot.mm(a, b, "feed")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_operators_load_kernels_that_they_name(
    cpu_bundle: BuiltBundle, scripts: ForkedScripts
) -> None:
    id_ = next(k.id for k in cpu_bundle.header.kernels if k.signature.key.startswith("mm/tt/fp32"))
    said = in_a_fork(scripts, OPERATORS, cpu_bundle, id_)
    assert "no installed bundle holds kernel feed" in said


RACE = """
import threading, torch, nvgemm_runtime
a, b = torch.randn(16, 64), torch.randn(64, 32)
barrier, results = threading.Barrier(8), []
def run():
    barrier.wait()
    results.append(nvgemm_runtime.mm(a, b))
threads = [threading.Thread(target=run) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(results) == 8
for result in results: torch.testing.assert_close(result, a @ b)
"""


def test_threads_may_race_on_everything_at_once(
    cpu_bundle: BuiltBundle, scripts: ForkedScripts
) -> None:
    in_a_fork(scripts, RACE, cpu_bundle)


FORK = """
import os, torch, nvgemm_runtime
a, b = torch.ones(16, 64), torch.ones(64, 32)
if os.environ.get("BEFORE"): nvgemm_runtime.mm(a, b)
child = os.fork()
if child == 0:
    small = torch.ones(3, 5), torch.ones(5, 7)
    assert torch.equal(nvgemm_runtime.mm(a, b), torch.full((16, 32), 64.0))
    assert torch.equal(nvgemm_runtime.mm(*small), torch.full((3, 7), 5.0))
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert torch.equal(nvgemm_runtime.mm(a, b), torch.full((16, 32), 64.0))
"""


@pytest.mark.parametrize("used_before", ["", "1"])
def test_works_on_both_sides_of_a_fork(
    cpu_bundle: BuiltBundle,
    scripts: ForkedScripts,
    monkeypatch: pytest.MonkeyPatch,
    used_before: str,
) -> None:
    monkeypatch.setenv("BEFORE", used_before)
    in_a_fork(scripts, FORK, cpu_bundle)


START = """
import torch, nvgemm_runtime
print(int(nvgemm_runtime.mm(torch.ones(16, 64), torch.ones(64, 32)).sum()))
"""


def test_running_a_kernel_imports_no_builder_and_writes_nothing(
    cpu_bundle: BuiltBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    script = START + "import sys; print({'nvgemm_aot', 'cutlass'} & set(sys.modules))"
    assert in_a_new_process(script, cpu_bundle) == "32768\nset()\n"
    assert list(tmp_path.iterdir()) == []
