"""Gated MLPs: one kernel for products and gate where that is faster, and nothing else touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
from torch.nn import functional

import cpu_kernels
import cpu_provider
import recording_kernels
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES, GateForm
from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.inductor.fusion import unfused
from nvgemm_runtime.recording.recorder import Recorder

Tensor = torch.Tensor

M, HALF, K = 16, 32, 64
N = 2 * HALF
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


def build(
    provider: recording_kernels.Recording | None, cache: Cache, directory: Path
) -> BuiltBundle:
    problems = [
        cpu_provider.problem_of(
            cpu_kernels.signature("tn", operand=operand, epilogue=epilogue), (M, N, K)
        )
        for operand in (DType.BF16, DType.FP16)
        for epilogue in ALL_EPILOGUES
        if epilogue.form is GateForm.JOINED
    ]
    return recording_kernels.build_recording(problems, directory, cache, provider)


@pytest.fixture(scope="module")
def gated(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Recording kernels with each gate, in both orders."""
    return build(None, kernel_cache, tmp_path_factory.mktemp("gated"))


@pytest.fixture(scope="module")
def sleeping(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """The same, taking 100 ms."""
    directory = tmp_path_factory.mktemp("sleeping-gated")
    return build(recording_kernels.Sleeping(), kernel_cache, directory)


@pytest.fixture(autouse=True)
def triton(inductor: InductorSession) -> Iterator[None]:
    """Triton's choices may round once, so that kernels may; on the CPU there are none of them."""
    torch.manual_seed(0)  # of other numbers, one in many thousands is further off by its rounding
    with config.patch(max_autotune_gemm_backends="ATEN,TRITON"):
        yield


@pytest.fixture
def session(inductor: InductorSession, gated: BuiltBundle) -> InductorSession:
    inductor.use(gated.path)
    inductor.slow_down_aten()
    return inductor


def chunked(x: Tensor, w: Tensor) -> Tensor:
    gate, up = functional.linear(x, w).chunk(2, dim=-1)
    return functional.silu(gate) * up


def sliced(x: Tensor, w: Tensor) -> Tensor:
    both = functional.linear(x, w)
    half = both.shape[-1] // 2
    return functional.silu(both[..., :half]) * both[..., half:]


def up_times_gate(x: Tensor, w: Tensor) -> Tensor:
    gate, up = functional.linear(x, w).split([HALF, HALF], dim=-1)
    return up * functional.gelu(gate, approximate="tanh")


def woven(x: Tensor, w: Tensor) -> Tensor:
    both = functional.linear(x, w)
    return functional.gelu(both[..., ::2], approximate="tanh") * both[..., 1::2]


def two_products(x: Tensor, w: Tensor) -> Tensor:
    return functional.silu(functional.linear(x, w[:HALF])) * functional.linear(x, w[HALF:])


def of_chunked_weight(x: Tensor, w: Tensor) -> Tensor:
    gate, up = w.chunk(2)
    return functional.linear(x, up) * functional.silu(functional.linear(x, gate))


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "chunked": (chunked, "swiglu_halves"),
    "sliced": (sliced, "swiglu_halves"),
    "up first, split": (up_times_gate, "geglu_halves"),
    "interleaved": (woven, "geglu_interleaved"),
    "two products": (two_products, "swiglu_halves"),
    "of a chunked weight": (of_chunked_weight, "swiglu_halves"),
}

QUICK = {"chunked", "interleaved"}


