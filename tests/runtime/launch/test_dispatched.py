"""Generated calls that choose by the rows of A: each kernel where it can, and else ATen."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cpu_provider
import nvgemm_runtime
import recording_kernels
from inductor_session import InductorSession, warnings_of
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.errors import ToolchainError
from nvgemm_runtime.gemm.problem import DType, Op
from nvgemm_runtime.launch.compiled import GeneratedCall
from nvgemm_runtime.launch.dispatched import dispatched
from nvgemm_runtime.launch.loading import native

Tensor = torch.Tensor

WHEEL = "nvgemm-kernels-model 1.0"

SQUARE, WIDE, ONE = "Cpu_16x16", "Cpu_8x32", "Cpu_1x1"


@pytest.fixture(scope="module")
def built(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> BuiltBundle:
    """Three kernels for row-major fp32 matrices; two are aligned to 16 bytes."""
    return recording_kernels.build_recording(
        [cpu_provider.problem()],
        tmp_path_factory.mktemp("three"),
        kernel_cache,
        candidates=len(cpu_provider.TILES),
    )


@pytest.fixture
def ids(inductor: InductorSession, built: BuiltBundle) -> dict[str, str]:
    """By operator, the kernels that this process finds."""
    inductor.use(built.path)
    return {kernel.operator: kernel.id for kernel in built.header.kernels}


def call_of(ids: dict[str, str], bounds: tuple[int, ...], *operators: str) -> GeneratedCall:
    """A call in whose segments these operators compute; ATen where the name is empty."""
    kernels = tuple(operator and ids[operator] for operator in operators)
    return dispatched(torch.mm, bounds, kernels, dict.fromkeys(filter(None, kernels), WHEEL))


def compute(gemm: GeneratedCall, m: int, a: Tensor | None = None) -> None:
    a, b = torch.randn(m, 64) if a is None else a, torch.randn(64, 32)
    out = torch.full((m, 32), float("nan"))
    assert gemm(a, b, out=out) is out
    torch.testing.assert_close(out, a @ b)


def test_the_rows_decide_at_each_call(
    inductor: InductorSession, ids: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    gemm = call_of(ids, (4, 8, 16), "", SQUARE, WIDE, "")
    for _ in range(2):
        inductor.record.forget()
        for m in (3, 4, 15, 7, 16, 8):
            compute(gemm, m)
        assert inductor.record.lines() == [SQUARE, WIDE, SQUARE, WIDE]
    assert warnings_of(caplog) == []


def test_kernels_are_loaded_when_they_are_first_called(
    inductor: InductorSession, ids: dict[str, str]
) -> None:
    from nvgemm_runtime.launch.loading.loader import LOADER

    gemm = call_of(ids, (8,), SQUARE, WIDE)
    assert [LOADER.get(id_) for id_ in ids.values()] == [None] * 3
    compute(gemm, 4)
    assert LOADER.get(ids[SQUARE]) is not None
    assert LOADER.get(ids[WIDE]) is None


def test_operands_that_are_unaligned_at_one_call_and_aligned_at_the_next(
    inductor: InductorSession, ids: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    gemm = call_of(ids, (8,), SQUARE, WIDE)
    unaligned = torch.randn(4 * 64 + 1)[1:].view(4, 64)
    launched = []
    for a in (unaligned, None, unaligned, None):
        inductor.record.forget()
        compute(gemm, 4, a)
        launched.append(inductor.record.lines())
    assert launched == [[], [SQUARE], [], [SQUARE]]
    assert warnings_of(caplog) == []


def test_a_kernel_that_is_gone_costs_its_rows_alone(
    inductor: InductorSession, ids: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    gemm = call_of({**ids, WIDE: "f" * 64}, (8, 16), SQUARE, WIDE, ONE)
    for m in (9, 4, 9, 20, 9):
        compute(gemm, m)
    assert inductor.record.lines() == [SQUARE, ONE]
    (said,) = warnings_of(caplog)
    assert WHEEL in said
    assert "f" * 12 in said
    assert "no installed bundle" in nvgemm_runtime.stats().failed["f" * 64]


def test_a_kernel_that_fails_in_the_middle_of_a_run_costs_its_rows_alone(
    inductor: InductorSession,
    ids: dict[str, str],
    built: BuiltBundle,
    kernel_cache: Cache,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raising = recording_kernels.build_recording(
        [cpu_provider.problem()], tmp_path / "raising", kernel_cache, recording_kernels.Raising()
    )
    inductor.use(built.path, raising.path)
    (failing,) = raising.header.kernels
    gemm = call_of({**ids, "failing": failing.id}, (8,), SQUARE, "failing")
    compute(gemm, 4)
    inductor.record.forget()
    for m in (9, 4, 10, 4):
        compute(gemm, m)
    assert inductor.record.lines() == [failing.operator, SQUARE, SQUARE], "it is not tried again"
    (said,) = warnings_of(caplog)
    assert WHEEL in said
    assert "out of patience" in said
    assert "out of patience" in nvgemm_runtime.stats().failed[failing.id]


def test_kernels_of_one_wheel_that_fail_for_other_reasons_are_each_warned_of(
    inductor: InductorSession,
    kernel_cache: Cache,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raising = recording_kernels.build_recording(
        [cpu_provider.problem()], tmp_path / "raising", kernel_cache, recording_kernels.Raising()
    )
    inductor.use(raising.path)
    nvgemm_runtime.reset_stats()  # other tests let the same kernel fail
    ids = {"gone": "0e" * 32, "lost": "0d" * 32, "failing": raising.header.kernels[0].id}
    gemm = call_of(ids, (8, 16), *ids)
    for m in (4, 9, 20):
        compute(gemm, m)
    gone, failing = warnings_of(caplog)
    assert "no installed bundle" in gone
    assert "out of patience" in failing
    assert nvgemm_runtime.stats().failed.keys() >= set(ids.values())
    assert "out of patience" in str(nvgemm_runtime.stats())


@pytest.mark.parametrize("short_at", [0, 1, 2])
def test_a_kernel_without_memory_for_its_workspace_is_tried_again(
    inductor: InductorSession,
    short_at: int,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first launch of a kernel goes another way than those after it."""
    loaded = native.load()
    calls = itertools.count()

    def short(call: Callable[..., Any]) -> Callable[..., Any]:
        def or_call(*arguments: object) -> Any:
            if next(calls) == short_at:
                raise torch.OutOfMemoryError("64 bytes cannot be allocated")
            return call(*arguments)

        return or_call

    def dispatch(*arguments: object) -> Any:
        done = loaded.try_dispatch(*arguments)
        if done is True and next(calls) == short_at:
            raise torch.OutOfMemoryError("64 bytes cannot be allocated")
        return done

    library = replace(loaded, try_launch=short(loaded.try_launch), try_dispatch=dispatch)
    monkeypatch.setattr(native, "load", lambda: library)
    gemm = call_of(ids, (), SQUARE)
    for _ in range(3):
        compute(gemm, 4)
    launched = inductor.record.lines()
    # The one that fails in this test's table was launched before it failed.
    assert launched == [SQUARE] * (2 if short_at == 0 else 3)
    (said,) = warnings_of(caplog)
    assert "64 bytes cannot be allocated; ATen computes this GEMM" in said


