"""`nvgemm_runtime.linear`: kernels where measured faster, and torch's function elsewhere."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cpu_kernels
import cpu_provider
import nvgemm_runtime
import recording_kernels
import tuning_bench
from inductor_session import InductorSession
from kernels_by_m import COMPUTED_BY, SQUARE, TIMES, WIDE
from measured_bundles import write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.errors import RequiredError, SettingError, StorageError
from nvgemm_runtime.gemm.epilogues import BIAS
from nvgemm_runtime.gemm.problem import DType
from nvgemm_runtime.launch import dispatched
from nvgemm_runtime.launch import linear as module
from nvgemm_runtime.launch.compiled import named_kernels
from nvgemm_runtime.launch.loading.loader import LOADER
from nvgemm_runtime.reporting import generated_choices
from nvgemm_runtime.settings import (
    DEFAULT_MODE_VARIABLE,
    MAX_CHOICES_VARIABLE,
    MODE_VARIABLE,
)

N, K = 32, 64
Tensor = torch.Tensor


@pytest.fixture(scope="module")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with kernels by m for products with weights, in fp32 and, with a bias, in bf16."""
    signatures = (
        cpu_kernels.signature("tn"),
        cpu_kernels.signature("tn", operand=DType.BF16, epilogue=BIAS),
    )
    problems = [cpu_provider.problem_of(served, (m, N, K)) for served in signatures for m in TIMES]
    directory = tmp_path_factory.mktemp("linear")
    directory.chmod(0o755)
    return tuning_bench.build(
        problems, directory / "built", kernel_cache, recording_kernels.Recording()
    )


@pytest.fixture(scope="module")
def measured(built: Path) -> Path:
    return write_measured(built, built.parent / "m" / "measured.nvgemm", TIMES)


@pytest.fixture
def forgotten() -> Iterator[None]:
    module._plans.clear()
    yield
    module._plans.clear()


@pytest.fixture
def session(
    inductor: InductorSession, measured: Path, forgotten: None
) -> Iterator[InductorSession]:
    inductor.use(measured)
    with torch.no_grad():
        yield inductor


Launched = Callable[..., list[str]]


@pytest.fixture
def launched(session: InductorSession) -> Launched:
    """Calls the function, compares the result with torch's, and returns the kernels launched.

    A call before loads the kernels of the weight, which launches each.
    """

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[str]:
        nvgemm_runtime.linear(x, weight, bias)
        session.record.forget()
        result = nvgemm_runtime.linear(x, weight, bias)
        lines: list[str] = session.record.lines()
        expected = F.linear(x, weight, bias)
        torch.testing.assert_close(result, expected)
        assert (result.shape, result.dtype, result.device, result.stride()) == (
            expected.shape, expected.dtype, expected.device, expected.stride(),
        )  # fmt: skip
        assert result.is_inference() == expected.is_inference()
        return lines

    return call


WEIGHT = torch.randn(N, K)


def test_kernels_compute_the_m_at_which_they_were_measured_faster(launched: Launched) -> None:
    for m, operator in COMPUTED_BY.items():
        assert launched(torch.randn(m, K), WEIGHT) == ([operator] if operator else []), m


def test_leading_dimensions_count_as_rows(launched: Launched) -> None:
    assert launched(torch.randn(2, 4, K), WEIGHT) == [WIDE]
    assert launched(torch.randn(2, 2, 4, K), WEIGHT) == [SQUARE]
    assert launched(torch.randn(2, 1, K), WEIGHT) == []
    assert launched(torch.randn(K), WEIGHT) == []
    assert launched(torch.randn(2, 4, 2 * K)[..., :K], WEIGHT) == []
    assert launched(torch.randn(4, 2, K).transpose(0, 1), WEIGHT) == []


def test_rows_may_have_gaps(launched: Launched) -> None:
    assert launched(torch.randn(8, 2 * K)[:, :K], WEIGHT) == [WIDE]
    assert launched(torch.randn(K, 8).t(), WEIGHT) == []
    assert launched(torch.randn(16, K)[::2], WEIGHT) == [WIDE]


