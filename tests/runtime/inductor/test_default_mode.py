"""Plain torch.compile: kernels that were measured to beat ATen, and nothing is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo

import cpu_kernels
import cpu_provider
import nvgemm_runtime
import recording_kernels
import tuning_bench
from inductor_session import Compiled, InductorSession, warnings_of
from kernels_by_m import (
    COMPUTED_BY,
    ONE,
    SQUARE,
    TIMES,
    WIDE,
    assert_right_from_threads,
    operands,
)
from measured_bundles import ATEN, write_measured
from nvgemm_aot.bundle.content import read_content
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime import settings
from nvgemm_runtime.bundle.ranking_entries import Scope, UnservedReason
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import RequiredError
from nvgemm_runtime.gemm.epilogues import BIAS
from nvgemm_runtime.gemm.problem import DType, Op, Problem
from nvgemm_runtime.gemm.types import ScaleRecipe
from nvgemm_runtime.launch.compiled import load_for
from nvgemm_runtime.launch.loading.loader import LoadedKernel
from nvgemm_runtime.matching.device import DeviceFacts
from written_wheels import write_wheel

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("counted_anew", "default_mode")


class Bundles:
    """Bundles of three kernels for the problems of `TIMES`, with measurements made up."""

    def __init__(self, built: Path, directory: Path) -> None:
        self._built = built
        self._directory = directory

    def measured(self, times: Mapping[int, Mapping[str, int]] = TIMES, **how: Any) -> Path:
        name = f"measured-{len(list(self._directory.iterdir()))}.nvgemm"
        return write_measured(self._built, self._directory / name, times, **how)


def make_bundles(
    problems: list[Problem],
    directory: Path,
    cache: Cache,
    provider: recording_kernels.Recording | None = None,
) -> Bundles:
    directory.chmod(0o755)
    measured = directory / "measured"
    measured.mkdir(mode=0o755)
    return Bundles(tuning_bench.build(problems, directory / "built", cache, provider), measured)


@pytest.fixture(scope="module")
def bundles(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    return make_bundles(problems, tmp_path_factory.mktemp("default"), kernel_cache)


@pytest.fixture
def default_mode(inductor: InductorSession) -> Iterator[None]:
    """No max-autotune, and no variable that turns kernels off without it."""
    inductor.monkeypatch.delenv("NVGEMM_AOT_DEFAULT_MODE", raising=False)
    with torch._inductor.config.patch(max_autotune=False, max_autotune_gemm=False):
        yield


@pytest.fixture
def one_compilation() -> Iterator[None]:
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def compile_dynamic(
    inductor: InductorSession, first: int = 16, function: Callable[..., Tensor] = torch.mm
) -> Compiled:
    a, b = operands(first)
    torch._dynamo.mark_dynamic(a, 0)
    compiled = inductor.compile(function, a, b, dynamic=None)
    torch.testing.assert_close(compiled.result, function(a, b))
    return compiled


@pytest.mark.usefixtures("one_compilation")
@pytest.mark.parametrize("first", [16, 100])
def test_one_graph_uses_the_best_kernel_at_each_size(
    inductor: InductorSession, bundles: Bundles, timed: list[str], first: int
) -> None:
    """Whatever the size that it was compiled for."""
    inductor.use(bundles.measured())
    compiled = compile_dynamic(inductor, first)
    for _ in range(2):
        for m, operator in COMPUTED_BY.items():
            a, b = operands(m)
            torch.testing.assert_close(compiled.function(a, b), a @ b)
            expected = () if operator is None else (operator,)
            assert inductor.launched(compiled.function, a, b) == expected, m
    assert timed == []


def with_rankings_for_both(first: Path, further: Path, output: Path) -> Path:
    """A bundle with the rankings of two, of which the second's are for a further product."""
    with Bundle(first) as one, Bundle(further) as other:
        content, more = read_content(one), read_content(other).rankings
    rankings = (*content.rankings, *(replace(ranking, is_further=True) for ranking in more))
    write_bundle(output, replace(content, rankings=rankings))
    return output


@pytest.mark.usefixtures("one_compilation")
def test_a_bundle_for_several_products_dispatches_by_what_was_measured_on_this_one(
    inductor: InductorSession, bundles: Bundles, timed: list[str]
) -> None:
    swapped = {WIDE: SQUARE, SQUARE: WIDE, ONE: ONE, ATEN: ATEN}
    elsewhere = {m: {swapped[name]: ns for name, ns in one.items()} for m, one in TIMES.items()}
    first = bundles.measured(elsewhere, gpu="another CPU")
    both = with_rankings_for_both(first, bundles.measured(), first.with_name("both.nvgemm"))
    inductor.use(both)
    compiled = compile_dynamic(inductor)
    for m, operator in COMPUTED_BY.items():
        expected = () if operator is None else (operator,)
        assert inductor.launched(compiled.function, *operands(m)) == expected, m
    assert timed == []
    both.unlink()


@pytest.mark.parametrize("m", [7, 8, 10, 14, 20, 32])
def test_a_static_size_gets_its_kernel_without_timing(
    inductor: InductorSession, bundles: Bundles, timed: list[str], m: int
) -> None:
    inductor.use(bundles.measured())
    a, b = operands(m)
    compiled = inductor.compile(torch.mm, a, b)
    torch.testing.assert_close(compiled.result, a @ b)
    operator = COMPUTED_BY[m]
    assert compiled.launched == (() if operator is None else (operator,))
    assert timed == []
    assert ("by_m" in compiled.code[0]) is False, "a size that is known needs no table"


def test_turned_off_the_code_is_stock(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.measured())
    inductor.monkeypatch.setenv("NVGEMM_AOT_DEFAULT_MODE", "0")
    compiled = compile_dynamic(inductor)
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]
    assert nvgemm_runtime.stats().met == 0


