"""Max-autotune of a graph of any m: a choice that takes another kernel by m, timed at several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.nn import functional

import cpu_kernels
import cpu_provider
import kernels_by_m
import nvgemm_runtime
import tuning_bench
from inductor_session import Compiled, InductorSession
from kernels_by_m import ONE, SQUARE, WIDE
from measured_bundles import ATEN, write_measured
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.gemm.aten import aten_name, kernel_order
from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.inductor.autotuning import choice_timing

Tensor = torch.Tensor

TIMES = {m: times for m, times in kernels_by_m.TIMES.items() if m != 12}
"""By m: WIDE is best at 8, SQUARE from 16 to 24, ATen at 32."""

ONE_KERNEL = {m: {SQUARE: 300, WIDE: 500, ONE: 600, ATEN: 1000} for m in (8, 12, 16, 24)}

TWO_KERNELS = {
    8: {SQUARE: 500, WIDE: 300, ONE: 600, ATEN: 1000},
    12: {SQUARE: 303, WIDE: 300, ONE: 600, ATEN: 1000},
    16: {SQUARE: 300, WIDE: 500, ONE: 600, ATEN: 1000},
}
"""By m: WIDE is best up to 12, where SQUARE is next to it, which is best at 16."""


@pytest.fixture(scope="module")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = sorted({*TIMES, *ONE_KERNEL})
    problems = [cpu_provider.problem(sizes=(m, 32, 64)) for m in sizes]
    return tuning_bench.build(problems, tmp_path_factory.mktemp("dynamic"), kernel_cache, name="b")


@pytest.fixture
def measured(inductor: InductorSession, built: Path, tmp_path: Path) -> Iterator[InductorSession]:
    """The bundle is measured once, by one GPU."""
    tmp_path.chmod(0o755)
    path = write_measured(built, tmp_path / "m" / "measured.nvgemm", TIMES, confirmed_by=())
    inductor.use(path)
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield inductor


RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


def gated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    gate, up = functional.linear(x, weight).chunk(2, dim=-1)
    return functional.silu(gate) * up


def activated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.silu(functional.linear(x, weight, bias))


FUSED = {
    "gated": (Epilogue.parse("swiglu_halves"), gated),
    "activation": (Epilogue.parse("bias_silu"), activated),
}


class Timed:
    """Milliseconds that benchmarks of choices return: by the m of A, and what computes it."""

    def __init__(self, times: Callable[[int, str], float]) -> None:
        self.times = times
        self.asked: list[tuple[int, str]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor.select_algorithm import ExternKernelCaller

        from nvgemm_runtime.inductor.autotuning.choices import GemmChoice
        from nvgemm_runtime.inductor.default_mode.dispatched_choices import DispatchChoice

        def benchmark(choice: Any, *args: Tensor, out: Tensor) -> float:
            if hasattr(choice, "stock"):
                order = choice.stock.order
            else:
                order = kernel_order(aten_name(choice.choice.name), len(args))
            a = args[order[0]]
            assert out.shape[-2] == a.shape[-2]
            name = ATEN
            if isinstance(choice, DispatchChoice):
                name = "by m"
            elif isinstance(choice, GemmChoice):
                name = choice.offer.kernel.operator
            self.asked.append((a.shape[-2], name))
            return self.times(a.shape[-2], name)

        for kind in (ExternKernelCaller, GemmChoice, DispatchChoice):
            monkeypatch.setattr(kind, "benchmark", benchmark)


def as_measured(m: int, name: str) -> float:
    """Times in proportion to `TIMES`, what is chosen by m being the best at each."""
    of_size = TIMES[m]
    best = min(of_size.values())
    return float(best if name == "by m" else of_size[name])


def compile_dynamic(
    session: InductorSession, first: int = 16, function: Callable[..., Tensor] = torch.mm
) -> Compiled:
    a, b = torch.randn(first, 64), torch.randn(64, 32)
    torch._dynamo.mark_dynamic(a, 0)
    compiled = session.compile(function, a, b, dynamic=None)
    torch.testing.assert_close(compiled.result, function(a, b))
    return compiled


def launched_at(compiled: Compiled, session: InductorSession, m: int) -> tuple[str, ...]:
    a, b = torch.randn(m, 64), torch.randn(64, 32)
    torch.testing.assert_close(compiled.function(a, b), a @ b)
    return session.launched(compiled.function, a, b)


@pytest.mark.parametrize(
    ("first", "in_cpp"),
    [(8, False), (16, False), pytest.param(16, True, marks=pytest.mark.slow)],
)
def test_what_wins_over_all_sizes_is_used_at_each(
    measured: InductorSession, monkeypatch: pytest.MonkeyPatch, first: int, in_cpp: bool
) -> None:
    """At the first size, one kernel alone is as fast."""
    timed = Timed(as_measured)
    timed.install(monkeypatch)
    with torch._inductor.config.patch(cpp_wrapper=in_cpp):
        compiled = compile_dynamic(measured, first)
    call = "nvgemm_aot::gemm_by_rows(" if in_cpp else "nvgemm_aot_dispatched("
    assert call in "\n".join(compiled.code)
    assert launched_at(compiled, measured, 8) == (WIDE,)
    assert launched_at(compiled, measured, 20) == (SQUARE,)
    assert launched_at(compiled, measured, 32) == ()
    assert {m for m, name in timed.asked if name == "by m"} == set(TIMES)
    others = {name for m, name in timed.asked if m != first} - {"by m"}
    assert len(others) == 1, "beside it, the best at the first size"


def test_what_loses_over_all_sizes_is_not_used_though_it_wins_at_the_first(
    measured: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(m: int, name: str) -> float:
        if name == "by m":
            return 90.0 if m == 16 else 150.0
        return {SQUARE: 100.0}.get(name, 200.0)

    Timed(times).install(monkeypatch)
    compiled = compile_dynamic(measured)
    assert "nvgemm_aot_dispatched(" not in compiled.code[0]
    assert {launched_at(compiled, measured, m) for m in (8, 20, 32)} == {(SQUARE,)}


def test_where_it_cannot_be_launched_it_is_not_used(
    measured: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.select_algorithm import extern_kernels

    # It makes Inductor know the function.
    from nvgemm_runtime.inductor.default_mode import dispatched_choices  # noqa: F401

    tried: list[tuple[Tensor, ...]] = []

    def failing(*tensors: Tensor, **_: object) -> Tensor:
        tried.append(tensors)
        raise RuntimeError("no such code for this device")

    monkeypatch.setattr(extern_kernels, "nvgemm_aot_by_m", failing)
    measured.slow_down_aten()
    compiled = compile_dynamic(measured)
    assert len(tried) == 1
    assert "nvgemm_aot_dispatched(" not in compiled.code[0]
    assert len(launched_at(compiled, measured, 20)) == 1


@pytest.mark.parametrize("hint", [16, 24])
def test_doubts_at_other_sizes_are_told(
    inductor: InductorSession,
    met: Callable[[], list[dict[str, Any]]],
    built: Path,
    tmp_path: Path,
    hint: int,
) -> None:
    """Whether or not the size that the graph is compiled for is in doubt."""
    tmp_path.chmod(0o755)
    sure = {16: TIMES[16]}
    doubted = {m: times for m, times in TIMES.items() if m != 16}
    first = write_measured(built, tmp_path / "m" / "first.nvgemm", sure)
    hot = write_measured(built, tmp_path / "m" / "hot.nvgemm", doubted, doubts=("it was hot",))
    inductor.use(first, hot)
    inductor.slow_down_aten()
    a, b = torch.randn(hint, 64), torch.randn(64, 32)
    torch._dynamo.mark_dynamic(a, 0)
    inductor.compile(torch.mm, a, b, dynamic=None)
    assert [event["doubtful"] for event in met()] == [[[str(hot)]]]


def test_it_is_timed_for_real(measured: InductorSession) -> None:
    """By this machine's clock: whatever wins, results are right, and nothing is compiled again."""
    compiled = compile_dynamic(measured)
    for m in (2, 8, 16, 20, 24, 32, 100):
        launched_at(compiled, measured, m)