def test_without_the_native_launcher_aten_computes(
    inductor: InductorSession,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> native.Native:
        raise ToolchainError("the native part is missing")

    monkeypatch.setattr(native, "load", fail)
    gemm = call_of(ids, (8,), SQUARE, WIDE)
    for m in (4, 9, 4):
        compute(gemm, m)
    assert inductor.record.lines() == []
    (said,) = warnings_of(caplog)
    assert WHEEL in said
    assert "the native part is missing" in said


def test_switched_off_means_aten_and_no_word(
    inductor: InductorSession,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("NVGEMM_AOT", "off")
    gemm = call_of(ids, (8,), SQUARE, WIDE)
    for m in (4, 9):
        compute(gemm, m)
    assert inductor.record.lines() == []
    assert warnings_of(caplog) == []


def test_shapes_that_do_not_multiply_fail_as_they_do_with_aten(
    inductor: InductorSession, ids: dict[str, str]
) -> None:
    gemm = call_of(ids, (), SQUARE)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gemm(torch.randn(16, 64), torch.randn(60, 32), out=torch.empty(16, 32))


def test_threads_that_call_at_different_sizes(
    inductor: InductorSession, ids: dict[str, str]
) -> None:
    gemm = call_of(ids, (4, 8, 12), "", SQUARE, WIDE, ONE)
    sizes = (2, 4, 7, 8, 11, 12, 40)
    results: dict[int, list[Tensor]] = {m: [] for m in sizes}
    operands = {m: (torch.randn(m, 64), torch.randn(64, 32)) for m in sizes}
    barrier = threading.Barrier(len(sizes))

    def work(m: int) -> None:
        barrier.wait()
        for _ in range(20):
            results[m].append(gemm(*operands[m], out=torch.full((m, 32), float("nan"))))

    threads = [threading.Thread(target=work, args=(m,)) for m in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for m, (a, b) in operands.items():
        torch.testing.assert_close(results[m], [a @ b] * 20)
    lines = inductor.record.lines()
    assert [lines.count(name) for name in (SQUARE, WIDE, ONE)] == [40, 40, 40]


def test_a_sum_and_its_options(inductor: InductorSession, fused_bundle: BuiltBundle) -> None:
    """The kernel takes A, B and what is added; ATen the tensors in its own order, and options."""
    inductor.use(fused_bundle.path)
    (id_, *_) = [
        kernel.id
        for kernel in fused_bundle.header.kernels
        if kernel.signature.key == "mm/tn/bf16xbf16/fp32/bf16/bias"
    ]
    calls: list[Tensor] = []

    def aten(*tensors: Tensor, out: Tensor, **options: object) -> Tensor:
        calls.append(out)
        return torch.addmm(*tensors, out=out, **options)

    gemm = dispatched(aten, (8,), (id_, ""), {id_: WHEEL}, (1, 2, 0))
    for m in (4, 9):
        bias, a, b = torch.randn(32), torch.randn(m, 64), torch.randn(32, 64).t()
        bias, a, b = bias.bfloat16(), a.bfloat16(), b.bfloat16()
        out = torch.empty(m, 32, dtype=torch.bfloat16)
        gemm(bias, a, b, out=out, beta=1)
        torch.testing.assert_close(out, torch.addmm(bias, a, b))
    assert len(calls) == 1


def test_debugging_checks_the_ends_of_groups(
    inductor: InductorSession, fused_bundle: BuiltBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    inductor.use(fused_bundle.path)
    (id_, *_) = [
        kernel.id
        for kernel in fused_bundle.header.kernels
        if kernel.signature.op is Op.GROUPED_MM
        and kernel.signature.a is DType.BF16
        and kernel.signature.epilogue is None
    ]
    monkeypatch.setenv("NVGEMM_AOT_DEBUG", "1")

    def aten(*tensors: Tensor, out: Tensor, **_: object) -> Tensor:
        raise AssertionError("the kernel computes")

    gemm = dispatched(aten, (), (id_,), {id_: WHEEL}, (0, 1, 2))
    a, b = torch.randn(8, 64).bfloat16(), torch.randn(2, 32, 64).bfloat16().mT
    out = torch.empty(8, 32, dtype=torch.bfloat16)
    gemm(a, b, torch.tensor([3, 8], dtype=torch.int32), out=out)
    with pytest.raises(ValueError, match="group 1 ends at row 9"):
        gemm(a, b, torch.tensor([3, 9], dtype=torch.int32), out=out)


def test_a_forked_child_goes_on_with_its_parents_call(
    inductor: InductorSession, ids: dict[str, str], forked: Callable[[Callable[[], None]], int]
) -> None:
    gemm = call_of(ids, (8,), SQUARE, WIDE)
    compute(gemm, 4)

    def child() -> None:
        compute(gemm, 4)
        compute(gemm, 9)

    assert forked(child) == 0
    assert inductor.record.lines() == [SQUARE, SQUARE, WIDE]


@pytest.fixture
def forked() -> Callable[[Callable[[], None]], int]:
    """Runs a function in a forked child and gives its status."""
    import os

    def run(function: Callable[[], None]) -> int:
        child = os.fork()
        if not child:
            status = 1
            try:
                function()
                status = 0
            finally:
                os._exit(status)
        return os.waitpid(child, 0)[1]

    return run