def test_a_value_that_is_none_counts_as_not_set(
    inductor: InductorSession, bundles: Bundles, caplog: pytest.LogCaptureFixture
) -> None:
    settings._warn_once.cache_clear()
    inductor.use(bundles.measured())
    inductor.monkeypatch.setenv("NVGEMM_AOT_DEFAULT_MODE", "off")
    assert compile_dynamic(inductor).launched == (SQUARE,)
    assert caplog.text.count("NVGEMM_AOT_DEFAULT_MODE=off: allowed are 0, 1; taken as 1") == 1
    settings._warn_once.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(("value", "joins"), [("", True), ("0", False)])
def test_the_variable_turns_it_off_alone(
    inductor: InductorSession, bundles: Bundles, value: str, joins: bool
) -> None:
    inductor.use(bundles.measured())
    inductor.monkeypatch.setenv("NVGEMM_AOT_DEFAULT_MODE", value)
    assert compile_dynamic(inductor).launched == ((SQUARE,) if joins else ())


@pytest.mark.slow
def test_the_plug_in_is_not_asked_in_mode_off(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.measured())
    with nvgemm_runtime.mode("off"):
        compiled = compile_dynamic(inductor)
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]


@pytest.mark.slow
@pytest.mark.parametrize("turned_off", [False, True])
def test_required_demands_nothing_without_bundles_or_turned_off(
    inductor: InductorSession, bundles: Bundles, turned_off: bool
) -> None:
    inductor.use(*([bundles.measured({})] if turned_off else []))
    if turned_off:
        inductor.monkeypatch.setenv("NVGEMM_AOT_DEFAULT_MODE", "0")
    required = {"options": {"nvgemm_aot_mode": "required"}}
    assert inductor.compile(torch.mm, *operands(16), **required).launched == ()


def test_required_refuses_estimates(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.measured({}))
    with pytest.raises(Exception, match="nvgemm-aot confirm") as caught:
        inductor.compile(torch.mm, *operands(16), options={"nvgemm_aot_mode": "required"})
    assert "to use ATen here, compile this model in mode auto" in str(caught.value)


def test_a_search_for_bundles_that_fails_costs_the_kernels_alone(
    inductor: InductorSession, bundles: Bundles, caplog: pytest.LogCaptureFixture
) -> None:
    from nvgemm_runtime.inductor import autoload
    from nvgemm_runtime.installed import digest

    def fail() -> bool:
        raise RuntimeError("broken on purpose")

    inductor.use(bundles.measured())
    inductor.monkeypatch.setattr(digest, "has_bundles", fail)
    inductor.monkeypatch.setattr(autoload, "_logged", set())
    compiled = compile_dynamic(inductor)
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert sum("is disabled in torch.compile" in one.getMessage() for one in warnings) == 1


MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])

OPEN: dict[str, dict[str, Any]] = {
    "doubts": {"doubts": ("it was hot",)},
    "another product": {"gpu": "another CPU"},
    "one GPU": {"confirmed_by": ()},
    "an older torch": {"torch": f"{MAJOR}.{MINOR - 1}.0"},
    "a newer torch": {"torch": f"{MAJOR}.{MINOR + 1}.0+cu130"},
    "another CUDA": {"cuda": "13.9"},
}


@pytest.mark.parametrize("why", OPEN)
def test_what_does_not_hold_here_leaves_stock_code(
    inductor: InductorSession, bundles: Bundles, timed: list[str], why: str
) -> None:
    inductor.use(bundles.measured(**OPEN[why]))
    compiled = compile_dynamic(inductor)
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]
    assert timed == []
    (reason,) = nvgemm_runtime.stats().misses
    assert "m 8: " in reason


@pytest.mark.parametrize("torchs", [f"{MAJOR}.{MINOR}.9", f"{MAJOR}.{MINOR}.0+cu999"])
def test_measurements_with_another_build_of_this_minor_version_of_torch_count(
    inductor: InductorSession, bundles: Bundles, torchs: str
) -> None:
    """What counts of CUDA is the version that torch names, not the build's label."""
    inductor.use(bundles.measured(torch=torchs))
    assert compile_dynamic(inductor).launched == (SQUARE,)


def test_estimates_leave_stock_code(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.measured({}))
    compiled = compile_dynamic(inductor)
    assert "nvgemm" not in compiled.code[0]


@pytest.mark.slow
def test_the_range_of_a_dynamic_size_counts(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.measured())
    b = torch.randn(64, 32)
    for (least, most), says in {(26, 100): False, (20, 100): True, (17, 23): True}.items():
        torch._dynamo.reset()
        a = torch.randn(least, 64)
        torch._dynamo.mark_dynamic(a, 0, min=least, max=most)
        compiled = inductor.compile(torch.mm, a, b, dynamic=None)
        torch.testing.assert_close(compiled.result, a @ b)
        assert ("nvgemm" in compiled.code[0]) == says, least
        assert ("by_m" in compiled.code[0]) == ((least, most) == (20, 100)), least


@pytest.mark.usefixtures("one_compilation")
def test_sizes_that_depend_on_data(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.measured())

    def model(rows: Tensor, kept: Tensor, b: Tensor) -> Tensor:
        return torch.mm(rows[kept], b)

    rows, b = torch.randn(40, 64), torch.randn(64, 32)

    def kept(m: int) -> Tensor:
        return torch.arange(40) < m

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = inductor.compile(model, rows, kept(16), b, fullgraph=True)
        for m, operator in COMPUTED_BY.items():
            if m <= 40:
                result = compiled.function(rows, kept(m), b)
                torch.testing.assert_close(result, model(rows, kept(m), b))
                launched = inductor.launched(compiled.function, rows, kept(m), b)
                assert launched == (() if operator is None else (operator,)), m