def test_a_bias_is_added_by_kernels_that_were_measured_with_it(launched: Launched) -> None:
    x, weight = torch.randn(8, K, dtype=torch.bfloat16), WEIGHT.bfloat16()
    assert launched(x, weight, torch.randn(N, dtype=torch.bfloat16)) == [WIDE]
    assert launched(x, weight) == [], "not measured without a bias"
    assert launched(torch.randn(8, K), WEIGHT, torch.randn(N)) == []


def test_nothing_is_computed_for_no_rows(launched: Launched) -> None:
    for shape in ((0, K), (2, 0, K), (0, 2, K)):
        assert launched(torch.randn(*shape), WEIGHT) == []
    assert launched(torch.randn(8, 0), torch.randn(N, 0)) == []


def test_parameters_are_weights_too(launched: Launched) -> None:
    assert launched(torch.randn(8, K), torch.nn.Parameter(WEIGHT)) == [WIDE]
    with torch.inference_mode():
        assert launched(torch.randn(8, K), torch.nn.Parameter(WEIGHT)) == [WIDE]
    with torch.enable_grad():
        assert launched(torch.randn(8, K), torch.nn.Parameter(WEIGHT, requires_grad=False)) == [
            WIDE
        ]


def test_a_weight_may_change_between_calls(launched: Launched) -> None:
    weight, x = torch.nn.Parameter(WEIGHT.clone()), torch.randn(8, K)
    assert launched(x, weight) == [WIDE]
    weight.data = torch.randn(N, K)
    assert launched(x, weight) == [WIDE]
    weight.data = torch.randn(K, N).t()
    assert launched(x, weight) == []
    weight.data = torch.randn(N + 1, K)
    assert launched(x, weight) == []
    weight.data = torch.randn(N, K, dtype=torch.float64)
    assert launched(x.double(), weight) == []
    weight.data = WEIGHT.clone()
    assert launched(x, weight) == [WIDE]


def test_gradients_are_torchs(session: InductorSession) -> None:
    session.record.forget()
    with torch.enable_grad():
        for x, weight in (
            (torch.randn(8, K, requires_grad=True), WEIGHT),
            (torch.randn(8, K), torch.nn.Parameter(WEIGHT)),
        ):
            assert nvgemm_runtime.linear(x, weight).requires_grad
    assert session.record.lines() == []


def test_autocast_is_torchs(session: InductorSession) -> None:
    session.record.forget()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nvgemm_runtime.linear(torch.randn(8, K), WEIGHT).dtype is torch.bfloat16
    assert session.record.lines() == []


def test_compiled_code_traces_torchs_function(session: InductorSession) -> None:
    def function(x: Tensor) -> Tensor:
        return nvgemm_runtime.linear(x, WEIGHT) + 1

    x = torch.randn(8, K)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), F.linear(x, WEIGHT) + 1)
    assert F.linear in graphs[0] or torch._C._nn.linear in graphs[0]
    session.record.forget()
    for before_dispatch in (False, True):
        traced = make_fx(function, tracing_mode="real", pre_dispatch=before_dispatch)(x)
        assert any("aten" in str(node.target) for node in traced.graph.nodes)
    symbolic = torch.fx.symbolic_trace(function)
    assert "linear" in str(symbolic.graph)
    scripted = torch.jit.trace(function, x, check_trace=False)
    assert "linear" in str(scripted.graph)
    assert session.record.lines() == []

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    for strict in (False, True):
        exported = torch.export.export(Model(), (x,), strict=strict)
        assert "aten.linear.default" in exported.graph_module.code