def tensors(*lead: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(*lead, K, dtype=dtype), torch.randn(N, K, dtype=dtype) / K**0.5


@pytest.mark.parametrize(
    ("name", "lead"),
    [
        *(pytest.param(n, (M,), marks=() if n in QUICK else pytest.mark.slow) for n in FORMS),
        *(
            pytest.param(n, (2, M // 2), id=f"batch, {n}", marks=pytest.mark.slow)
            for n in ("interleaved", "two products")
        ),
    ],
)
def test_a_kernel_that_is_faster_computes(
    session: InductorSession,
    gated: BuiltBundle,
    events: Callable[[], list[dict[str, Any]]],
    name: str,
    lead: tuple[int, ...],
) -> None:
    function, epilogue = FORMS[name]
    x, w = tensors(*lead)
    compiled = session.compile(function, x, w)
    once = function(x.float(), w.float()).to(x.dtype)
    torch.testing.assert_close(compiled.result, once, rtol=2**-7, atol=1e-4)
    assert compiled.result.shape == (*lead, HALF)
    assert len(compiled.launched) == 1
    key = f"mm/tn/bf16xbf16/fp32/bf16/{epilogue}"
    code = compiled.code[-1]  # before it, what it competes with was compiled
    (kernel,) = [one for one in gated.header.kernels if one.signature.key == key]
    called = f"nvgemm_mm_{epilogue}_{kernel.id[:12]}"
    assert called in code
    assert "extern_kernels" not in code.partition("def call")[2]
    met, used = (next(e for e in events() if e["event"] == kind) for kind in ("met", "used"))
    assert met["gemm"] == used["gemm"] == f"{key}/m{M}n{N}k{K}"
    assert (met["basis"], used["name"]) == ("declared", called)


@pytest.mark.slow
def test_a_result_that_a_gemm_uses_is_fused(session: InductorSession) -> None:
    x, w = tensors(2, M // 2)
    down = torch.randn(K, HALF, dtype=torch.bfloat16)
    compiled = session.compile(lambda x, w, d: functional.linear(chunked(x, w), d), x, w, down)
    assert len(compiled.launched) == 1


def oai(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    both = functional.linear(x, w, c)
    gate, up = both[..., ::2], both[..., 1::2]
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_the_gate_of_gpt_oss(session: InductorSession, dtype: torch.dtype) -> None:
    x, w = tensors(2, M // 2, dtype=dtype)
    c = 6 * torch.randn(N, dtype=dtype)  # so that limits cut some off
    compiled = session.compile(oai, x, w, c)
    once = oai(x.float(), w.float(), c.float()).to(dtype)
    torch.testing.assert_close(compiled.result, once, rtol=2**-7, atol=1e-3)
    assert len(compiled.launched) == 1
    assert "nvgemm_addmm_swiglu_oai_interleaved_" in compiled.code[-1]


def test_a_slower_kernel_leaves_the_graph_as_it_was(
    inductor: InductorSession, sleeping: BuiltBundle, events: Callable[[], list[dict[str, Any]]]
) -> None:
    x, w = tensors(M)
    inductor.use()
    without = inductor.compile(chunked, x, w)
    torch._dynamo.reset()
    inductor.use(sleeping.path)
    compiled = inductor.compile(chunked, x, w)
    assert torch.equal(compiled.result, without.result)
    assert compiled.launched == ()
    assert "nvgemm_aot_gemm" not in compiled.code[-1]
    (tried,) = [event for event in events() if event["event"] == "tried"]
    assert tried["gemm"] == f"mm/tn/bf16xbf16/fp32/bf16/swiglu_halves/m{M}n{N}k{K}"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", pytest.param("has no time", marks=pytest.mark.slow)])
def test_what_cannot_be_compared_does_not_join(
    session: InductorSession, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    def benchmark(*_: Any, **__: Any) -> float:
        if how == "raises":
            raise RuntimeError("out of memory")
        return float("inf")

    session.monkeypatch.setattr(SubgraphChoiceCaller, "benchmark", benchmark)
    unfused._log_once.cache_clear()
    x, w = tensors(M)
    compiled = session.compile(lambda x, w: (chunked(x, w), chunked(x + 1, w)), x, w)
    torch.testing.assert_close(compiled.result[0], chunked(x, w), rtol=2**-6, atol=1e-2)
    assert compiled.launched == ()
    assert "nvgemm_aot_gemm" not in compiled.code[-1]
    (warning,) = warnings_of(caplog)
    why = {"raises": "RuntimeError: out of memory", "has no time": "its time is inf ms"}[how]
    assert warning == (
        f"mm/tn/bf16xbf16/fp32/bf16/swiglu_halves/m{M}n{N}k{K}: skipped fused kernels, because "
        f"the unfused code cannot be timed: {why}"
    )


@pytest.mark.slow
def test_a_product_of_the_unfused_may_be_bundled(
    inductor: InductorSession, sleeping: BuiltBundle, kernel_cache: Cache, tmp_path: Path
) -> None:
    served = cpu_kernels.signature("tn", operand=DType.BF16)
    plain = recording_kernels.build_recording(
        [cpu_provider.problem_of(served, (M, N, K))], tmp_path / "plain", kernel_cache
    )
    inductor.use(sleeping.path, plain.path)
    inductor.slow_down_aten()
    x, w = tensors(M)
    compiled = inductor.compile(chunked, x, w)
    torch.testing.assert_close(compiled.result, chunked(x, w), rtol=2**-6, atol=1e-2)
    assert len(compiled.launched) == 1
    assert f"nvgemm_mm_{plain.header.kernels[0].id[:12]}(" in compiled.code[-1]


def product_used_again(x: Tensor, w: Tensor) -> Any:
    both = functional.linear(x, w)
    gate, up = both.chunk(2, -1)
    return both, functional.silu(gate) * up


def gate_used_again(x: Tensor, w: Tensor) -> Any:
    gate, up = functional.linear(x, w).chunk(2, -1)
    return gate + 1, functional.silu(gate) * up


def up_before_gate(x: Tensor, w: Tensor) -> Tensor:
    up, gate = functional.linear(x, w).chunk(2, -1)
    return functional.silu(gate) * up


def exact_gelu(x: Tensor, w: Tensor) -> Tensor:
    gate, up = functional.linear(x, w).chunk(2, -1)
    return functional.gelu(gate) * up


def of_two_weights(x: Tensor, w: Tensor) -> Tensor:
    return functional.silu(functional.linear(x, w)) * functional.linear(x, w * 2)


def unequal_parts(x: Tensor, w: Tensor) -> Tensor:
    both = functional.linear(x, w)
    return functional.silu(both[..., :HALF]) * both[..., 16 : 16 + HALF]


def of_rows(x: Tensor, w: Tensor) -> Tensor:
    gate, up = functional.linear(x, w).chunk(2, 0)
    return functional.silu(gate) * up


def reshaped_columns(x: Tensor, w: Tensor) -> Tensor:
    gate, up = functional.linear(x, w).view(2 * M, HALF).chunk(2, -1)
    return functional.silu(gate) * up


def two_inputs(x: Tensor, w: Tensor) -> Tensor:
    gate, up = w.chunk(2)
    return functional.silu(functional.linear(x, gate)) * functional.linear(x + 1, up)


def of_columns_of_the_weight(x: Tensor, w: Tensor) -> Tensor:
    gate, up = torch.split(w, K // 2, dim=1)
    return functional.silu(x[:, : K // 2] @ gate.t()) * (x[:, : K // 2] @ up.t())


def broadcast(x: Tensor, w: Tensor) -> Tensor:
    gate, up = w.chunk(2)
    gates, ups = (functional.linear(x, part) for part in (gate, up))
    return functional.silu(gates.reshape(M, 1, HALF)) * ups.reshape(1, M, HALF)


def biased(x: Tensor, w: Tensor) -> Tensor:
    gate, up = functional.linear(x, w, w.sum(1)).chunk(2, -1)
    return functional.silu(gate) * up


def another_limit(x: Tensor, w: Tensor) -> Tensor:
    gate, up = functional.linear(x, w, w.sum(1)).chunk(2, -1)
    gate, up = gate.clamp(max=6.0), up.clamp(-6.0, 6.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def weighted_one(x: Tensor, w: Tensor) -> Tensor:
    """The up gets 3, where the gate of the kernels adds 1."""
    gate, up = functional.linear(x, w, w.sum(1)).chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return torch.add(up, 1, alpha=3) * (gate * torch.sigmoid(gate * 1.702))


def weighted_sum_in_silu(x: Tensor, w: Tensor) -> Tensor:
    gate, up = functional.linear(x, w).chunk(2, -1)
    wide = gate.float()
    return (wide / torch.add(torch.exp(-wide), 1, alpha=2)).bfloat16() * up


def result_scaled(x: Tensor, w: Tensor) -> Tensor:
    return chunked(x, w) * 2


def result_quantized(x: Tensor, w: Tensor) -> Any:
    result = chunked(x, w).view(-1, HALF)
    return result @ w[:, :HALF].t(), result.abs().amax(-1)


LEFT_ALONE = (
    result_scaled, result_quantized,
    product_used_again, gate_used_again, up_before_gate, exact_gelu, of_two_weights, unequal_parts,
    of_rows, reshaped_columns, broadcast, of_columns_of_the_weight, two_inputs, biased,
    another_limit, weighted_one, weighted_sum_in_silu,
)  # fmt: skip


@pytest.mark.slow
def test_other_graphs_are_left_alone(
    session: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    """All in one compilation, with operands of its own for each, so that none meets another."""

    def functions(*operands: tuple[Tensor, Tensor]) -> Any:
        return [function(x, w) for function, (x, w) in zip(LEFT_ALONE, operands)]

    operands = [tensors(M) for _ in LEFT_ALONE]
    compiled = session.compile(functions, *operands, fullgraph=True)
    torch.testing.assert_close(compiled.result, functions(*operands), rtol=2**-6, atol=2e-2)
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]
    assert warnings_of(caplog) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_autotune_gemm": False},
        {"max_autotune_gemm_backends": "ATEN"},
        pytest.param({"emulate_precision_casts": True}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_leave_graphs_alone(
    session: InductorSession, settings: dict[str, Any]
) -> None:
    x, w = tensors(M)
    with config.patch(settings):
        compiled = session.compile(chunked, x, w)
    assert compiled.launched == ()


@pytest.mark.slow
def test_a_write_between_product_and_gate_is_seen(session: InductorSession) -> None:
    """What is fused reads its operands later than the product would have."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        both = functional.linear(x, w)
        x.mul_(0)
        gate, up = both.chunk(2, -1)
        return functional.silu(gate) * up

    x, w = tensors(M)
    right = function(x.clone(), w)
    compiled = session.compile(function, x.clone(), w)
    given = x.clone()
    torch.testing.assert_close(compiled.function(given, w), right, rtol=2**-6, atol=2e-2)
    assert not given.any()


@pytest.mark.slow
def test_a_change_of_m_compiles_nothing(session: InductorSession) -> None:
    x, w = tensors(2, 8)
    torch._dynamo.mark_dynamic(x, 1)
    compiled = session.compile(chunked, x, w, dynamic=None)
    launches = 1 if RELEASE >= (2, 13) else 0  # earlier ones are left alone
    for m in (8, 33, 7):
        x, _ = tensors(2, m)
        result = compiled.function(x, w)
        torch.testing.assert_close(result, chunked(x, w), rtol=2**-6, atol=2e-2)
        assert result.shape == (2, m, HALF)
        assert len(session.launched(compiled.function, x, w)) == launches


@pytest.mark.slow
def test_operands_that_the_kernel_cannot_take_go_to_aten(session: InductorSession) -> None:
    """`test_aten_in_place_of_the_kernel_of_gpt_oss` has the other order."""
    function, _ = FORMS["chunked"]
    flat = torch.randn(M * K + 1, dtype=torch.bfloat16)
    _, w = tensors(M)
    compiled = session.compile(function, flat[:-1].view(M, K), w)
    assert len(compiled.launched) == 1
    unaligned = flat[1:].view(M, K)
    torch.testing.assert_close(compiled.function(unaligned, w), function(unaligned, w))
    assert session.launched(compiled.function, unaligned, w) == ()


def test_aten_in_place_of_the_kernel_of_gpt_oss(session: InductorSession) -> None:
    flat = torch.randn(M * K + 1, dtype=torch.bfloat16)
    _, w = tensors(M)
    c = 6 * torch.randn(N, dtype=torch.bfloat16)
    compiled = session.compile(oai, flat[:-1].view(M, K), w, c)
    unaligned = flat[1:].view(M, K)
    torch.testing.assert_close(compiled.function(unaligned, w, c), oai(unaligned, w, c))
    assert session.launched(compiled.function, unaligned, w, c) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "n", "count"), [(chunked, N, 1), (two_products, HALF, 2)], ids=["one", "two"]
)
def test_a_recording_has_the_products(
    session: InductorSession,
    tmp_path: Path,
    function: Callable[[Tensor, Tensor], Tensor],
    n: int,
    count: int,
) -> None:
    path = tmp_path / "out.yaml"
    session.monkeypatch.setenv("NVGEMM_AOT_RECORD", str(path))
    session.monkeypatch.setenv("NVGEMM_AOT_RECORD_TARGET", "sm_100f")
    compiled = session.compile(function, *tensors(M))
    assert len(compiled.launched) == 1
    recorded = Recorder(path).read().problems
    assert {problem.key: met for problem, met in recorded.items()} == {
        f"mm/tn/bf16xbf16/fp32/bf16/m{M}n{n}k{K}": count
    }


def test_required_is_met_by_a_fused_kernel(
    session: InductorSession, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = session.compile(
        chunked, *tensors(M), options={"max_autotune_gemm": True, "nvgemm_aot_mode": "required"}
    )
    assert len(compiled.launched) == 1
    assert warnings_of(caplog) == []


@pytest.mark.slow
def test_training_is_right(session: InductorSession) -> None:
    """Backward needs the product, so nothing is fused."""
    x, w = tensors(M)
    w.requires_grad_()
    torch.compile(chunked, dynamic=False)(x, w).sum().backward()
    assert w.grad is not None
    gradient = w.grad.clone()
    w.grad = None
    chunked(x, w).sum().backward()
    torch.testing.assert_close(gradient, w.grad, rtol=2**-5, atol=5e-2)


@pytest.mark.parametrize(
    ("function", "lead"), [(chunked, (M,)), (woven, (M, 2)), (two_products, (M, 2))]
)
def test_rows_that_are_counted_when_the_graph_runs_cannot_be_timed_and_stay_as_they_are(
    session: InductorSession,
    caplog: pytest.LogCaptureFixture,
    function: Callable[[Tensor, Tensor], Tensor],
    lead: tuple[int, ...],
) -> None:
    x, w = tensors(*lead)
    mask = torch.arange(M) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = session.compile(lambda x, m, w: function(x[m], w), x, mask, w, fullgraph=True)
    once = function(x[mask].float(), w.float()).to(x.dtype)
    torch.testing.assert_close(compiled.result, once, rtol=0.05, atol=0.03)  # rounded in between
    assert warnings_of(caplog) == []
    assert compiled.launched == ()