@pytest.mark.usefixtures("one_compilation")
def test_operands_that_are_unaligned_at_one_call_and_aligned_at_the_next(
    inductor: InductorSession, bundles: Bundles, caplog: pytest.LogCaptureFixture
) -> None:
    inductor.use(bundles.measured())
    compiled = compile_dynamic(inductor)
    a, b = operands(20)
    unaligned = torch.empty(20 * 64 + 1)[1:].view(20, 64).copy_(a)
    launched = []
    for one in (unaligned, a, unaligned, a):
        torch.testing.assert_close(compiled.function(one, b), a @ b)
        launched.append(inductor.launched(compiled.function, one, b))
    assert launched == [(), (SQUARE,), (), (SQUARE,)]
    assert warnings_of(caplog) == []


def test_operands_with_gaps_are_unlike_those_measured(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured())
    roomy, b = torch.randn(16, 128), torch.randn(64, 32)
    compiled = inductor.compile(lambda x, b: x[:, :64] @ b, roomy, b)
    torch.testing.assert_close(compiled.result, roomy[:, :64] @ b)
    assert compiled.launched == ()


def test_threads_call_one_graph_at_different_sizes(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured())
    compiled = compile_dynamic(inductor, 100)
    assert_right_from_threads(inductor, compiled.function)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_no_kernel_joins_whose_results_depend_on_timing(
    inductor: InductorSession, kernel_cache: Cache, tmp_path: Path, is_deterministic: bool
) -> None:
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    provider = recording_kernels.TimingDependent()
    inductor.use(make_bundles(problems, tmp_path, kernel_cache, provider).measured())
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        launched = compile_dynamic(inductor).launched
    finally:
        torch.use_deterministic_algorithms(False)
    assert launched == ()


def with_timing_dependent(path: Path, operator: str) -> Path:
    """The bundle, in which the results of one operator depend on timing."""
    with Bundle(path) as bundle:
        content = read_content(bundle)
    kernels = tuple(
        replace(kernel, is_deterministic=kernel.operator != operator) for kernel in content.kernels
    )
    output = path.with_name(f"varying-{path.name}")
    write_bundle(output, replace(content, kernels=kernels))
    return output


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_other_kernels_of_a_ranking_serve_a_deterministic_program(
    inductor: InductorSession, bundles: Bundles, events: Events
) -> None:
    """Without doubts, and with no advice to measure again what the program leaves out."""
    inductor.use(with_timing_dependent(bundles.measured(), WIDE))
    compiled = compile_dynamic(inductor)
    for m in (8, 16, 24):
        assert inductor.launched(compiled.function, *operands(m)) == (SQUARE,), m
    assert inductor.launched(compiled.function, *operands(32)) == ()
    (met, _) = events()
    assert met["doubtful"] == []
    assert "nvgemm-aot tune" not in explained(events)


@pytest.mark.usefixtures("deterministic")
def test_required_refuses_a_winner_that_a_deterministic_program_leaves_out(
    inductor: InductorSession, bundles: Bundles
) -> None:
    """Where no other kernel beats ATen."""
    times = {16: {SQUARE: 1100, WIDE: 300, ONE: 1200, ATEN: 1000}}
    inductor.use(with_timing_dependent(bundles.measured(times), WIDE))
    with pytest.raises(Exception, match=r"m 16: results of the kernels .* depend on timing"):
        inductor.compile(torch.mm, *operands(16), options={"nvgemm_aot_mode": "required"})


def test_an_aten_that_is_not_set_as_usual_was_not_measured(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured())
    torch.set_float32_matmul_precision("high")
    try:
        assert compile_dynamic(inductor).launched == ()
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "library", [SimpleNamespace(name="Cublaslt"), RuntimeError("nobody knows")]
)
def test_where_torch_prefers_another_library_rankings_do_not_count(
    inductor: InductorSession, bundles: Bundles, library: SimpleNamespace | RuntimeError
) -> None:
    def preferred() -> SimpleNamespace:
        if isinstance(library, RuntimeError):
            raise library
        return library

    inductor.use(bundles.measured())
    inductor.monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    assert compile_dynamic(inductor).launched == ()
    (reason,) = nvgemm_runtime.stats().misses
    assert (
        "m 8: ATen was measured with default settings: torch.backends.cuda.preferred_blas" in reason
    )
    with pytest.raises(Exception, match=r"RequiredError: .*\n.*preferred_blas_library"):
        inductor.compile(torch.mm, *operands(16), options={"nvgemm_aot_mode": "required"})


@pytest.mark.slow
def test_a_batch_and_a_dynamic_batch(
    inductor: InductorSession, kernel_cache: Cache, tmp_path: Path
) -> None:
    problems = [cpu_provider.problem(op=Op.BMM, sizes=(m, 32, 64)) for m in TIMES]
    inductor.use(make_bundles(problems, tmp_path, kernel_cache).measured())
    a, b = torch.randn(3, 16, 64), torch.randn(3, 64, 32)
    torch._dynamo.mark_dynamic(a, 1)
    compiled = inductor.compile(torch.bmm, a, b, dynamic=None)
    for m, operator in COMPUTED_BY.items():
        a = torch.randn(3, m, 64)
        torch.testing.assert_close(compiled.function(a, b), a @ b)
        expected = () if operator is None else (operator,)
        assert inductor.launched(compiled.function, a, b) == expected, m
    torch._dynamo.reset()
    a = torch.randn(3, 16, 64)
    for tensor in (a, b):
        torch._dynamo.mark_dynamic(tensor, 0)
    assert inductor.compile(torch.bmm, a, b, dynamic=None).launched == ()
    assert any("other than m is dynamic" in why for why in nvgemm_runtime.stats().misses)


FP8 = torch.float8_e4m3fn