def test_the_first_call_loads_all_kernels_of_a_weight(
    session: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.record.forget()
    nvgemm_runtime.linear(torch.randn(1, K), WEIGHT)
    assert sorted(session.record.lines()) == [SQUARE, WIDE], "each was launched once"
    assert set(nvgemm_runtime.stats().failed) == set()
    monkeypatch.setattr(LOADER, "load", None)
    session.record.forget()
    for m in (8, 16):
        nvgemm_runtime.linear(torch.randn(m, K), WEIGHT)
    assert session.record.lines() == [WIDE, SQUARE]
    assert set(named_kernels()) >= set(
        nvgemm_runtime.dispatch_table(torch.randn(8, K), WEIGHT.t()).decided.table.used
    ), "preload loads them again elsewhere"


def test_nothing_is_loaded_during_a_capture(
    session: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a weight's first call nor for a kernel that could not be loaded then."""
    x, weights = torch.randn(8, K), WEIGHT
    monkeypatch.setattr(module, "is_capturing", lambda device: True)
    session.record.forget()
    torch.testing.assert_close(nvgemm_runtime.linear(x, weights), F.linear(x, weights))
    assert session.record.lines() == []
    monkeypatch.setattr(module, "is_capturing", lambda device: False)
    with monkeypatch.context() as patched:
        patched.setattr(dispatched, "note_and_preload", lambda *arguments: None)
        nvgemm_runtime.linear(torch.randn(1, K), weights)
    monkeypatch.setattr(module, "is_capturing", lambda device: True)
    nvgemm_runtime.linear(x, weights)
    assert session.record.lines() == []
    monkeypatch.setattr(module, "is_capturing", lambda device: False)
    nvgemm_runtime.linear(x, weights)
    assert session.record.lines() == [WIDE]
    monkeypatch.setattr(module, "is_capturing", lambda device: True)
    nvgemm_runtime.linear(x, weights)
    assert session.record.lines() == [WIDE, WIDE]


@pytest.mark.parametrize(
    ("variable", "value"),
    [(MODE_VARIABLE, "off"), (DEFAULT_MODE_VARIABLE, "0"), (MAX_CHOICES_VARIABLE, "0")],
)
def test_settings_leave_all_to_torch(
    session: InductorSession, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    session.record.forget()
    for m in (1, 8, 16):
        nvgemm_runtime.linear(torch.randn(m, K), WEIGHT)
    assert session.record.lines() == []


def test_an_unknown_mode_is_refused(
    session: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "requried")
    with pytest.raises(SettingError, match="NVGEMM_AOT=requried: allowed are auto, required, off"):
        nvgemm_runtime.linear(torch.randn(8, K), WEIGHT)


def test_required_refuses_declared_products_without_their_kernels(
    session: InductorSession, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = write_measured(built, tmp_path / "m" / "once.nvgemm", TIMES, confirmed_by=())
    session.use(once)
    monkeypatch.setenv(MODE_VARIABLE, "required")
    said = (
        r"linear: NVGEMM_AOT=required forbids computing m 16, n 32, k 64 in torch.float32, which a "
        r"bundle declares, without its kernel: measured once, and neither repeated .*; measure it"
    )
    for _ in range(2):
        with pytest.raises(RequiredError, match=said):
            nvgemm_runtime.linear(torch.randn(2, 8, K), WEIGHT)
    for m in (0, 7, 15, 1000):  # not declared
        nvgemm_runtime.linear(torch.randn(m, K), WEIGHT)
    nvgemm_runtime.linear(torch.randn(16, K), torch.randn(N + 1, K))
    with torch.enable_grad():
        nvgemm_runtime.linear(torch.randn(16, K, requires_grad=True), WEIGHT)


def test_required_computes_what_was_measured(
    session: InductorSession, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "required")
    for m, operator in COMPUTED_BY.items():
        assert launched(torch.randn(m, K), WEIGHT) == ([operator] if operator else []), m
    module._plans.clear()
    monkeypatch.setenv(MAX_CHOICES_VARIABLE, "0")
    nvgemm_runtime.linear(torch.randn(32, K), WEIGHT)  # torch was faster
    with pytest.raises(RequiredError, match="MAX_CHOICES=0 allows no kernels"):
        nvgemm_runtime.linear(torch.randn(16, K), WEIGHT)


def test_required_refuses_bundles_that_cannot_be_opened(
    session: InductorSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged.nvgemm"
    damaged.write_bytes(b"no bundle")
    session.use(damaged)
    nvgemm_runtime.linear(torch.randn(16, K), WEIGHT)
    module._plans.clear()
    monkeypatch.setenv(MODE_VARIABLE, "required")
    with pytest.raises(RequiredError, match="bundles cannot be opened"):
        nvgemm_runtime.linear(torch.randn(16, K), WEIGHT)


def test_a_kernel_that_fails_leaves_its_rows_to_torch_once_said(
    session: InductorSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise StorageError("the file is gone")

    monkeypatch.setattr(LOADER, "load", fail)
    x = torch.randn(8, K)
    for _ in range(3):
        torch.testing.assert_close(nvgemm_runtime.linear(x, WEIGHT), F.linear(x, WEIGHT))
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        message for message in caplog.messages if "the file is gone" in message
    ]
    assert caplog.text.count("the file is gone") == 1


def test_short_memory_is_survived(
    session: InductorSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lack(*operands: Tensor) -> bool:
        raise torch.OutOfMemoryError("no workspace")

    x = torch.randn(8, K)
    nvgemm_runtime.linear(x, WEIGHT)
    (plan,) = module._plans.values()
    assert plan.table is not None
    monkeypatch.setattr(plan.table, "compute", lack)
    torch.testing.assert_close(nvgemm_runtime.linear(x, WEIGHT), F.linear(x, WEIGHT))
    assert "no workspace; ATen computes this GEMM" in caplog.text


def test_other_operands_are_torchs(launched: Launched) -> None:
    """Their results and errors are torch's own."""
    x, weight = torch.randn(8, K), WEIGHT
    vector = torch.randn(K)
    assert launched(x, vector) == []
    assert launched(vector, vector) == []
    assert launched(x.double(), weight.double()) == []
    assert launched(x.to_sparse(), weight) == []
    assert launched(torch.zeros(8, K).to(torch.complex64), weight.to(torch.complex64)) == []
    odd = torch.randn(8 * K + 1)[1:].view(8, K)
    assert launched(odd, weight) in ([], [WIDE]), "by the kernel's alignment"
    expanded = torch.randn(1, K).expand(8, K)
    assert launched(expanded, weight) == []
    nested = torch.nested.nested_tensor([torch.randn(8, K), torch.randn(3, K)])
    assert nvgemm_runtime.linear(nested, weight).is_nested


def test_pending_negations_are_torchs(launched: Launched) -> None:
    negated = torch.randn(8, K, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    assert launched(negated, WEIGHT) == []
    assert launched(negated.contiguous(), WEIGHT) == [WIDE]
    assert launched(torch.randn(8, K), torch.randn(N, K, dtype=torch.complex64).conj().imag) == []


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        ((8, K + 1), (N, K), None),
        ((8, K), (N, K + 1), None),
        ((8, K), (2, N, K), None),
        ((8, K), (N, K), (N + 1,)),
        ((8, K), (N, K), (8, N + 1)),
    ],
)
def test_errors_are_torchs(
    session: InductorSession,
    x: tuple[int, ...],
    weight: tuple[int, ...],
    bias: tuple[int, ...] | None,
) -> None:
    operands = [None if shape is None else torch.randn(shape) for shape in (x, weight, bias)]
    with pytest.raises(RuntimeError) as expected:
        F.linear(*operands)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as found:
        nvgemm_runtime.linear(*operands)  # type: ignore[arg-type]
    assert str(found.value) == str(expected.value)


def test_mixed_dtypes_and_devices_are_torchs_errors(session: InductorSession) -> None:
    x = torch.randn(8, K)
    for operands in ((x, WEIGHT.bfloat16()), (x.bfloat16(), WEIGHT)):
        with pytest.raises(RuntimeError) as expected:
            F.linear(*operands)
        with pytest.raises(RuntimeError) as found:
            nvgemm_runtime.linear(*operands)
        assert str(found.value) == str(expected.value)
    for meta in ((x.to("meta"), WEIGHT.to("meta")), (x, WEIGHT.to("meta")), (x.to("meta"), WEIGHT)):
        assert nvgemm_runtime.linear(*meta).device == F.linear(*meta).device


class Logged(torch.Tensor):
    """A subclass as users write them."""

    calls: ClassVar[list[object]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.calls.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_subclasses_and_modes_see_torchs_function(session: InductorSession) -> None:
    session.record.forget()
    for operands in (
        (torch.randn(8, K).as_subclass(Logged), WEIGHT),
        (torch.randn(8, K), WEIGHT.as_subclass(Logged)),
    ):
        Logged.calls.clear()
        assert type(nvgemm_runtime.linear(*operands)) is Logged
        assert Logged.calls == [F.linear]

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for mode in (Functions(), Operators()):
        seen: list[object] = []
        with mode:
            nvgemm_runtime.linear(torch.randn(8, K), WEIGHT)
        assert len(seen) >= 1
    with FakeTensorMode() as fake:
        fakes = [fake.from_tensor(one) for one in (torch.randn(8, K), WEIGHT)]
    assert type(nvgemm_runtime.linear(*fakes)) is FakeTensor
    assert session.record.lines() == []


def test_transforms_are_torchs(session: InductorSession) -> None:
    nvgemm_runtime.linear(torch.randn(8, K), WEIGHT)
    session.record.forget()
    xs = torch.randn(3, 8, K)

    def function(x: Tensor) -> Tensor:
        return nvgemm_runtime.linear(x, WEIGHT)

    torch.testing.assert_close(torch.func.vmap(function)(xs), F.linear(xs, WEIGHT))
    gradient = torch.func.grad(lambda x: function(x).sum())(xs[0])
    torch.testing.assert_close(gradient, WEIGHT.sum(0).expand(8, K))
    _, tangent = torch.func.jvp(function, (xs[0],), (xs[1],))
    torch.testing.assert_close(tangent, F.linear(xs[1], WEIGHT))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(xs[0], xs[1])
        unpacked = forward_ad.unpack_dual(function(dual))
        assert unpacked.tangent is not None
        torch.testing.assert_close(unpacked.tangent, F.linear(xs[1], WEIGHT))
    assert session.record.lines() == []


def test_deterministic_programs_get_deterministic_kernels(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert launched(torch.randn(8, K), WEIGHT) == [WIDE]
    finally:
        torch.use_deterministic_algorithms(False)


def test_threads_call_at_once(session: InductorSession) -> None:
    weight = WEIGHT
    nvgemm_runtime.linear(torch.randn(1, K), weight)

    session.record.forget()
    results: dict[int, list[Tensor]] = {m: [] for m in (8, 16, 40)}
    cases = {m: torch.randn(m, K) for m in results}

    def work(m: int) -> None:
        with torch.no_grad():
            results[m] += (nvgemm_runtime.linear(cases[m], weight) for _ in range(10))

    threads = [threading.Thread(target=work, args=(m,)) for m in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for m, x in cases.items():
        torch.testing.assert_close(results[m], [F.linear(x, weight)] * 10)
    lines = session.record.lines()
    assert [lines.count(name) for name in (WIDE, SQUARE)] == [10, 10]


def test_plans_are_limited(session: InductorSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PLANS", 3)
    for n in range(1, 8):
        nvgemm_runtime.linear(torch.randn(8, K), torch.randn(n, K))
        assert len(module._plans) <= 3


def test_tables_count_in_the_digest_of_choices(
    session: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_kernels", "_tables", "_failed"):
        monkeypatch.setattr(generated_choices, name, set())
    before = nvgemm_runtime.choices_digest()
    nvgemm_runtime.linear(torch.randn(8, K), torch.randn(N, K))
    assert len(generated_choices._tables) == 1
    assert nvgemm_runtime.choices_digest() != before


def test_the_signature_is_torchs_own() -> None:
    parameters = inspect.signature(nvgemm_runtime.linear).parameters
    assert list(parameters)[1:] == ["weight", "bias"]
    assert parameters["bias"].default is None