def test_one_size_gets_no_such_choice(
    measured: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(as_measured)
    timed.install(monkeypatch)
    compiled = measured.compile(torch.mm, torch.randn(16, 64), torch.randn(64, 32))
    assert compiled.launched == (SQUARE,)
    assert {name for _, name in timed.asked} <= {SQUARE, WIDE, ONE, ATEN}


def test_where_one_kernel_is_best_at_every_size_there_is_no_such_choice(
    inductor: InductorSession, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the bounds of the graph."""
    tmp_path.chmod(0o755)
    inductor.use(write_measured(built, tmp_path / "m" / "one.nvgemm", ONE_KERNEL))
    timed = Timed(lambda m, name: {SQUARE: 100.0}.get(name, 200.0))
    timed.install(monkeypatch)
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    torch._dynamo.mark_dynamic(a, 0, min=8, max=24)
    compiled = inductor.compile(torch.mm, a, b, dynamic=None)
    torch.testing.assert_close(compiled.result, a @ b)
    assert "by m" not in {name for _, name in timed.asked}
    assert launched_at(compiled, inductor, 20) == (SQUARE,)


def test_tokens_of_several_sequences(
    measured: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands of other sizes are those of the expression that m is of the graph's symbol.

    Torch compiles for 2 sequences or more, so m is at least 16.
    """
    timed = Timed(as_measured)
    timed.install(monkeypatch)
    b = torch.randn(64, 32)

    def model(x: Tensor, b: Tensor) -> Tensor:
        return x.reshape(-1, 64) @ b

    x = torch.randn(2, 8, 64)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = measured.compile(model, x, b, dynamic=None)
    torch.testing.assert_close(compiled.result, model(x, b))
    assert {m for m, name in timed.asked if name == "by m"} == {16, 24, 32}
    for batch, launched in ((2, (SQUARE,)), (3, (SQUARE,)), (4, ()), (13, ())):
        x = torch.randn(batch, 8, 64)
        torch.testing.assert_close(compiled.function(x, b), model(x, b))
        assert measured.launched(compiled.function, x, b) == launched


@pytest.mark.slow
def test_rows_of_groups(
    inductor: InductorSession,
    kernel_cache: Cache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At another m, operands are timed whose groups share the rows out."""
    tmp_path.chmod(0o755)
    served = cpu_kernels.signature("tn", op=Op.GROUPED_MM, operand=DType.BF16)
    problems = [cpu_provider.problem_of(served, (m, 32, 64)) for m in TIMES]
    path = tuning_bench.build(problems, tmp_path / "built", kernel_cache)
    inductor.use(write_measured(path, tmp_path / "m" / "groups.nvgemm", TIMES, confirmed_by=()))
    from nvgemm_runtime.inductor.default_mode.dispatched_choices import DispatchChoice

    ends_at: dict[int, list[int]] = {}
    timed = Timed(as_measured)
    timed.install(monkeypatch)
    time = DispatchChoice.benchmark

    def benchmark(choice: DispatchChoice, *args: Tensor, out: Tensor) -> float:
        ends_at[args[0].shape[0]] = args[2].tolist()
        return time(choice, *args, out=out)

    monkeypatch.setattr(DispatchChoice, "benchmark", benchmark)

    def grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(a, b, offs=ends)

    def operands(m: int) -> tuple[Tensor, ...]:
        ends = torch.tensor([1, 1, m - 2, m], dtype=torch.int32)
        return torch.randn(m, 64).bfloat16(), torch.randn(4, 32, 64).bfloat16().mT, ends

    first = operands(16)
    torch._dynamo.mark_dynamic(first[0], 0)
    compiled = inductor.compile(grouped, *first, dynamic=None)
    assert "nvgemm_aot_dispatched(" in compiled.code[0]
    for m, operator in {8: WIDE, 16: SQUARE, 20: SQUARE, 32: None}.items():
        arguments = operands(m)
        close = {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(compiled.function(*arguments), grouped(*arguments), **close)
        launched = inductor.launched(compiled.function, *arguments)
        assert launched == (() if operator is None else (operator,))
    assert ends_at[8] == [2, 4, 6, 8]
    assert ends_at[32] == [8, 16, 24, 32]


GATED = {8: WIDE, 16: SQUARE, 24: SQUARE}
"""What computes a gated product; at any other m what is the best at the first, of 16 rows."""


@pytest.mark.slow
@pytest.mark.skipif(RELEASE < (2, 13), reason="no dynamic size is fused")
@pytest.mark.parametrize("unfused_ms", [1000.0, 200.0])
@pytest.mark.parametrize(("kind", "is_required"), [("gated", False), ("activation", True)])
def test_kernels_with_an_epilogue_have_no_rows_of_atens(
    inductor: InductorSession,
    kernel_cache: Cache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unfused_ms: float,
    is_required: bool,
    kind: str,
) -> None:
    """Which kernel is taken follows the table; whether one is, the race at the first size."""
    from nvgemm_runtime.inductor.fusion.unfused import Unfused

    tmp_path.chmod(0o755)
    epilogue, function = FUSED[kind]
    fused = cpu_kernels.signature("tn", operand=DType.BF16, epilogue=epilogue)
    problems = [cpu_provider.problem_of(fused, (m, 64, 64)) for m in TIMES]
    path = tuning_bench.build(problems, tmp_path / "built", kernel_cache)
    inductor.use(write_measured(path, tmp_path / "m" / "fused.nvgemm", TIMES))
    timed = Timed(as_measured)
    timed.install(monkeypatch)
    monkeypatch.setattr(Unfused, "benchmark", lambda choice, *args, out: unfused_ms)
    weight, bias = torch.randn(64, 64).bfloat16() / 8, torch.randn(64).bfloat16()

    def operands(m: int) -> Tensor:
        return torch.randn(m, 64).bfloat16()

    def call(x: Tensor) -> Tensor:
        return function(x, weight, bias)

    first = operands(16)
    torch._dynamo.mark_dynamic(first, 0)
    mode = "required" if is_required else "auto"
    settings = {"max_autotune_gemm_backends": "ATEN,TRITON"}
    with torch._inductor.config.patch(settings), nvgemm_runtime.mode(mode):
        compiled = inductor.compile(call, first, dynamic=None)
    is_fused = is_required or unfused_ms > 300
    assert ("nvgemm_aot_dispatched(" in compiled.code[0]) == is_fused
    for m in (7, 8, 9, 16, 20, 24, 25, 32, 100):
        x = operands(m)
        torch.testing.assert_close(compiled.function(x), call(x), rtol=2e-2, atol=2e-2)
        expected = (GATED.get(m, SQUARE),) if is_fused else ()
        assert inductor.launched(compiled.function, x) == expected, m


def test_a_symbol_whose_multiples_are_not_measured_is_timed_at_its_own_size(
    measured: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(lambda m, name: {16: TIMES[16], 8: TIMES[8]}.get(m, TIMES[24]).get(name, 250.0))
    timed.install(monkeypatch)

    def model(x: Tensor, b: Tensor) -> Tensor:
        return x.reshape(-1, 64) @ b

    x, b = torch.randn(3, 5, 64), torch.randn(64, 32)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = measured.compile(model, x, b, dynamic=None)
    torch.testing.assert_close(compiled.result, model(x, b))
    assert {m for m, name in timed.asked if name == "by m"} <= {15}


def test_required_means_a_kernel_at_every_size(
    measured: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(lambda m, name: TIMES[m].get(name, 1.0))
    timed.install(monkeypatch)
    with nvgemm_runtime.mode("required"):
        compiled = compile_dynamic(measured)
    assert "by m" not in {name for _, name in timed.asked}
    assert launched_at(compiled, measured, 32) == (SQUARE,)


def test_a_kernel_at_every_size_joins_by_m_where_kernels_are_required(
    inductor: InductorSession, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the bounds of the graph the table names no ATen."""
    tmp_path.chmod(0o755)
    inductor.use(write_measured(built, tmp_path / "m" / "whole.nvgemm", TWO_KERNELS))
    timed = Timed(lambda m, name: 50.0 if name == "by m" else 100.0)
    timed.install(monkeypatch)
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    torch._dynamo.mark_dynamic(a, 0, min=8, max=16)
    with nvgemm_runtime.mode("required"):
        compiled = inductor.compile(torch.mm, a, b, dynamic=None)
    torch.testing.assert_close(compiled.result, a @ b)
    for m, operator in {8: WIDE, 11: WIDE, 16: SQUARE}.items():
        assert launched_at(compiled, inductor, m) == (operator,), m


def test_where_aten_is_the_fastest_at_the_hint_it_competes_with_kernels_by_m(
    measured: InductorSession,
    monkeypatch: pytest.MonkeyPatch,
    met: Callable[[], list[dict[str, Any]]],
) -> None:
    timed = Timed(as_measured)
    timed.install(monkeypatch)
    compiled = compile_dynamic(measured, 32)
    for m, launched in {8: (WIDE,), 20: (SQUARE,), 32: (), 100: ()}.items():
        assert launched_at(compiled, measured, m) == launched, m
    assert {name for _, name in timed.asked} == {"by m", ATEN}
    (event,) = met()
    assert [told.partition(":")[0] for told in event["offered"].values()] == ["by m"]


def test_where_aten_is_the_fastest_at_the_hint_kernels_by_m_may_lose(
    measured: InductorSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    Timed(lambda m, name: 150.0 if name == "by m" and m != 32 else 100.0).install(monkeypatch)
    assert "nvgemm" not in compile_dynamic(measured, 32).code[0]


@pytest.mark.parametrize("hint", [8, 16, 32])
def test_a_trusted_ranking_of_a_graph_of_any_m_is_its_table(
    measured: InductorSession, timed: list[str], monkeypatch: pytest.MonkeyPatch, hint: int
) -> None:
    """Whichever size it is compiled for; nothing is timed."""
    monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    compiled = compile_dynamic(measured, hint)
    for m, launched in {8: (WIDE,), 16: (SQUARE,), 20: (SQUARE,), 32: (), 100: ()}.items():
        assert launched_at(compiled, measured, m) == launched, m
    assert timed == []


def test_a_trusted_ranking_that_gains_too_little_leaves_any_m_to_aten(
    inductor: InductorSession, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("NVGEMM_AOT_TRUST_RANKING", "1")
    little = {m: {**times, ATEN: min(times.values()) + 1} for m, times in ONE_KERNEL.items()}
    inductor.use(write_measured(built, tmp_path / "m" / "little.nvgemm", little))
    assert "nvgemm" not in compile_dynamic(inductor).code[0]


@pytest.mark.parametrize(
    ("count", "taken"),
    [(0, []), (1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 4]), (10, [0, 3, 6, 9])],
)
def test_sizes_are_spread_from_the_first_to_the_last(
    inductor: InductorSession, count: int, taken: list[int]
) -> None:
    from nvgemm_runtime.inductor.default_mode import dynamic_sizes

    assert dynamic_sizes._spread(range(count)) == taken


class Choice:
    """A choice of dictated times by size."""

    def __init__(self, **times: float) -> None:
        self.times = times

    def benchmark(self, *tensors: Tensor, out: Tensor) -> float:
        return self.times[f"m{out.shape[0]}"]


def at(m: int) -> Callable[[], tuple[list[Tensor], Tensor]]:
    return lambda: ([], torch.empty(m, 1))


def benchmarked(by_m: Choice, *others: tuple[Choice, bool]) -> float:
    """What the choice takes at m 1, behind others of which some can be called at any size."""
    extern = {id(choice) for choice, is_extern in others if is_extern}
    choice_timing.time_over_sizes(
        [choice for choice, _ in others],
        by_m,
        lambda choice: id(choice) in extern,
        [at(m) for m in (2, 4)],
    )
    for choice, _ in others:
        choice.benchmark(out=torch.empty(1, 1))
    return by_m.benchmark(out=torch.empty(1, 1))


def test_its_time_is_that_of_the_best_scaled_by_the_mean_ratio() -> None:
    best, other = Choice(m1=10.0, m2=20.0, m4=40.0), Choice(m1=11.0)
    assert benchmarked(Choice(m1=10.0, m2=10.0, m4=20.0), (other, True), (best, True)) == (
        pytest.approx(10.0 * (1 * 0.5 * 0.5) ** (1 / 3))
    )


def test_a_kernel_of_one_size_must_be_beaten_at_that_size_too() -> None:
    triton, aten = Choice(m1=8.0), Choice(m1=10.0, m2=20.0, m4=40.0)
    slower = benchmarked(Choice(m1=9.0, m2=10.0, m4=20.0), (aten, True), (triton, False))
    assert slower == pytest.approx(9.0)
    triton, aten = Choice(m1=8.0), Choice(m1=10.0, m2=20.0, m4=40.0)
    faster = benchmarked(Choice(m1=7.0, m2=20.0, m4=40.0), (aten, True), (triton, False))
    assert faster == pytest.approx(8.0 * (7 / 8) ** (1 / 3))


def test_without_others_it_takes_its_own_time() -> None:
    assert benchmarked(Choice(m1=3.0)) == 3.0
    assert benchmarked(Choice(m1=3.0), (Choice(m1=2.0), False)) == 3.0


def test_what_cannot_be_launched_has_no_time() -> None:
    assert benchmarked(Choice(m1=float("inf")), (Choice(m1=2.0), True)) == float("inf")


def test_a_size_at_which_one_side_cannot_be_called() -> None:
    never = float("inf")
    aten = Choice(m1=10.0, m2=never, m4=40.0)
    faster = benchmarked(Choice(m1=10.0, m2=10.0, m4=20.0), (aten, True))
    assert faster == pytest.approx(10.0 * (1 * 0.5) ** 0.5)
    for elsewhere in (20.0, never):
        aten = Choice(m1=10.0, m2=elsewhere, m4=40.0)
        assert benchmarked(Choice(m1=9.0, m2=never, m4=20.0), (aten, True)) == never