KINDS: dict[str, tuple[Any, Callable[[int], tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "addmm": (
        cpu_kernels.signature("tn", operand=DType.BF16, epilogue=BIAS),
        lambda m: (
            torch.randn(32).bfloat16(),
            torch.randn(m, 64).bfloat16(),
            torch.randn(32, 64).bfloat16().t(),
        ),
        torch.addmm,
    ),
    "scaled": (
        cpu_kernels.signature("tn", operand=DType.FP8_E4M3, scales=ScaleRecipe.FP32_TENSOR),
        lambda m: (
            torch.randn(m, 64).to(FP8),
            torch.randn(32, 64).to(FP8).t(),
            torch.tensor(0.5),
            torch.tensor(2.0),
        ),
        lambda *given: torch._scaled_mm(*given, out_dtype=torch.bfloat16, use_fast_accum=True),
    ),
    "grouped": (
        cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16),
        lambda m: (
            torch.randn(m, 64).bfloat16(),
            torch.randn(4, 32, 64).bfloat16().mT,
            torch.tensor([2, 4, 6, m], dtype=torch.int32),
        ),
        lambda a, b, offs: torch._grouped_mm(a, b, offs=offs),
    ),
    "baddbmm": (
        cpu_kernels.signature("tn", op=Op.BMM, operand=DType.BF16, epilogue=BIAS),
        lambda m: (
            torch.randn(1, 1, 32).bfloat16(),
            torch.randn(3, m, 64).bfloat16(),
            torch.randn(3, 32, 64).bfloat16().mT,
        ),
        torch.baddbmm,
    ),
    "_int_mm": (
        cpu_kernels.signature("tn", operand=DType.INT8),
        lambda m: (
            torch.randint(-9, 9, (m, 64), dtype=torch.int8),
            torch.randint(-9, 9, (32, 64), dtype=torch.int8).t(),
        ),
        torch._int_mm,
    ),
}
"""By name: a signature, operands for an m, which A alone has, and a call."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "in_cpp"),
    [(kind, False) for kind in KINDS] + [(kind, True) for kind in KINDS if kind != "grouped"],
)
def test_other_operators(
    inductor: InductorSession, kernel_cache: Cache, tmp_path: Path, kind: str, in_cpp: bool
) -> None:
    """`test_dispatched_cpp` has groups in generated C++, which are a miss."""
    served, make, call = KINDS[kind]
    problems = [cpu_provider.problem_of(served, (m, 32, 64)) for m in TIMES]
    inductor.use(make_bundles(problems, tmp_path, kernel_cache).measured())
    first = make(16)
    a = first[1 if "add" in kind else 0]
    torch._dynamo.mark_dynamic(a, a.dim() - 2)
    with torch._inductor.config.patch(cpp_wrapper=in_cpp):
        compiled = inductor.compile(call, *first, dynamic=None)
    for m, operator in COMPUTED_BY.items():
        if m < 6:
            continue
        arguments = make(m)
        torch.testing.assert_close(
            compiled.function(*arguments), call(*arguments), rtol=2e-2, atol=2e-2
        )
        expected = () if operator is None else (operator,)
        assert inductor.launched(compiled.function, *arguments) == expected, m


@pytest.mark.slow
def test_an_activation_is_not_fused(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.measured())
    compiled = compile_dynamic(inductor, function=lambda a, b: torch.relu(a @ b))
    assert compiled.launched == (SQUARE,)


def test_required_passes_what_aten_won_and_what_nobody_declared(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured())
    required = {"options": {"nvgemm_aot_mode": "required"}}
    for m, launched in {16: (SQUARE,), 32: (), 100: (), 14: ()}.items():
        a, b = operands(m)
        assert inductor.compile(torch.mm, a, b, **required).launched == launched, m
    a, b = torch.randn(16, 48), torch.randn(48, 32)
    assert inductor.compile(torch.mm, a, b, **required).launched == ()


ONE_GPU: dict[str, Any] = {"confirmed_by": (), "repeated": 300}
SMALL_GAINS = {m: {SQUARE: 960, WIDE: 990, ONE: 999, ATEN: 1000} for m in TIMES}
"""A kernel is first at each m, by less than one GPU's word is enough for."""


def test_what_one_gpu_repeated_serves_if_it_gains_8_percent(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured(**ONE_GPU))
    required = {"options": {"nvgemm_aot_mode": "required"}}
    assert inductor.compile(torch.mm, *operands(16), **required).launched == (SQUARE,)


def test_a_smaller_gain_of_one_gpu_is_left_to_aten_with_the_reason(
    inductor: InductorSession, bundles: Bundles, caplog: pytest.LogCaptureFixture
) -> None:
    """Required or not: the ranking decides, and every process decides alike."""
    inductor.use(bundles.measured(SMALL_GAINS, **ONE_GPU))
    caplog.set_level("DEBUG", "nvgemm_runtime")
    for mode in ("auto", "required"):
        options = {"nvgemm_aot_mode": mode}
        assert inductor.compile(torch.mm, *operands(16), options=options).launched == ()
    said = "m 16: a kernel gains 4.0%, below the 8% that a measurement repeated on one GPU needs"
    assert caplog.text.count(said) == 2
    assert "ATen was measured to be as fast" not in caplog.text


def test_a_setting_lets_what_one_gpu_repeated_serve_from_2_percent_on(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured(SMALL_GAINS, **ONE_GPU))
    before = settings.choosing_key()
    inductor.monkeypatch.setenv("NVGEMM_AOT_REPEATED_RANKINGS", "1")
    assert settings.choosing_key() != before, "or cached graphs would stay as they were"
    assert inductor.compile(torch.mm, *operands(16)).launched == (SQUARE,)


@pytest.mark.parametrize("why", OPEN)
def test_required_refuses_a_declared_problem_without_its_kernel(
    inductor: InductorSession, bundles: Bundles, why: str
) -> None:
    inductor.use(bundles.measured(**OPEN[why]))
    with pytest.raises(
        Exception, match="forbids compiling this declared problem without its kernel"
    ) as caught:
        inductor.compile(torch.mm, *operands(16), options={"nvgemm_aot_mode": "required"})
    assert isinstance(caught.value, RequiredError) or "RequiredError" in str(caught.value)
    assert "NVGEMM_AOT_DEFAULT_MODE=0" in str(caught.value)


@pytest.mark.parametrize("not_declared", [(), (16,)])
def test_required_passes_what_was_measured_and_not_declared(
    inductor: InductorSession, bundles: Bundles, not_declared: tuple[int, ...]
) -> None:
    inductor.use(bundles.measured(doubts=("it was hot",), not_declared=not_declared))
    required = {"options": {"nvgemm_aot_mode": "required"}}
    if not_declared:
        assert inductor.compile(torch.mm, *operands(16), **required).launched == ()
        torch._dynamo.reset()
    else:
        with pytest.raises(
            Exception, match="forbids compiling this declared problem without its kernel"
        ):
            inductor.compile(torch.mm, *operands(16), **required)
    with pytest.raises(Exception, match="m 24: measured with doubts"):
        inductor.compile(torch.mm, *operands(24), **required)


@pytest.mark.parametrize("is_refused", [False, True])
def test_required_refuses_what_one_bundle_declares_and_another_measured_in_doubt(
    inductor: InductorSession, bundles: Bundles, tmp_path: Path, is_refused: bool
) -> None:
    """The declaring bundle has no kernel for it, or none of its kernels serves here."""
    between = bundles.measured(doubts=("it was hot",), not_declared=tuple(TIMES))
    with Bundle(between) as bundle:
        content = read_content(bundle)
    if is_refused:
        rankings = tuple(replace(one, is_declared=True) for one in content.rankings)
        content = replace(content, rankings=rankings)
        content = replace(content, target=replace(content.target, arch="sm_90a"))
    else:
        (declared,) = (one.problem for one in content.rankings if one.problem.m == 16)
        why = UnservedReason(text="no such operator", scope=Scope.PROBLEM)
        rankings = tuple(one for one in content.rankings if one.problem != declared)
        content = replace(content, rankings=rankings, unserved={declared: why})
    tmp_path.chmod(0o755)
    write_bundle(tmp_path / "declaring.nvgemm", content)
    required = {"options": {"nvgemm_aot_mode": "required"}}
    inductor.use(between)
    assert inductor.compile(torch.mm, *operands(16), **required).launched == ()
    torch._dynamo.reset()
    inductor.use(between, tmp_path / "declaring.nvgemm")
    with pytest.raises(Exception, match="m 16: measured with doubts"):
        inductor.compile(torch.mm, *operands(16), **required)


def test_what_was_measured_and_not_declared_is_in_tables_and_counts_as_served_by_signature(
    inductor: InductorSession, bundles: Bundles, events: Events
) -> None:
    inductor.use(bundles.measured(not_declared=(12, 16, 32)))
    required = {"options": {"nvgemm_aot_mode": "required"}}
    for m, launched in {12: (WIDE,), 16: (SQUARE,), 32: (), 8: (WIDE,)}.items():
        assert inductor.compile(torch.mm, *operands(m), **required).launched == launched, m
    met = [event["basis"] for event in events() if event["event"] == "met"]
    assert met == ["signature"] * 3 + ["declared"]
    counted = nvgemm_runtime.stats()
    assert (counted.declared, counted.signature) == (1, 3)


def test_required_passes_any_n_at_an_m_that_is_not_declared(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured(not_declared=(16,)))
    a, b = operands(16)
    torch._dynamo.mark_dynamic(b, 1)
    required = {"nvgemm_aot_mode": "required"}
    assert inductor.compile(torch.mm, a, b, dynamic=None, options=required).launched == ()


def test_required_refuses_a_winner_whose_results_depend_on_timing(
    inductor: InductorSession, kernel_cache: Cache, tmp_path: Path
) -> None:
    """ATen did not win there, and what did is not used."""
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in TIMES]
    provider = recording_kernels.TimingDependent()
    inductor.use(make_bundles(problems, tmp_path, kernel_cache, provider).measured())
    required = {"options": {"nvgemm_aot_mode": "required"}}
    assert inductor.compile(torch.mm, *operands(32), **required).launched == ()
    with pytest.raises(Exception, match=r"m 16: results of the kernels .* depend on timing"):
        inductor.compile(torch.mm, *operands(16), **required)


def test_required_refuses_a_declared_problem_in_a_graph_of_any_n(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured())
    required = {"nvgemm_aot_mode": "required"}
    for m in (16, 32, 100):
        torch._dynamo.reset()
        a, b = operands(m)
        torch._dynamo.mark_dynamic(b, 1)
        if m != 16:  # ATen won 32, and nobody declared 100
            assert inductor.compile(torch.mm, a, b, dynamic=None, options=required).launched == ()
            continue
        with pytest.raises(Exception, match="a size other than m is dynamic"):
            inductor.compile(torch.mm, a, b, dynamic=None, options=required)


def test_required_looks_at_sizes_whose_kernels_are_left_out(
    inductor: InductorSession, bundles: Bundles
) -> None:
    """Also at sizes of the graph other than the one that it is compiled for."""
    inductor.use(bundles.measured())
    inductor.monkeypatch.setattr(
        "nvgemm_runtime.matching.index.Index.missing_sizes", lambda *_: {20: "b: no such operator"}
    )
    a, b = operands(16)
    required = {"nvgemm_aot_mode": "required"}
    assert inductor.compile(torch.mm, a, b, options=required).launched == (SQUARE,)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(a, 0)
    with pytest.raises(Exception, match="m 20: b: no such operator"):
        inductor.compile(torch.mm, a, b, dynamic=None, options=required)


def test_required_looks_at_every_declared_size_of_a_graph(
    inductor: InductorSession, bundles: Bundles
) -> None:
    """Of a dynamic m: one that is declared, and only estimated, has no kernel."""
    required = {"nvgemm_aot_mode": "required"}
    inductor.use(bundles.measured())
    a, b = operands(16)
    torch._dynamo.mark_dynamic(a, 0)
    compiled = inductor.compile(torch.mm, a, b, dynamic=None, options=required)
    assert compiled.launched == (SQUARE,)
    torch._dynamo.reset()
    inductor.use(bundles.measured({m: times for m, times in TIMES.items() if m != 24}))
    with pytest.raises(Exception, match="m 24: its ranking is an estimate"):
        inductor.compile(torch.mm, a, b, dynamic=None, options=required)


@pytest.mark.parametrize("hint", [14, 16])
def test_beside_choices_that_a_user_adds_a_table_is_timed_by_its_kernel(
    inductor: InductorSession, bundles: Bundles, hint: int
) -> None:
    """At 14 rows ATen computes either way, and whichever is faster by chance may win."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    functions = get_algorithm_selector_cache().preprocessing_fns
    stock: list[Any] = []

    def keep(choices: list[Any]) -> list[Any]:
        stock[:] = choices
        return choices

    def add(choices: list[Any]) -> list[Any]:
        return [*choices, *stock]

    inductor.use(bundles.measured())
    inductor.slow_down_aten()
    functions.insert(0, keep)
    functions.append(add)
    try:
        compiled = compile_dynamic(inductor, hint)
    finally:
        functions.remove(keep)
        functions.remove(add)
    assert hint == 14 or "by_m" in compiled.code[0]
    assert len(stock) == 1


def test_a_bundle_that_is_not_there_is_warned_of(
    inductor: InductorSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inductor.use(tmp_path / "mistyped.nvgemm")
    assert "nvgemm" not in compile_dynamic(inductor).code[0]
    (warning,) = warnings_of(caplog)
    assert "mistyped.nvgemm: No such file" in warning
    assert nvgemm_runtime.stats().missed == 1


@pytest.mark.parametrize("is_autotuned", [False, True])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_required_refuses_a_bundle_that_cannot_be_opened(
    inductor: InductorSession,
    bundles: Bundles,
    tmp_path: Path,
    is_autotuned: bool,
    is_damaged: bool,
) -> None:
    """Also beside one that serves the GEMM: what the other declares is not known."""
    tmp_path.chmod(0o755)
    measured, broken = bundles.measured(), tmp_path / "broken.nvgemm"
    if is_damaged:
        broken.write_bytes(measured.read_bytes()[:100])
    inductor.use(measured, broken)
    required = {"nvgemm_aot_mode": "required", "max_autotune": is_autotuned}
    with pytest.raises(Exception, match="RequiredError: bundles cannot be opened") as caught:
        inductor.compile(torch.mm, *operands(16), options=required)
    assert str(broken) in str(caught.value)
    assert str(measured) not in str(caught.value)
    assert "correct or remove the path in NVGEMM_AOT_BUNDLES" in str(caught.value)


@pytest.mark.parametrize(
    ("requirement", "step"),
    [
        (
            "nvgemm-kernels-model==1.2",
            "reinstall the wheel of nvgemm-kernels-model==1.2: pip install --force-reinstall "
            "--no-deps FILE",
        ),
        (
            None,
            "reinstall the kernel wheel whose metadata is in /nowhere/b.nvgemm, or delete that "
            "path",
        ),
    ],
)
def test_required_says_how_to_install_a_damaged_wheel_again(
    inductor: InductorSession, monkeypatch: pytest.MonkeyPatch, requirement: str | None, step: str
) -> None:
    from nvgemm_runtime.installed.discover import BundleFile
    from nvgemm_runtime.installed.required import require_opened

    path = Path("/nowhere/b.nvgemm")
    broken = BundleFile(path=path, origin="a wheel", problem=None, requirement=requirement)
    inductor.use()
    monkeypatch.setattr("nvgemm_runtime.installed.registry.find_bundles", lambda: (broken,))
    with pytest.raises(RequiredError, match=r"nowhere/b\.nvgemm") as caught:
        require_opened()
    assert str(caught.value).endswith(step)


@pytest.mark.parametrize("is_autotuned", [False, True])
def test_required_refuses_an_installed_wheel_whose_bundle_is_gone(
    inductor: InductorSession,
    bundles: Bundles,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_autotuned: bool,
) -> None:
    """Beside a wheel that serves the GEMM; without ``required``, that one is used."""
    served, lost = (
        write_wheel([bundles.measured()], name=name, version="1.0", out_dir=tmp_path)
        for name in ("served", "lost")
    )
    (gone,) = (inductor.use_wheels(served, lost) / "nvgemm_kernels_lost").glob("*.nvgemm")
    gone.unlink()
    assert "nvgemm" in compile_dynamic(inductor).code[0]
    assert warnings_of(caplog)[0].startswith(f"bundle left out (nvgemm-kernels-lost 1.0): {gone}")
    required = {"nvgemm_aot_mode": "required", "max_autotune": is_autotuned}
    with pytest.raises(Exception, match="RequiredError: bundles cannot be opened") as caught:
        inductor.compile(torch.mm, *operands(16), options=required)
    assert f"{gone} is missing" in str(caught.value)
    assert str(caught.value).count("--no-deps") == 1
    assert "reinstall the wheel of nvgemm-kernels-lost==1.0: pip install" in str(caught.value)


def test_required_passes_beside_a_bundle_for_other_hardware(
    inductor: InductorSession, bundles: Bundles, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    with Bundle(bundles.measured()) as bundle:
        content = read_content(bundle)
    other = replace(content, target=replace(content.target, arch="sm_90a"))
    write_bundle(tmp_path / "other.nvgemm", other)
    inductor.use(bundles.measured(), tmp_path / "other.nvgemm")
    required = {"nvgemm_aot_mode": "required"}
    assert inductor.compile(torch.mm, *operands(16), options=required).launched == (SQUARE,)


def test_a_problem_whose_kernels_are_left_out_says_so(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured(**OPEN["doubts"]))
    inductor.monkeypatch.setattr(
        "nvgemm_runtime.matching.index.Index.missing_sizes", lambda *_: {7: "b: no such operator"}
    )
    assert inductor.compile(torch.mm, *operands(7)).launched == ()
    (reason,) = nvgemm_runtime.stats().misses
    assert reason.endswith("; m 7: b: no such operator")


def test_switched_off_is_stock(inductor: InductorSession, bundles: Bundles) -> None:
    inductor.use(bundles.measured())
    compiled = inductor.compile(torch.mm, *operands(16), options={"nvgemm_aot_mode": "off"})
    assert compiled.launched == ()
    assert "nvgemm" not in compiled.code[0]


def test_events_say_that_a_gemm_is_dispatched(
    inductor: InductorSession, bundles: Bundles, events: Callable[[], list[dict[str, Any]]]
) -> None:
    from nvgemm_aot.cli.programs.explain import explain_text
    from nvgemm_aot.workload.decisions import collect

    inductor.use(bundles.measured())
    compile_dynamic(inductor)
    met, used = events()
    assert met["basis"] == "declared"
    told = "ATen, from m 8 Cpu_8x32, from m 13 ATen, from m 16 Cpu_16x16, from m 25 ATen"
    assert met["measured"] == f"dispatched by m: {told}"
    assert used["name"] in met["offered"]
    assert len(used["kernels"]) == 2
    assert sum(nvgemm_runtime.stats().won.values()) == 2
    assert nvgemm_runtime.stats().dispatched == {f"{met['gemm']}: {told}": 1}
    assert str(nvgemm_runtime.stats()).endswith(f"\n  {met['gemm']}: {told} (calls: 1)")
    text = explain_text(
        {"gemms": [g.to_json() for g in collect(events())], "unreadable_lines": 0, "failed": {}}
    )
    assert told in text


def test_a_preloaded_manifest_has_the_kernels_of_tables(
    inductor: InductorSession, bundles: Bundles
) -> None:
    """Also those that are the fastest at no measured m."""
    near = {8: {WIDE: 300, ONE: 301, SQUARE: 600}, 12: {WIDE: 600, ONE: 301, SQUARE: 300}}
    measured = bundles.measured({m: {**times, ATEN: 1000} for m, times in near.items()})
    with Bundle(measured) as opened:
        header = opened.header
    named = measured.rename(measured.with_name(f"model-{header.target.key}.nvgemm"))
    inductor.use(named)
    loaded: list[str] = []

    def load(kernel_id: str, facts: DeviceFacts) -> LoadedKernel:
        loaded.append(kernel_id)
        return load_for(kernel_id, facts)

    inductor.monkeypatch.setattr("nvgemm_runtime.launch.preload.load_for", load)
    done = nvgemm_runtime.preload("model")
    operators = {kernel.id: kernel.operator for kernel in header.kernels}
    assert {operators[one] for one in loaded} == {WIDE, ONE, SQUARE}
    assert len(loaded) == done.kernels == 3
    assert compile_dynamic(inductor, 8).launched == (ONE,)


Events = Callable[[], list[dict[str, Any]]]


def explained(events: Events) -> str:
    from nvgemm_aot.cli.programs.explain import explain_text
    from nvgemm_aot.workload.decisions import collect

    return explain_text(
        {"gemms": [g.to_json() for g in collect(events())], "unreadable_lines": 0, "failed": {}}
    )


def test_the_command_that_settles_doubts_is_told(
    inductor: InductorSession, bundles: Bundles, events: Events
) -> None:
    doubtful = bundles.measured(doubts=("it was hot",))
    inductor.use(doubtful)
    compile_dynamic(inductor)
    assert explained(events).endswith(
        f"to measure uncertain problems on this GPU:\n  nvgemm-aot tune {doubtful} -o tuned.nvgemm"
    )


def test_the_command_that_settles_contradictions_measures_both_bundles(
    inductor: InductorSession, bundles: Bundles, events: Events
) -> None:
    lost = {m: {**times, ATEN: 100} for m, times in TIMES.items()}
    both = sorted(map(str, (bundles.measured(), bundles.measured(lost))))
    inductor.use(*map(Path, both))
    compile_dynamic(inductor)
    text = explained(events)
    assert "contradict each other" in text
    assert text.endswith(
        f"to measure uncertain problems on this GPU:\n  nvgemm-aot tune {' '.join(both)} -o "
        "tuned.nvgemm"
    )


def test_the_command_that_confirms_what_one_gpu_measured_is_told(
    inductor: InductorSession, bundles: Bundles, events: Events
) -> None:
    once = bundles.measured(confirmed_by=())
    inductor.use(once)
    compile_dynamic(inductor)
    assert explained(events).endswith(
        "to repeat measurements, or confirm them on another GPU of this product:\n"
        f"  nvgemm-aot tune {once} -o tuned.nvgemm"
    )


@pytest.mark.parametrize("why", ["another product", "an older torch"])
def test_no_command_confirms_what_does_not_hold_here(
    inductor: InductorSession, bundles: Bundles, events: Events, why: str
) -> None:
    inductor.use(bundles.measured(confirmed_by=(), **OPEN[why]))
    compile_dynamic(inductor)
    assert "nvgemm-aot tune" not in explained(events)


def test_what_aten_won_is_told_as_atens(
    inductor: InductorSession, bundles: Bundles, events: Events
) -> None:
    inductor.use(bundles.measured())
    inductor.compile(torch.mm, *operands(32))
    text = explained(events)
    assert "ATen, as measured" in text
    assert (
        "0 on others though bundled kernels were offered, 1 on ATen, as measured, 0 without" in text
    )


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_at_most_no_kernel_is_none_in_default_mode_too(
    inductor: InductorSession, bundles: Bundles, is_dynamic: bool
) -> None:
    inductor.use(bundles.measured())
    inductor.monkeypatch.setenv("NVGEMM_AOT_MAX_CHOICES", "0")
    if is_dynamic:
        compiled = compile_dynamic(inductor)
    else:
        compiled = inductor.compile(torch.mm, *operands(16))
    assert "nvgemm" not in compiled.code[0]
    (reason,) = nvgemm_runtime.stats().misses
    assert reason.startswith("NVGEMM_AOT_MAX_CHOICES=0")
    with pytest.raises(Exception, match="NVGEMM_AOT_MAX_CHOICES=0 allows no kernels"):
        inductor.compile(torch.mm, *operands(24), options={"nvgemm_aot_mode": "required"})


def test_reasons_tell_what_nobody_declares_from_what_does_not_count(
    inductor: InductorSession, bundles: Bundles
) -> None:
    inductor.use(bundles.measured(**OPEN["doubts"]))
    inductor.compile(torch.mm, torch.randn(16, 48), torch.randn(48, 32))
    inductor.compile(torch.mm, *operands(100))
    compile_dynamic(inductor)
    unknown, elsewhere, open_ = nvgemm_runtime.stats().misses
    assert unknown == "no bundle that serves this device declares this n and k"
    assert elsewhere == (
        "bundles rank this n and k at m 8, 12, 16, 24, 32, none of which the graph takes"
    )
    assert open_.startswith("bundles have this n and k, but no usable ranking at any m")
    assert open_.count("it was hot") == 3
    assert open_.endswith("; and 2 more m")


NEXT = {
    "doubts": "measure again here: nvgemm-aot tune {bundle} -o tuned.nvgemm",
    "one GPU": "measure again on this GPU, or on another of this product: nvgemm-aot tune {bundle}",
    "another product": "on this GPU, run: nvgemm-aot confirm",
    "a newer torch": "on this GPU, run: nvgemm-aot confirm",
}


@pytest.mark.parametrize("why", NEXT)
def test_requireds_next_step_fits_the_cause(
    inductor: InductorSession, bundles: Bundles, why: str
) -> None:
    bundle = bundles.measured(**OPEN[why])
    inductor.use(bundle)
    with pytest.raises(
        Exception, match="forbids compiling this declared problem without its kernel"
    ) as caught:
        inductor.compile(torch.mm, *operands(16), options={"nvgemm_aot_mode": "required"})
    told = str(caught.value)
    assert NEXT[why].format(bundle=bundle) in told
    others = {text.partition(":")[0].partition(" with")[0] for text in NEXT.values()}
    assert sum(other in told for other in others) == 1


def test_requireds_next_step_for_other_hardware_is_no_tuning(
    inductor: InductorSession, bundles: Bundles, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    with Bundle(bundles.measured()) as bundle:
        content = read_content(bundle)
    other = replace(content, target=replace(content.target, arch="sm_90a"))
    write_bundle(tmp_path / "other.nvgemm", other)
    inductor.use(tmp_path / "other.nvgemm")
    with pytest.raises(Exception, match="install a wheel whose kernels do") as caught:
        inductor.compile(torch.mm, *operands(16), options={"nvgemm_aot_mode": "required"})
    assert "measure again" not in str(caught.value)


@pytest.mark.parametrize("is_contradicted", [False, True])
def test_no_command_is_told_where_no_measurement_could_count(
    inductor: InductorSession, bundles: Bundles, events: Events, is_contradicted: bool
) -> None:
    """Such as with ATen set otherwise than `tune` has it."""
    lost = {m: {**times, ATEN: 100} for m, times in TIMES.items()}
    doubts = () if is_contradicted else ("it was hot",)
    inductor.use(bundles.measured(doubts=doubts), bundles.measured(lost, doubts=doubts))
    prefer = SimpleNamespace(name="Cublaslt")
    inductor.monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: prefer)
    compile_dynamic(inductor)
    text = explained(events)
    assert "ATen was measured with default settings" in text
    assert "nvgemm-aot tune" not in text


def test_of_many_sizes_that_aten_won_a_message_names_a_few() -> None:
    from nvgemm_runtime.inductor.default_mode.default_choices import _sizes_text

    assert _sizes_text([8, 32]) == "8, 32"
    assert _sizes_text(range(1, 9)) == "1, 2, 3, 4, 5, 6, 7, 8"
    assert _sizes_text(range(1, 1000)) == "1, 2, 3, 4, 5, 6, 7, … 999 (999 sizes)"


@pytest.mark.parametrize("is_static", [False, True])
def test_what_aten_won_is_told_with_its_size_and_with_what_is_open(
    inductor: InductorSession, bundles: Bundles, events: Events, is_static: bool
) -> None:
    inductor.use(bundles.measured({32: TIMES[32]}))
    if is_static:
        inductor.compile(torch.mm, *operands(32))
    else:
        compile_dynamic(inductor)
    (met,) = events()
    told = "ATen was measured to be as fast or faster at m 32"
    if not is_static:
        told += "".join(f"; m {m}: its ranking is an estimate" for m in (8, 12, 16))
        told += "; and 1 more m; on this GPU, run: nvgemm-aot confirm"
    assert met["measured"] == told


def test_the_compile_caches_know_bundles_and_settings(
    inductor: InductorSession, bundles: Bundles
) -> None:
    from nvgemm_runtime.inductor.configuration.cache_key import CacheKeyPass

    def key(*places: Path) -> str:
        inductor.use(*places)
        return CacheKeyPass().uuid()

    measured, other = bundles.measured(), bundles.measured(confirmed_by=())
    keys = {key(), key(measured), key(other)}
    assert len(keys) == 3
    assert key(measured) in keys
    prefer = SimpleNamespace(name="Cublaslt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: prefer)
        assert key(measured) not in keys
    assert key(measured) in keys
    inductor.monkeypatch.setenv("NVGEMM_AOT_DEFAULT_MODE", "0")
    assert key(measured) not in keys


def test_compiling_without_bundles_imports_nothing_for_it(
    inductor: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:

    inductor.use()
    room = "nvgemm_runtime.inductor.default_mode.default_choices"
    monkeypatch.delitem(sys.modules, room, raising=False)
    compiled = compile_dynamic(inductor)
    assert room not in sys.modules
    assert "nvgemm" not in compiled.code[0]
    assert nvgemm_runtime.stats().met == 0
